"""The legend of a timeline: what is drawn, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

from ddpwatch.tui.models.lanes import Lane
from ddpwatch.tui.paint.axis import Axis
from ddpwatch.tui.paint.canvas import Canvas, Row, Run
from ddpwatch.tui.paint.glyphs import COMM, HALVES, HOOK_LEFT, LAUNCH, MARK, PHASES
from ddpwatch.tui.text import Field, fit

_ENTRIES = (  # style, glyph, name (of waits: see `_waits_named`), priority
    ("exposed", COMM["exposed"] * 2, "exposed", 0), ("waits-exposed", COMM["waits-exposed"] * 2, "", 1),
    ("forward", PHASES["forward"] * 2, "forward", 3), ("backward", PHASES["backward"] * 2, "backward", 3),
    ("optimizer", PHASES["optimizer"] * 2, "optimizer", 4), ("comm-a", COMM["comm-a"] * 2, "communication", 2),
    ("waits", COMM["waits"] * 2, "waits behind compute", 5), ("hook", HOOK_LEFT, "gradient ready", 6),
    ("data", PHASES["data"] * 2, "data", 7), ("launch", LAUNCH, "launch", 2), ("mark", MARK, "mark", 8),
)  # fmt: skip


def legend(canvas: Canvas, lanes: Iterable[Lane], axis: Axis, width: int) -> Row:
    """Returns the meaning of the glyphs that are drawn, as far as there is room.

    Args:
        canvas: With the lanes painted.
        lanes: These lanes.
        axis: Their axis.
        width: The room.
    """
    styles = frozenset(canvas.styles())
    waits = _waits_named(lanes, axis) if any("waits-exposed" in style for style in styles) else ""
    return list(_legend(styles, waits, width))


@lru_cache(maxsize=64)
def _legend(styles: frozenset[str], waits: str, width: int) -> tuple[Run, ...]:
    drawn = _drawn(styles)
    shown = [
        (f"{glyph} {name or waits}", priority, style) for style, glyph, name, priority in _ENTRIES if style in drawn
    ]
    kept = fit([Field(text, text, priority, style) for text, priority, style in shown], width)
    return tuple(run for text, style in kept for run in _entry(text, style))


def _drawn(styles: Iterable[str]) -> set[str]:
    halves = {half for style in styles for half in style.split(HALVES)}
    names = {half.removesuffix("-label") for half in halves}
    return names | ({"comm-a"} if "comm-b" in names else set())


def _waits_named(lanes: Iterable[Lane], axis: Axis) -> str:
    """Returns whom the lanes wait for, of what is long enough to be drawn."""
    waited: dict[int, int] = {}
    least_ns = axis.least_ns
    for start, transfer, _, rank in filter(None, chain.from_iterable(lane.flights for lane in lanes)):
        if transfer - start >= least_ns and rank is not None:
            waited[rank] = waited.get(rank, 0) + transfer - start
    if not waited:
        return "waits"
    most = max(waited, key=waited.__getitem__)
    return f"waits{'' if len(waited) == 1 else ', mostly'} for rank {most}"


def _entry(text: str, style: str) -> Row:
    glyph, _, name = text.partition(" ")
    return [(glyph, style), (f" {name}", "dim")] if glyph and name else [(text, "text")]
