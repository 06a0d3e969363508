"""The last steps as columns: how long each took, and how much of it was exposed communication."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.common.text import ms
from ddpwatch.tui.models.history import HistoryPoint
from ddpwatch.tui.models.incidents import strip
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.incidents import paint_strip, strip_legend, strip_names
from ddpwatch.tui.paint.spark import EIGHTHS
from ddpwatch.tui.text import shorten

GUTTER = 9


def paint_history(
    points: Sequence[HistoryPoint],
    width: int,
    height: int,
    shown: int | None = None,
    incidents: Sequence[Incident] = (),
    now_ns: int = 0,
) -> list[Row]:
    """Paints one column per step, newest on the right, below a strip of the incidents that struck.

    Args:
        points: The steps, oldest first.
        width: Columns.
        height: Rows.
        shown: The step whose lanes are shown.
        incidents: Worst first.
        now_ns: The receive time of the newest frame.
    """
    canvas = Canvas(width, height)
    room = width - GUTTER - 1
    canvas.fill(0, width, 0, " ", "heading")
    if room < 8 or height < 3 or not points:
        return canvas.rows()
    visible = points[-room:]
    top = max(point.step_ns for point in visible) or 1
    first_x, first_y = width - 1 - len(visible), 1
    struck = strip(incidents, [point.step for point in visible], now_ns) if height >= 4 else []
    legend = sum(len(name) + 3 for name in strip_names(struck))
    headings = _headings(visible)
    heading = next((text for text in headings if len(text) + legend + 2 <= width), headings[-1])
    end = canvas.put(1, 0, shorten(heading, width - 1), "heading")
    if any(struck):
        paint_strip(canvas, struck, first_x, 1)
        canvas.put(0, 1, f"{'incident':>{GUTTER - 1}}", "dim")
        canvas.put_runs(end + 3, 0, strip_legend(struck, width - end - 4))
        first_y = 2
    canvas.put(0, first_y, f"{ms(top):>{GUTTER - 4}} ms", "dim")
    canvas.put(0, height - 1, f"{'0':>{GUTTER - 4}} ms", "dim")
    for x, point in enumerate(visible, start=first_x):
        _paint_column(canvas, point, top, x, height - first_y)
        if point.step == shown:
            canvas.put(x, first_y, "▾", "strong")
    return canvas.rows()


def _headings(visible: Sequence[HistoryPoint]) -> list[str]:
    """Returns what the columns show, in full and in short: the letters above them need room for their names."""
    grey = any(point.exposed_ns is None for point in visible)
    last = f"last {len(visible)} steps"
    full = f"{last}, longest rank: step ms, of it exposed{', grey: not measured' if grey else ''}"
    return [full, f"{last}: ms, ╱ exposed{', grey: unknown' if grey else ''}", last]


def _paint_column(canvas: Canvas, point: HistoryPoint, top: int, x: int, rows: int) -> None:
    """Paints exposed communication at the bottom, hatched; the rest of the step above it."""
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
