"""The Log view: events and findings, newest last."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddpwatch.tui.models.log import LogLine
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.text import clean, shorten

_ROOMY = 60


def paint_log(
    events: Sequence[LogLine],
    lists: Sequence[tuple[str, int]],
    listed: int,
    size: tuple[int, int],
    first: int,
    selected: int,
) -> list[Row]:
    """Heading and lines.

    Args:
        events: The lines.
        lists: What can be listed, and how many lines that has.
        listed: Which of these it is.
        size: Columns and rows of the screen.
        first: First line shown.
        selected: The selected one.
    """
    width, height = size
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    x = 1
    for place, (name, count) in enumerate(lists):
        text = shorten(f"{name} {count}", max(width - x - 1, 0))
        x = canvas.put(x, 0, text, "heading-strong" if place == listed else "heading") + 3
    if not events:
        canvas.put(1, 1, "nothing yet", "dim")
    for y, event in enumerate(events[first : first + max(height - 1, 0)], start=1):
        _paint_event(canvas, event, y, first + y - 1 == selected)
    return canvas.rows()


def _paint_event(canvas: Canvas, event: LogLine, y: int, here: bool) -> None:
    x = canvas.put(0, y, "▶" if here else " ", "warn")
    x = canvas.put(x, y, f"{clock_time(event.at_ns)} ", "selected" if here else "dim")
    if event.kind != "output" and canvas.width >= _ROOMY:
        step = "" if event.step is None else f"step {event.step}"
        x = canvas.put(x, y, f"{event.kind:<8}{step:<11}", "dim")
    canvas.put(x, y, clean(event.text, max(canvas.width - x - 1, 0)), event.severity)


def clock_time(at_ns: int) -> str:
    """Time of day, here."""
    return time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9)) if at_ns else "–"
