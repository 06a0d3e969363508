"""The screen before the first frame."""

from __future__ import annotations

from rich.cells import cell_len

from ddpwatch.tui.models.overview import Link, LinkState
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.text import shorten_name, wrap

MOST_LINES = 4  # of a sentence
MOST_COLUMNS = 100


def paint_waiting(link: LinkState, width: int, height: int) -> list[Row]:
    """Returns what the dashboard waits for, in the middle of the screen."""
    canvas = Canvas(width, height)
    lines = _lines(link, width)
    top = max((canvas.height - len(lines)) // 2, 0)
    for y, (text, style) in enumerate(lines, start=top):
        shown = shorten_name(text, width)
        canvas.put(max((width - cell_len(shown)) // 2, 0), y, shown, style)
    return canvas.rows()


def _lines(link: LinkState, width: int) -> Row:
    if link.link is not Link.WAITING:
        hint = "no rank has reported yet" if link.link is not Link.ENDED else "it ended before any rank reported"
        return [(f"attached to {shorten_name(link.name, max(width - 12, 8))}", "strong"), (hint, "dim")]
    if link.job:
        return [
            ("nothing is watched yet", "strong"),
            *_wrapped(link.why.text, width, "text"),
            *_wrapped(link.why.hint, width, "good"),
            ("", "text"),
            (link.job, "dim"),
            ("press 7 for its output", "dim"),
        ]
    return [
        ("waiting for a run", "strong"),
        ("", "text"),
        ("call ddpwatch.watch(model) in your script, and start it as usual", "good"),
        ("or, without touching it: ddpwatch run -- torchrun … train.py", "dim"),
        ("", "text"),
        (f"looking in {link.directory}", "dim"),
    ]


def _wrapped(text: str, width: int, style: str) -> Row:
    return [(line, style) for line in wrap(shorten_name(text, 1000), min(width - 4, MOST_COLUMNS), MOST_LINES) if line]
