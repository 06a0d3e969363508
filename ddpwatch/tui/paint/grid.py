"""A table: columns that give way when it gets narrow, one line selected, one column it is sorted by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddpwatch.tui.paint.canvas import Canvas
from ddpwatch.tui.text import UNKNOWN, shorten

T = TypeVar("T")
SORTED = "▼"


@dataclass(frozen=True, slots=True)
class GridColumn(Generic[T]):
    """A column.

    Attributes:
        cell: A row's text.
        key: What rows are sorted by; None sorts last.
        priority: 0 goes last when it gets narrow.
        style: A row's style.
    """

    heading: str
    width: int
    cell: Callable[[T], str]
    key: Callable[[T], float | None]
    priority: int = 0
    style: Callable[[T], str] = lambda _: "text"


def columns_that_fit(columns: Sequence[GridColumn[T]], width: int) -> list[GridColumn[T]]:
    """Without the least important ones, as far as needed."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width for column in kept) + 2 > width:
        kept.remove(max(kept, key=lambda column: column.priority))
    return kept


def sort_rows(rows: Sequence[T], column: GridColumn[T], falling: bool) -> list[T]:
    """By a column; unknown ones come last either way."""
    known = [row for row in rows if column.key(row) is not None]
    unknown = [row for row in rows if column.key(row) is None]
    return sorted(known, key=lambda row: column.key(row) or 0, reverse=falling) + unknown


def paint_grid(
    canvas: Canvas,
    columns: Sequence[GridColumn[T]],
    rows: Sequence[T],
    first: int,
    selected: int | None,
    sorted_by: str = "",
    width: int | None = None,
) -> int:
    """Heading and rows from the ``first`` on; returns the cell after the last column."""
    width = canvas.width if width is None else width
    kept = columns_that_fit(columns, width)
    canvas.fill(0, canvas.width, 0, " ", "heading")
    _paint_headings(canvas, kept, sorted_by)
    for y, row in enumerate(rows[first : first + max(canvas.height - 1, 0)], start=1):
        chosen = first + y - 1 == selected
        if chosen:
            canvas.fill(0, sum(column.width for column in kept) + 1, y, " ", "selected")
        x = 1
        for column in kept:
            text = column.cell(row)
            style = "selected" if chosen else "dim" if text == UNKNOWN else column.style(row)
            canvas.put(x, y, f"{shorten(text, column.width - 1):>{column.width - 1}}", style)
            x += column.width
    return 1 + sum(column.width for column in kept)


def _paint_headings(canvas: Canvas, columns: Sequence[GridColumn[T]], sorted_by: str) -> None:
    x = 1
    for column in columns:
        here = column.heading == sorted_by
        text = f"{column.heading}{SORTED}" if here else column.heading
        canvas.put(x, 0, f"{text:>{column.width - 1}}", "heading-strong" if here else "heading")
        x += column.width
