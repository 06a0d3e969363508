"""A rank's communication: waiting for the last rank, transfer, and what of both is exposed. In rows, or in half a row.

Where several collectives share a cell, one that waits is on top, of these the last launched; else the first launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import ne
from typing import TypeVar

from ddpwatch.analysis.intervals import Interval
from ddpwatch.sampling.levels import is_watched
from ddpwatch.tui.models.lanes import Bar, Lane
from ddpwatch.tui.paint.axis import Axis
from ddpwatch.tui.paint.canvas import Canvas
from ddpwatch.tui.paint.glyphs import COMM, EXPOSED, HALVES, IDLE, LAUNCH, PHASES
from ddpwatch.tui.text import size

Cell = tuple[str, int]  # a style, and the place in launch order of the bucket that the cell shows
_NOTHING: Cell = ("none", -1)
_T = TypeVar("_T")


def centred(first: int, last: int, texts: Sequence[str]) -> tuple[int, str]:
    """The first of the texts that leaves a cell of bar on both sides, and where it starts; empty if none does."""
    for text in texts:
        if len(text) + 2 <= last - first:
            return first + (last - first - len(text)) // 2, text
    return first, ""


def _runs(cells: Sequence[_T]) -> Iterator[tuple[int, int, _T]]:
    """Stretches of equal cells, as (first, the one after the last, their content)."""
    cuts = [x for x, differs in enumerate(map(ne, cells, cells[1:]), start=1) if differs]
    for first, last in zip([0, *cuts], [*cuts, len(cells)], strict=True):
        yield first, last, cells[first]


def _sees(axis: Axis, lane: Lane, stretch: Interval) -> bool:
    return axis.sees(lane.offset_ns + stretch[0], lane.offset_ns + stretch[1])


# -- what the cells show -------------------------------------------------------------------------------------


def _comm_cells(lane: Lane, bars: Sequence[Bar], axis: Axis, span: Interval) -> list[Cell]:
    """What buckets show on the cells of ``span``."""
    found = [_NOTHING] * (span[1] - span[0])
    parts = [(bar.position, *_parts(bar, bar.end, axis)) for bar in bars if bar.end is not None and _seen(axis, bar)]
    for position, first, _, last in reversed(parts):
        _fill(found, span, (first, last), ("comm-b" if position % 2 else "comm-a", position))
    for position, first, transfer, _ in parts:
        _fill(found, span, (first, transfer), ("waits", position))
    for exposed in lane.figures.exposed:
        if _sees(axis, lane, exposed):
            first, last = axis.span(lane.offset_ns + exposed[0], lane.offset_ns + exposed[1])
            for x in range(max(first, span[0]) - span[0], min(last, span[1]) - span[0]):
                style, position = found[x]
                found[x] = (EXPOSED.get(style, style), position)
    return found


def _seen(axis: Axis, bar: Bar) -> bool:
    return axis.sees(bar.start, bar.start if bar.end is None else bar.end)


def _parts(bar: Bar, end: int, axis: Axis) -> tuple[int, int, int]:
    """The first cell of a bar, the first of its transfer, and the one after the last. Short waits are not drawn."""
    first, last = axis.span(bar.start, end)
    if bar.transfer - bar.start < axis.least_ns:
        return first, first, last
    return first, min(max(axis.cell(bar.transfer), first), last), last


def _compute_cells(lane: Lane, axis: Axis, span: Interval) -> list[str]:
    found = ["idle"] * (span[1] - span[0])
    for phase, start, end in lane.stretches():
        if start < end and phase in PHASES and _sees(axis, lane, (start, end)):
            _fill(found, span, axis.span(lane.offset_ns + start, lane.offset_ns + end), phase)
    return found


def _fill(found: list[_T], span: Interval, cells: Interval, content: _T) -> None:
    first, last = max(cells[0], span[0]), min(cells[1], span[1])
    if first < last:
        found[first - span[0] : last - span[0]] = [content] * (last - first)


# -- in rows -------------------------------------------------------------------------------------------------


def paint_comm(canvas: Canvas, lane: Lane, axis: Axis, y: int, rows: int, thick: int) -> None:
    """Paints the buckets, stacked on ``rows`` rows from ``y`` on; the last row holds all that need more."""
    stacked, bars = lane.stacked(), lane.bars()
    for number in range(rows):
        own = stacked[number : number + 1] if number < rows - 1 else stacked[number:]
        row = sorted((bar for stack in own for bar in stack), key=lambda bar: bar.position)
        _paint_row(canvas, lane, row, bars, axis, range(y + number * thick, y + (number + 1) * thick))
        for bar in row:
            if bar.end is None and _seen(axis, bar):
                canvas.put(axis.span(bar.start, bar.start)[0], y + number * thick, f"{LAUNCH}{bar.index}", "launch")


def _paint_row(canvas: Canvas, lane: Lane, row: Sequence[Bar], bars: Sequence[Bar], axis: Axis, ys: range) -> None:
    left = axis.left
    cells = _comm_cells(lane, row, axis, (left, left + axis.width))
    for first, last, (style, _) in _runs(cells):
        for y in ys:
            if style in COMM:
                canvas.fill(left + first, left + last, y, COMM[style], style)
    widest: dict[int, tuple[int, int, bool]] = {}
    for first, last, (position, waits) in _runs([(position, style.startswith("waits")) for style, position in cells]):
        before = widest.get(position, (0, 0, False))
        if position >= 0 and last - first > before[1] - before[0]:
            widest[position] = (first, last, waits)
    for position, (first, last, waits) in widest.items():
        _name(canvas, bars[position], (left + first, left + last), ys[0], waits)


def _name(canvas: Canvas, bar: Bar, cells: Interval, y: int, waits: bool) -> None:
    """Names a bucket inside the cells that show it."""
    name, (first, last) = str(bar.index), cells
    more = f"waits for rank {bar.last_rank}" if waits else f"· {size(bar.nbytes)}"
    x, text = centred(first, last, (f" {name} {more} ", f" {name} ", name))
    if not text and len(name) <= last - first and canvas.style_at(first, y).startswith("comm"):
        text = name
    for at, char in enumerate(text, start=x):
        canvas.put(at, y, char, f"{canvas.style_at(at, y)}-label")


# -- in half a row -------------------------------------------------------------------------------------------


def paint_halves(canvas: Canvas, lane: Lane, axis: Axis, y: int) -> None:
    """One row per rank: compute in the upper half of the cells, communication in the lower half."""
    if not is_watched(lane.step.status) or not _sees(axis, lane, (0, lane.step.duration_ns)):
        return
    span, bars = axis.span(lane.offset_ns, lane.offset_ns + lane.step.duration_ns), lane.bars()
    lower = [style for style, _ in _comm_cells(lane, bars, axis, span)]
    for first, last, (above, below) in _runs(list(zip(_compute_cells(lane, axis, span), lower, strict=True))):
        glyph = COMM.get(below) or PHASES.get(above, IDLE)
        style = "idle" if glyph == IDLE else f"{above}{HALVES}{below}"
        canvas.fill(span[0] + first, span[0] + last, y, glyph, style)
    for bar in bars:
        if bar.end is None and _seen(axis, bar):
            canvas.put(axis.span(bar.start, bar.start)[0], y, LAUNCH, "launch")
