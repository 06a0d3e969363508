"""Style names and what they look like: the Okabe-Ito colours, which survive colour-blindness.

Bars are drawn in glyphs of the bar's own colour on that colour: solid where there is colour, told apart by
texture where there is none. Exposed communication is hatched everywhere.
"""

from __future__ import annotations

from rich.color import Color, blend_rgb
from rich.style import Style

BACKGROUND = "#0d1117"
_TEXT, _DIM, _FAINT, _INK = "#c9d1d9", "#8b949e", "#484f58", "#0d1117"
_SKY, _BLUE, _PURPLE = "#56b4e9", "#0072b2", "#cc79a7"
_GREEN, _DARK_GREEN, _VERMILLION = "#009e73", "#007a5a", "#d55e00"
_ORANGE, _YELLOW, _RED = "#e69f00", "#f0e442", "#ff7b3a"
_RAISED = "#161b22"

_LOOK: dict[str, tuple[str, str, bool]] = {  # foreground, background, bold
    "text": (_TEXT, BACKGROUND, False),
    "dim": (_DIM, BACKGROUND, False),
    "faint": (_FAINT, BACKGROUND, False),
    "strong": ("#f0f6fc", BACKGROUND, True),
    "good": ("#3fc79a", BACKGROUND, True),
    "warn": (_ORANGE, BACKGROUND, True),
    "bad": (_RED, BACKGROUND, True),
    "forward": (_SKY, _SKY, False),
    "forward-label": (_INK, _SKY, False),
    "backward": (_BLUE, _BLUE, False),
    "backward-label": ("#ffffff", _BLUE, False),
    "optimizer": (_PURPLE, _PURPLE, False),
    "optimizer-label": (_INK, _PURPLE, False),
    "comm-a": (_GREEN, _GREEN, False),
    "comm-a-label": ("#ffffff", _GREEN, True),
    "comm-b": (_DARK_GREEN, _DARK_GREEN, False),
    "comm-b-label": ("#ffffff", _DARK_GREEN, True),
    "exposed": (_INK, _VERMILLION, False),
    "exposed-label": ("#ffffff", _VERMILLION, True),
    "exposed-mark": (_VERMILLION, BACKGROUND, True),
    "hook": (_YELLOW, BACKGROUND, False),
    "launch": (_GREEN, BACKGROUND, True),
    "idle": (_FAINT, BACKGROUND, False),
    "axis": (_DIM, BACKGROUND, False),
    "chart": (_SKY, BACKGROUND, False),
    "history": (_BLUE, BACKGROUND, False),
    "history-exposed": (_VERMILLION, BACKGROUND, True),
    "heading": (_DIM, _RAISED, False),
    "heading-strong": ("#f0f6fc", _RAISED, True),
    "heading-warn": (_ORANGE, _RAISED, True),
    "heading-bad": (_RED, _RAISED, True),
    "key": (_INK, _DIM, True),
    "badge-live": (_INK, "#3fc79a", True),
    "badge-paused": (_INK, _YELLOW, True),
    "badge-replay": (_INK, _SKY, True),
    "badge-ended": (_INK, _DIM, True),
    "badge-bad": ("#ffffff", _VERMILLION, True),
    "badge-wait": (_INK, _ORANGE, True),
}

_FRESH_WHEN_STALE = 0.6  # how much of its own colour a stale thing keeps
_ALWAYS_FRESH = ("badge", "key", "good", "warn", "bad", "strong", "heading-")


def styles(stale: bool = False) -> dict[str, Style]:
    """Every style by name; ``stale`` gives those of a view that is no longer fed."""
    return {name: _style(name, look, stale) for name, look in _LOOK.items()}


def _style(name: str, look: tuple[str, str, bool], stale: bool) -> Style:
    foreground, background, bold = look
    if stale and not name.startswith(_ALWAYS_FRESH):
        foreground, background = _faded(foreground), _faded(background)
    return Style(color=foreground, bgcolor=background, bold=bold or None)


def _faded(colour: str) -> str:
    base, own = Color.parse(BACKGROUND).get_truecolor(), Color.parse(colour).get_truecolor()
    return blend_rgb(base, own, _FRESH_WHEN_STALE).hex
