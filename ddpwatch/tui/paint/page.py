"""What all views share: header and verdict above a body, a body with nothing to show, and boxes put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ddpwatch.common.text import UNKNOWN
from ddpwatch.tui.models.overview import Overview
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.header import line_below, next_lines, paint_header, paint_verdict, verdict_lines
from ddpwatch.tui.paint.screen_layout import Box
from ddpwatch.tui.paint.waiting import paint_waiting
from ddpwatch.tui.text import shorten

HEADER_ROWS = 2
ONE_LINE = 150  # columns in which most verdicts fit
SMALL = 15  # a page with fewer rows has one for the verdict

Part = tuple[Box, list[Row]]


def paint_page(
    model: Overview, width: int, height: int, body: Callable[[int, int], list[Row]], before_run: bool = False
) -> list[Row]:
    """Returns header, verdict and body, from top to bottom; before the first frame, what is waited for.

    Args:
        model: The run.
        width: Columns.
        height: Rows.
        body: Paints that many columns and rows; there may be none.
        before_run: The body has something to show before the first frame.
    """
    rows = paint_header(model, width, min(HEADER_ROWS, height))
    if nothing_known(model) and not before_run:
        return rows + paint_waiting(model.link, width, height - len(rows))
    rows += paint_verdict(model, width, min(verdict_rows(model, width, height), height - len(rows)))
    return rows + body(width, height - len(rows))


def verdict_rows(model: Overview, width: int, height: int) -> int:
    """Returns rows for the verdict: as many as it needs; on a narrow screen two, so that the body stays in place."""
    if height < SMALL:
        return 1 if height >= 5 else 0
    rows = len(verdict_lines(model, width)) + bool(line_below(model, width)) + len(next_lines(model, width))
    return max(rows, 1 if width >= ONE_LINE else 2)


def no_step(width: int, height: int, what: str = "no step yet") -> list[Row]:
    """Returns a body that has nothing to show, and why."""
    canvas = Canvas(width, height)
    canvas.put(1, 1, shorten(f"{UNKNOWN} {what}", max(width - 2, 0)), "dim")
    return canvas.rows()


def nothing_known(model: Overview) -> bool:
    """Returns whether no rank has reported yet."""
    return model.lanes is None and not model.ranks and not model.filter


def assemble(parts: Iterable[Part], width: int, height: int) -> list[Row]:
    """Puts painted boxes on one screen. Boxes do not overlap; the rest of the screen is blank."""
    lines: list[list[tuple[int, int, Row]]] = [[] for _ in range(height)]
    for box, rows in parts:
        for y, row in enumerate(rows[: box.height], start=box.y):
            if 0 <= y < height and box.width > 0:
                lines[y].append((box.x, box.width, row))
    return [_line(sorted(line, key=lambda piece: piece[0]), width) for line in lines]


def _line(pieces: list[tuple[int, int, Row]], width: int) -> Row:
    line: Row = []
    x = 0
    for start, size, row in pieces:
        if start > x:
            line.append((" " * (start - x), "text"))
        line += row
        x = start + size
    if x < width:
        line.append((" " * (width - x), "text"))
    return line
