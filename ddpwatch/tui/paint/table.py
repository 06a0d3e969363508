"""The rank table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from ddpwatch.common.text import UNKNOWN, ms, percent, size
from ddpwatch.tui.models.overview import RankLine
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.grid import Column, columns_that_fit
from ddpwatch.tui.text import shorten_host, shorten_name


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


COLUMNS: tuple[Column[RankLine], ...] = (
    Column("step", 7, lambda row: _number(row.step), 2),
    Column("step ms", 8, lambda row: ms(row.summary.step_ns), 2),
    Column("late ms", 8, lambda row: ms(row.summary.late_ns), 1),
    Column("wait ms", 8, lambda row: ms(row.summary.wait_ns), 3),
    Column("overlap", 8, lambda row: percent(row.summary.overlap), 4),
    Column("exposed ms", 11, lambda row: ms(row.summary.exposed_ns), 1),
    Column("host mem", 11, lambda row: size(row.memory.host_bytes), 6, lambda row: row.memory.host_bytes),
    Column("GPU mem", 11, lambda row: size(row.memory.gpu_bytes), 5, lambda row: row.memory.gpu_bytes),
    Column("lost messages", 14, lambda row: str(row.dropped), 5, lambda row: row.dropped),
)
_NOW_AND_THEN = ("host mem", "GPU mem", "lost messages")  # only there if a rank has some
_HOST = 22  # with the process id
_HOST_MOST = 14  # without
_STATUS_LEAST = 14
_STATUS_MOST = 52


def columns_for(width: int, ranks: Sequence[RankLine]) -> list[Column[RankLine]]:
    """Returns the columns that leave enough room for rank and status, which takes the rest of the width."""
    known = [column for column in COLUMNS if column.heading not in _NOW_AND_THEN or any(map(column.key, ranks))]
    return columns_that_fit(known, width - 7 - _STATUS_LEAST)


def paint_table(
    ranks: Sequence[RankLine], width: int, height: int, first: int = 0, hosts: bool = False, others: int = 0
) -> list[Row]:
    """Returns a heading and one line per rank, from the ``first`` on. Several ``hosts`` have a column at any width.

    ``others`` are not among the ``ranks``: the heading says how many there is no room for.
    """
    canvas = Canvas(width, height)
    columns = columns_for(width, ranks)
    host = _HOST if width - sum(column.width for column in columns) - 7 - _HOST >= 34 else 0
    if hosts and not host:
        longest = max((cell_len(row.host) for row in ranks[:height]), default=0)
        host = min(max(longest, 4), _HOST_MOST) + 2
        columns = columns_for(width - host, ranks)
    room = max(canvas.height - 1, 0)
    _paint_heading(canvas, columns, host, max(len(ranks) - room, 0) + others)
    first = min(max(first, 0), max(len(ranks) - room, 0))
    for y, row in enumerate(ranks[first : first + room], start=1):
        _paint_row(canvas, row, columns, host, y)
    return canvas.rows()


def _paint_heading(canvas: Canvas, columns: Sequence[Column[RankLine]], host: int, left_out: int) -> None:
    canvas.fill(0, canvas.width, 0, " ", "heading")
    canvas.put(1, 0, "rank", "heading")
    if host:
        canvas.put(7, 0, "host / pid" if host >= _HOST else "host", "heading")
    x = _figures_at(canvas, columns, host)
    status = ("status",) if not left_out else (f"status ({left_out} more)", f"{left_out} more")
    canvas.put(7 + host, 0, next((text for text in status if len(text) <= x - host - 8), status[-1]), "heading")
    for column in columns:
        canvas.put(x, 0, f"{column.heading:>{column.width - 1}}", "heading")
        x += column.width


def _figures_at(canvas: Canvas, columns: Sequence[Column[RankLine]], host: int) -> int:
    """Returns where the figures start: at the right, but not too far from the status."""
    return min(canvas.width - sum(column.width for column in columns), 7 + host + _STATUS_MOST)


def _paint_row(canvas: Canvas, row: RankLine, columns: Sequence[Column[RankLine]], host: int, y: int) -> None:
    canvas.put(1, y, f"{row.rank:>4}", "bad" if row.slowest or row.severity == "bad" else "strong")
    if host:
        pid = f" / {_number(row.pid)}" if host >= _HOST else ""
        canvas.put(7, y, shorten_host(row.host, host - 1 - len(pid)) + pid, "dim")
    if row.slowest:
        canvas.put(5, y, "◀", "bad")
    x = _figures_at(canvas, columns, host)
    room = x - host - 8
    brief = cell_len(row.status) > room and row.severity == "warn"
    canvas.put(7 + host, y, shorten_name(_in_brief(row.status) if brief else row.status, room), row.severity)
    if row.severity == "bad" and cell_len(row.status) > room:
        canvas.put(7 + host, y, shorten_name(row.status, canvas.width - host - 8), row.severity)
        return  # how a rank ended matters more than its figures
    for column in columns:
        text = column.cell(row)
        canvas.put(x, y, f"{text:>{column.width - 1}}", _cell_style(column, row, text))
        x += column.width


def _in_brief(status: str) -> str:
    """Returns a status without its reason."""
    return status.partition(" for ")[0].partition(":")[0]


def _cell_style(column: Column[RankLine], row: RankLine, text: str) -> str:
    if text == UNKNOWN:
        return "dim"
    if (column.heading == "lost messages" and row.dropped) or (column.heading == "late ms" and row.slowest):
        return "bad"
    return "text"
