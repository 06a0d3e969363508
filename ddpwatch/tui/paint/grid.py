"""A sortable table that drops columns when it gets narrow, with one selected row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddpwatch.common.text import UNKNOWN
from ddpwatch.tui.paint.canvas import Canvas
from ddpwatch.tui.text import shorten

T = TypeVar("T")
SORTED = "▼"


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a table.

    Attributes:
        cell: A row's text.
        priority: 0 is dropped last.
        key: The value that rows are sorted by; None sorts last.
        style: A row's style.
        align: As in a format: names start on the left.
    """

    heading: str
    width: int
    cell: Callable[[T], str]
    priority: int = 0
    key: Callable[[T], float | None] = lambda _: None
    style: Callable[[T], str] = lambda _: "text"
    align: str = ">"


def columns_that_fit(columns: Sequence[Column[T]], width: int) -> list[Column[T]]:
    """Drops the least important columns until the rest fits."""
    kept = list(columns)
    while kept and sum(column.width for column in kept) > width:
        kept.remove(max(kept, key=lambda column: column.priority))
    return kept


def sort_rows(rows: Sequence[T], column: Column[T], descending: bool) -> list[T]:
    """Sorts by a column; rows without a value come last in either order."""
    known = [row for row in rows if column.key(row) is not None]
    unknown = [row for row in rows if column.key(row) is None]
    return sorted(known, key=lambda row: column.key(row) or 0, reverse=descending) + unknown


def paint_grid(
    canvas: Canvas,
    columns: Sequence[Column[T]],
    rows: Sequence[T],
    first: int,
    selected: int | None,
    sorted_by: str = "",
    width: int | None = None,
) -> int:
    """Paints heading and rows from the ``first`` on; returns the cell after the last column."""
    width = canvas.width if width is None else width
    kept = columns_that_fit(columns, width - 2)
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
            canvas.put(x, y, f"{shorten(text, column.width - 1):{column.align}{column.width - 1}}", style)
            x += column.width
    return 1 + sum(column.width for column in kept)


def _paint_headings(canvas: Canvas, columns: Sequence[Column[T]], sorted_by: str) -> None:
    x = 1
    for column in columns:
        sorts = column.heading == sorted_by
        text = f"{column.heading}{SORTED}" if sorts else column.heading
        canvas.put(x, 0, f"{text:{column.align}{column.width - 1}}", "heading-strong" if sorts else "heading")
        x += column.width
