"""The last steps as columns: how long each took, and how much of it was exposed communication."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.tui.models.history import HistoryPoint
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.spark import EIGHTHS
from ddpwatch.tui.text import ms

GUTTER = 9


def paint_history(points: Sequence[HistoryPoint], width: int, height: int, shown: int | None = None) -> list[Row]:
    """One column per step, newest on the right; ``shown`` is the step whose lanes are shown."""
    canvas = Canvas(width, height)
    room = width - GUTTER - 1
    canvas.fill(0, width, 0, " ", "heading")
    if room < 8 or height < 3 or not points:
        return canvas.rows()
    visible = points[-room:]
    top = max(point.step_ns for point in visible) or 1
    grey = ", grey: not measured" if any(point.exposed_ns is None for point in visible) else ""
    canvas.put(1, 0, f"last {len(visible)} steps, longest rank: step ms, of it exposed{grey}"[: width - 1], "heading")
    canvas.put(0, 1, f"{ms(top):>{GUTTER - 4}} ms", "dim")
    canvas.put(0, height - 1, f"{'0':>{GUTTER - 4}} ms", "dim")
    for x, point in enumerate(visible, start=width - 1 - len(visible)):
        _paint_column(canvas, point, top, x)
        if point.step == shown:
            canvas.put(x, 1, "▾", "strong")
    return canvas.rows()


def _paint_column(canvas: Canvas, point: HistoryPoint, top: int, x: int) -> None:
    """Exposed communication at the bottom, hatched; the rest of the step above it."""
    rows = canvas.height - 1
    total = round(8 * rows * point.step_ns / top)
    exposed = round(8 * rows * (point.exposed_ns or 0) / top)
    if point.exposed_ns and not exposed:
        exposed = 1
    for row in range(rows):
        y = canvas.height - 1 - row
        filled = min(max(total - 8 * row, 0), 8)
        hatched = min(max(exposed - 8 * row, 0), 8)
        if hatched >= 4:
            canvas.put(x, y, "╱", "exposed")
        elif filled:
            canvas.put(x, y, EIGHTHS[filled], "faint" if point.exposed_ns is None else "history")
