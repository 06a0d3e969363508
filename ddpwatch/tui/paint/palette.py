"""The styles by name, in several colour themes. Bars have Okabe and Ito's colours, for the colour-blind.

A bar's glyphs have the colour of the bar: with colour it is solid, without colour its texture identifies it. Exposed
communication and waits are hatched everywhere. A style named ``backward/waits`` is for cells whose upper half shows
compute and whose lower half shows communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from rich.color import Color, blend_rgb
from rich.style import Style

from ddpwatch.tui.paint.glyphs import COMM, HALVES, PHASES


@dataclass(frozen=True, slots=True)
class Scheme:
    """The colours of one theme.

    Attributes:
        waits: Backgrounds of waiting for the last rank, hidden and exposed.
        heat: Backgrounds of a heatmap's levels, lowest first.
    """

    background: str
    raised: str
    text: str
    strong: str
    dim: str
    faint: str
    ink: str
    forward: str
    backward: str
    optimizer: str
    data: str
    comm: tuple[str, str]
    exposed: str
    on_exposed: str
    waits: tuple[str, str]
    hook: str
    good: str
    warn: str
    bad: str
    heat: tuple[str, str, str, str, str, str]


DARK = Scheme(
    background="#0d1117", raised="#161b22", text="#c9d1d9", strong="#f0f6fc", dim="#8b949e", faint="#484f58",
    ink="#0d1117", forward="#56b4e9", backward="#0072b2", optimizer="#cc79a7", comm=("#009e73", "#007a5a"),
    exposed="#d55e00", on_exposed="#0d1117", hook="#f0e442", good="#3fc79a", warn="#e69f00", bad="#ff7b3a",
    data="#b8860b", waits=("#084237", "#e69f00"),
    heat=("#16202f", "#1f3350", "#3b6fa8", "#8c8c5a", "#e69f00", "#d55e00"),
)  # fmt: skip
LIGHT = Scheme(
    background="#ffffff", raised="#eaeef2", text="#24292f", strong="#000000", dim="#57606a", faint="#afb8c1",
    ink="#ffffff", forward="#56b4e9", backward="#0072b2", optimizer="#b0588a", comm=("#009e73", "#00705a"),
    exposed="#d55e00", on_exposed="#ffffff", hook="#9a6700", good="#116329", warn="#8a5a00", bad="#b33c00",
    data="#e0b030", waits=("#b3e2d5", "#e69f00"),
    heat=("#eef3f8", "#cfe0f0", "#8fb8de", "#d9cf7a", "#e69f00", "#d55e00"),
)  # fmt: skip
CONTRAST = Scheme(
    background="#000000", raised="#1c1c1c", text="#ffffff", strong="#ffffff", dim="#d0d0d0", faint="#909090",
    ink="#000000", forward="#7cc8ff", backward="#2f8fff", optimizer="#ff9ad5", comm=("#00d08f", "#00a070"),
    exposed="#ff6a00", on_exposed="#000000", hook="#ffff00", good="#00ff9c", warn="#ffc400", bad="#ff8a50",
    data="#ffe066", waits=("#005c3f", "#ffc400"),
    heat=("#101820", "#203c60", "#4080c0", "#b0b060", "#ffc400", "#ff6a00"),
)  # fmt: skip
SIXTEEN = Scheme(  # exactly the sixteen colours, so that no terminal has to approximate
    background="#000000", raised="#000000", text="#c0c0c0", strong="#ffffff", dim="#c0c0c0", faint="#808080",
    ink="#000000", forward="#00ffff", backward="#0000ff", optimizer="#ff00ff", comm=("#00ff00", "#008000"),
    exposed="#ff0000", on_exposed="#ffffff", hook="#ffff00", good="#00ff00", warn="#ffff00", bad="#ff0000",
    data="#808000", waits=("#808080", "#ffff00"),
    heat=("#000000", "#000080", "#0000ff", "#808000", "#ffff00", "#ff0000"),
)  # fmt: skip
SCHEMES: dict[str, Scheme | None] = {
    "dark": DARK, "light": LIGHT, "contrast": CONTRAST, "ansi": SIXTEEN, "none": None,
}  # fmt: skip
CellStyle = tuple[str, str, bool]  # foreground, background, bold

_FRESH_WHEN_STALE = 0.6  # the share of its colour that a stale text keeps
_ALWAYS_FRESH = ("badge", "good", "warn", "bad", "strong", "heading-", "cursor", "selected")
_REVERSED = ("badge", "selected", "cursor", "exposed-label", "waits-exposed-label")


@cache
def styles(stale: bool = False, theme: str = "dark") -> Mapping[str, Style]:
    """Returns every style by name; ``stale`` gives faded ones.

    Args:
        stale: Whether the run sends no more frames.
        theme: One of `SCHEMES`; "none" has no colour at all, only bold and reversed.
    """
    scheme = SCHEMES[theme]
    if scheme is None:
        return {name: _plain(name, style[2], stale) for name, style in _cell_styles(DARK).items()}
    return {name: _style(name, style, stale, scheme.background) for name, style in _cell_styles(scheme).items()}


def bar_colours(theme: str) -> Mapping[str, str] | None:
    """Returns the colours of tabs and keys below the views; None without colour."""
    scheme = SCHEMES[theme]
    if scheme is None:
        return None
    return {
        "background": scheme.background, "text": scheme.dim, "tab": scheme.forward, "tab-text": scheme.ink,
        "key": scheme.dim, "key-text": scheme.ink,
    }  # fmt: skip


def _cell_styles(s: Scheme) -> Mapping[str, CellStyle]:
    bars = _bars(s)
    return {**_texts(s), **bars, **_halves(bars, s.background), **_signs(s)}


def _texts(s: Scheme) -> dict[str, CellStyle]:
    base = s.background
    return {
        "text": (s.text, base, False), "dim": (s.dim, base, False), "faint": (s.faint, base, False),
        "strong": (s.strong, base, True), "good": (s.good, base, True), "warn": (s.warn, base, True),
        "bad": (s.bad, base, True), "heading": (s.dim, s.raised, False), "heading-strong": (s.strong, s.raised, True),
        "heading-warn": (s.warn, s.raised, True), "heading-bad": (s.bad, s.raised, True),
        "heading-chart": (s.forward, s.raised, False), "heading-faint": (s.faint, s.raised, False),
        "axis": (s.dim, base, False), "idle": (s.faint, base, False),
    }  # fmt: skip


def _bars(s: Scheme) -> dict[str, CellStyle]:
    cells: dict[str, CellStyle] = {
        "forward": (s.forward, s.forward, False), "forward-label": ("#0d1117", s.forward, False),
        "backward": (s.backward, s.backward, False), "backward-label": ("#ffffff", s.backward, False),
        "optimizer": (s.optimizer, s.optimizer, False), "optimizer-label": ("#0d1117", s.optimizer, False),
        "data": (s.data, s.data, False), "data-label": ("#0d1117", s.data, False),
        "exposed": (s.on_exposed, s.exposed, False), "exposed-label": ("#ffffff", s.exposed, True),
        "exposed-mark": (s.exposed, s.background, True), "history": (s.backward, s.background, False),
        "history-exposed": (s.exposed, s.background, True), "chart": (s.forward, s.background, False),
        "waits": (s.comm[0], s.waits[0], False), "waits-label": (s.strong, s.waits[0], True),
        "waits-exposed": ("#0d1117", s.waits[1], False), "waits-exposed-label": ("#0d1117", s.waits[1], True),
    }  # fmt: skip
    for name, colour in zip(("comm-a", "comm-b"), s.comm, strict=True):
        cells |= {name: (colour, colour, False), f"{name}-label": ("#ffffff", colour, True)}
    for level, colour in enumerate(s.heat):
        highest = level == len(s.heat) - 1
        cells[f"heat-{level}"] = (colour if highest else s.faint if level < 2 else s.ink, colour, False)
    return cells


def _halves(bars: Mapping[str, CellStyle], background: str) -> dict[str, CellStyle]:
    """Returns half cells: the colour of compute in front of the colour of communication."""
    upper = {"idle": background, **{phase: bars[phase][1] for phase in PHASES}}
    lower = {"none": background, **{name: bars[name][1] for name in COMM}}
    return {f"{above}{HALVES}{below}": (upper[above], lower[below], False) for above, below in product(upper, lower)}


def _signs(s: Scheme) -> dict[str, CellStyle]:
    return {
        "hook": (s.hook, s.background, False), "mark": (s.strong, s.background, True),
        "launch": (s.comm[0], s.background, True), "cursor": (s.ink, s.strong, True),
        "selected": (s.ink, s.dim, True), "badge-live": (s.ink, s.good, True), "badge-paused": (s.ink, s.hook, True),
        "badge-replay": (s.ink, s.forward, True), "badge-ended": (s.ink, s.dim, True),
        "badge-bad": ("#ffffff", s.exposed, True), "badge-wait": (s.ink, s.warn, True),
    }  # fmt: skip


def _style(name: str, style: CellStyle, stale: bool, base: str) -> Style:
    foreground, background, bold = style
    if stale and not name.startswith(_ALWAYS_FRESH):
        foreground, background = _faded(foreground, base), _faded(background, base)
    return Style(color=foreground, bgcolor=background, bold=bold or None)


def _plain(name: str, bold: bool, stale: bool) -> Style:
    faded = stale and not name.startswith(_ALWAYS_FRESH)
    return Style(bold=(bold and not faded) or None, dim=faded or None, reverse=name.startswith(_REVERSED) or None)


def _faded(colour: str, base: str) -> str:
    below, own = Color.parse(base).get_truecolor(), Color.parse(colour).get_truecolor()
    return blend_rgb(below, own, _FRESH_WHEN_STALE).hex
