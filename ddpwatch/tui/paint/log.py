"""The Log view: the names of its lists, and lines, newest last."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddpwatch.common.text import percent
from ddpwatch.tui.models.log import LogLine
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.text import shorten, shorten_name

_ROOMY = 60
_HOW = "m: the next list"


def paint_lists(lists: Sequence[tuple[str, int]], list_shown: int, width: int, progress: float | None) -> list[Row]:
    """Returns the name and length of each list.

    Args:
        lists: These.
        list_shown: The index of the list shown.
        width: Columns.
        progress: How much of a recording is diagnosed; None if there is nothing to wait for.
    """
    canvas = Canvas(width, 1)
    canvas.fill(0, width, 0, " ", "heading")
    x = 1
    for index, (name, count) in enumerate(lists):
        text = shorten(f"{name} {count}", max(width - x - 1, 0))
        x = canvas.put(x, 0, text, "heading-strong" if index == list_shown else "heading") + 3
    if progress is None and x + len(_HOW) < width:
        canvas.put(x, 0, _HOW, "heading")
    elif progress is not None:
        canvas.put(x, 0, shorten(f"diagnosing … {percent(progress)}", max(width - x - 1, 0)), "heading-warn")
    return canvas.rows()


def paint_lines(lines: Sequence[LogLine], size: tuple[int, int], first: int, selected: int) -> list[Row]:
    """Returns the lines from the ``first`` on.

    Args:
        lines: Oldest first.
        size: Columns and rows.
        first: The index of the first line in view.
        selected: The index of the selected line.
    """
    canvas = Canvas(*size)
    if not lines:
        canvas.put(1, 0, "nothing yet", "dim")
    for y, line in enumerate(lines[first : first + canvas.height]):
        _paint_line(canvas, line, y, first + y == selected)
    return canvas.rows()


def _paint_line(canvas: Canvas, line: LogLine, y: int, selected: bool) -> None:
    x = canvas.put(0, y, "▶" if selected else " ", "warn")
    x = canvas.put(x, y, f"{_time_of_day(line.at_ns)} ", "selected" if selected else "dim")
    if line.kind != "output" and canvas.width >= _ROOMY:
        step = "" if line.step is None else f"step {line.step}"
        x = canvas.put(x, y, f"{line.kind:<9}{step:<11}", "dim")
    canvas.put(x, y, shorten_name(line.text, max(canvas.width - x - 1, 0)), line.severity)


def _time_of_day(at_ns: int) -> str:
    """Returns the local time."""
    return time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9)) if at_ns else "–"
