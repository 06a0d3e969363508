"""The Log view: events and findings, newest last."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddpwatch.tui.canvas import Canvas, Row
from ddpwatch.tui.events import Event
from ddpwatch.tui.text import clean, shorten


def paint_log(events: Sequence[Event], what: str, width: int, height: int, first: int, selected: int) -> list[Row]:
    """Heading and lines from the ``first`` on."""
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    canvas.put(1, 0, shorten(f"{what}, {len(events)} lines", width - 2), "heading-strong")
    if not events:
        canvas.put(1, 1, "nothing yet", "dim")
    for y, event in enumerate(events[first : first + max(height - 1, 0)], start=1):
        here = first + y - 1 == selected
        x = canvas.put(0, y, "▶" if here else " ", "warn")
        x = canvas.put(x, y, f"{clock_time(event.at_ns)} ", "selected" if here else "dim")
        step = "" if event.step is None else f"step {event.step}"
        if width >= 60:
            x = canvas.put(x, y, f"{event.kind:<8}{step:<11}", "dim")
        canvas.put(x, y, clean(event.text, max(width - x - 1, 0)), event.severity)
    return canvas.rows()


def clock_time(at_ns: int) -> str:
    """Time of day, here."""
    return time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9)) if at_ns else "–"
