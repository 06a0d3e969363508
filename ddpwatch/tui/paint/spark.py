"""Small charts of one or a few rows."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.tui.paint.canvas import Canvas

EIGHTHS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Returns the newest values as one row of columns, newest on the right; a dot where it is unknown."""
    shown = list(values)[-width:] if width > 0 else []
    highest = top or max((value for value in shown if value is not None), default=0) or 1
    cells = ["·" if value is None else EIGHTHS[min(max(round(8 * value / highest), 1), 8)] for value in shown]
    return "".join(cells).rjust(max(width, 0))


def paint_columns(
    canvas: Canvas, values: Sequence[float | None], box: tuple[int, int, int, int], style: str, top: float | None = None
) -> None:
    """Paints the newest values as columns of eighths in (x, y, width, height), newest on the right."""
    x, y, width, height = box
    shown = list(values)[-width:] if width > 0 else []
    highest = top or max((value for value in shown if value is not None), default=0) or 1
    for column, value in enumerate(shown, start=x + width - len(shown)):
        if value is None:
            canvas.put(column, y + height - 1, "·", "faint")
            continue
        filled = min(round(8 * height * value / highest), 8 * height)
        for row in range(height):
            part = min(max(filled - 8 * row, 0), 8)
            if part:
                canvas.put(column, y + height - 1 - row, EIGHTHS[part], style)
