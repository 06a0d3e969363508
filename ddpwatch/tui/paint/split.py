"""Where a step goes: its phases per rank, as means over the newest full steps."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.common.text import ms
from ddpwatch.tui.models.overview import RankLine
from ddpwatch.tui.paint.canvas import Canvas, Row

PHASE_STYLES = (  # phase, heading in full and in short, style, glyph
    ("data", "data", "data", "data", "≈"),
    ("between", "gap", "gap", "idle", "·"),
    ("forward", "forward", "fwd", "forward", "▒"),
    ("backward", "backward", "bwd", "backward", "▓"),
    ("exposed_comm", "exposed", "exp", "exposed", "╱"),
    ("optimizer", "optim", "opt", "optimizer", "░"),
    ("other", "rest", "rest", "idle", "·"),
)
PHASE_NAMES = {phase: full for phase, full, *_ in PHASE_STYLES}
_GUTTER = 5


def rows_for(ranks: int) -> int:
    """Returns the most rows that the panel can use."""
    return 2 + 2 * max(ranks, 1)


def split_room(height: int) -> int:
    """Returns how many ranks a panel of that height shows."""
    return max(height - 1, 0) // 2


def paint_split(ranks: Sequence[RankLine], width: int, height: int) -> list[Row]:
    """Returns a heading, and per rank its phases in ms and a bar of them, all to the same scale."""
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    canvas.put(1, 0, "where a step goes, ms", "heading")
    cell = max((width - _GUTTER) // len(PHASE_STYLES), 1)
    for column, (_, full, short, _, _) in enumerate(PHASE_STYLES):
        canvas.put(_GUTTER + column * cell, 1, f"{full if cell > 8 else short[: cell - 1]:>{cell - 1}}", "dim")
    shown = ranks[: split_room(height)]
    longest = max((sum(row.summary.phases_ns.values()) for row in shown), default=0)
    for index, row in enumerate(shown):
        _paint_rank(canvas, row, 2 + 2 * index, cell, longest)
    return canvas.rows()


def _paint_rank(canvas: Canvas, row: RankLine, y: int, cell: int, longest: float) -> None:
    phases = row.summary.phases_ns
    canvas.put(1, y, f"{row.rank:>3}", "strong")
    x = float(_GUTTER)
    room = canvas.width - _GUTTER - 1
    for column, (phase, _, _, style, glyph) in enumerate(PHASE_STYLES):
        text_style = "warn" if phase == "exposed_comm" and phases.get(phase) else "text"
        canvas.put(_GUTTER + column * cell, y, f"{_fitted(phases.get(phase), cell - 1):>{cell - 1}}", text_style)
        end = x + (phases.get(phase, 0.0) * room / longest if longest else 0.0)
        canvas.fill(round(x), round(end), y + 1, glyph, style)
        x = end


def _fitted(ns: float | None, width: int) -> str:
    """Formats in ms; whole ones where there is no room for tenths."""
    text = ms(ns)
    return text if ns is None or len(text) <= width else f"{ns / 1e6:.0f}"
