"""The Log view: lists of lines, newest last."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddpwatch.tui.models.log import LogLine
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.text import clean, shorten

_ROOMY = 60


def paint_log(
    lines: Sequence[LogLine],
    lists: Sequence[tuple[str, int]],
    list_shown: int,
    size: tuple[int, int],
    first: int,
    selected: int,
) -> list[Row]:
    """The names of the lists, and the lines of one.

    Args:
        lines: The lines of the list shown.
        lists: The name and length of each list.
        list_shown: The index of the list shown.
        size: Columns and rows of the body.
        first: The index of the first line in view.
        selected: The index of the selected line.
    """
    width, height = size
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    x = 1
    for index, (name, count) in enumerate(lists):
        text = shorten(f"{name} {count}", max(width - x - 1, 0))
        x = canvas.put(x, 0, text, "heading-strong" if index == list_shown else "heading") + 3
    if not lines:
        canvas.put(1, 1, "nothing yet", "dim")
    for y, line in enumerate(lines[first : first + max(height - 1, 0)], start=1):
        _paint_line(canvas, line, y, first + y - 1 == selected)
    return canvas.rows()


def _paint_line(canvas: Canvas, line: LogLine, y: int, selected: bool) -> None:
    x = canvas.put(0, y, "▶" if selected else " ", "warn")
    x = canvas.put(x, y, f"{_time_of_day(line.at_ns)} ", "selected" if selected else "dim")
    if line.kind != "output" and canvas.width >= _ROOMY:
        step = "" if line.step is None else f"step {line.step}"
        x = canvas.put(x, y, f"{line.kind:<8}{step:<11}", "dim")
    canvas.put(x, y, clean(line.text, max(canvas.width - x - 1, 0)), line.severity)


def _time_of_day(at_ns: int) -> str:
    """Local time."""
    return time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9)) if at_ns else "–"
