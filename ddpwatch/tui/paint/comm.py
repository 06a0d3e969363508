"""A rank's communication: waiting for the last rank, transfer, and what of both is exposed. In rows, or in half a row.

In half a row, each cell shows the first collective in launch order that is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ne

from ddpwatch.analysis.intervals import Interval
from ddpwatch.sampling.levels import is_watched
from ddpwatch.tui.models.lanes import Bar, Lane
from ddpwatch.tui.paint.axis import Axis
from ddpwatch.tui.paint.canvas import Canvas
from ddpwatch.tui.paint.glyphs import COMM, EXPOSED, HALVES, IDLE, LAUNCH, LAUNCH_DENSE, PHASES
from ddpwatch.tui.text import size

Cells = list[str]  # style names


def bar_cells(bar: Bar, axis: Axis) -> tuple[int, int, int]:
    """The first cell of a bar, the first of its transfer, and the one after the last."""
    assert bar.end is not None
    first, last = axis.span(bar.start, bar.end)
    return first, min(max(axis.cell(bar.transfer), first), last), last


def _style(bar: Bar) -> str:
    return "comm-a" if bar.position % 2 == 0 else "comm-b"


def _sees(axis: Axis, lane: Lane, stretch: Interval) -> bool:
    return axis.sees(lane.offset_ns + stretch[0], lane.offset_ns + stretch[1])


def centred(canvas: Canvas, first: int, last: int, y: int, texts: Sequence[str], style: str) -> None:
    """Writes the first of the texts that leaves a cell of bar on both sides."""
    for text in texts:
        if len(text) + 2 <= last - first:
            canvas.put(first + (last - first - len(text)) // 2, y, text, style)
            return


# -- in rows -------------------------------------------------------------------------------------------------


def paint_comm(canvas: Canvas, lane: Lane, axis: Axis, y: int, rows: int, thick: int) -> None:
    """Paints the buckets from row ``y`` on; where they share a row, the first launched is on top."""
    placed = [(bar, number) for number, stacked in enumerate(lane.stacked()) for bar in stacked]
    for bar, number in sorted(placed, key=lambda place: -place[0].position):
        top = y + min(number, rows - 1) * thick
        if bar.end is None:
            if axis.sees(bar.start, bar.start):
                canvas.put(axis.span(bar.start, bar.start)[0], top, f"{LAUNCH}{bar.index}", "launch")
        elif axis.sees(bar.start, bar.end):
            _paint_bar(canvas, bar, axis, top, thick)
    for exposed in lane.figures.exposed:
        if _sees(axis, lane, exposed):
            _paint_exposed(canvas, lane, axis, exposed, y, rows * thick)


def _paint_bar(canvas: Canvas, bar: Bar, axis: Axis, y: int, thick: int) -> None:
    style = _style(bar)
    first, transfer, last = bar_cells(bar, axis)
    for row in range(y, y + thick):
        canvas.fill(first, transfer, row, COMM["waits"], "waits")
        canvas.fill(transfer, last, row, COMM[style], style)
    name = str(bar.index)
    if transfer - first > last - transfer:
        _name_bar(canvas, (first, transfer), y, name, f" {name} waits for rank {bar.last_rank} ", "waits-label")
    else:
        _name_bar(canvas, (transfer, last), y, name, f" {name} · {size(bar.nbytes)} ", f"{style}-label")


def _name_bar(canvas: Canvas, cells: Interval, y: int, name: str, full: str, style: str) -> None:
    first, last = cells
    if len(name) <= last - first <= len(name) + 1:
        canvas.put(first, y, name, style)
    centred(canvas, first, last, y, (full, f" {name} ", name), style)


def _paint_exposed(canvas: Canvas, lane: Lane, axis: Axis, exposed: Interval, y: int, height: int) -> None:
    """Changes the comm cells inside an exposed stretch; labels stay readable."""
    first, last = axis.span(lane.offset_ns + exposed[0], lane.offset_ns + exposed[1])
    for row in range(y, y + height):
        for x in range(first, last):
            style = canvas.style_at(x, row)
            hatched = EXPOSED.get(style.removesuffix("-label"))
            if hatched:
                label = style.endswith("-label") and last - first > 2
                glyph = canvas.char_at(x, row) if label else COMM[hatched]
                canvas.put(x, row, glyph, f"{hatched}-label" if label else hatched)


# -- in half a row -------------------------------------------------------------------------------------------


def paint_halves(canvas: Canvas, lane: Lane, axis: Axis, y: int) -> None:
    """One row per rank: compute in the upper half of the cells, communication in the lower half."""
    step_ns = (0, lane.step.duration_ns)
    if not is_watched(lane.step.status) or not _sees(axis, lane, step_ns):
        return
    cells = axis.span(lane.offset_ns, lane.offset_ns + lane.step.duration_ns)
    bars = lane.bars()
    halves = list(zip(_compute_half(lane, axis, cells), _comm_half(lane, bars, axis, cells), strict=True))
    cuts = [x for x, differs in enumerate(map(ne, halves, halves[1:]), start=1) if differs]
    for first, last in zip([0, *cuts], [*cuts, len(halves)], strict=True):
        upper, lower = halves[first]
        glyph = COMM.get(lower) or PHASES.get(upper, IDLE)
        style = "idle" if (upper, lower) == ("idle", "none") else f"{upper}{HALVES}{lower}"
        canvas.fill(cells[0] + first, cells[0] + last, y, glyph, style)
    for bar in bars:
        if bar.end is None and axis.sees(bar.start, bar.start):
            x = axis.span(bar.start, bar.start)[0]
            upper = canvas.style_at(x, y).split(HALVES)[0]
            canvas.put(x, y, LAUNCH_DENSE, f"{upper}-label" if upper in PHASES else "launch")


def _compute_half(lane: Lane, axis: Axis, cells: Interval) -> Cells:
    found = ["idle"] * (cells[1] - cells[0])
    for phase, start, end in lane.stretches():
        if start < end and phase in PHASES and _sees(axis, lane, (start, end)):
            _fill(found, cells, *axis.span(lane.offset_ns + start, lane.offset_ns + end), phase)
    return found


def _comm_half(lane: Lane, bars: Sequence[Bar], axis: Axis, cells: Interval) -> Cells:
    found = ["none"] * (cells[1] - cells[0])
    for bar in reversed(bars):
        if bar.end is not None and axis.sees(bar.start, bar.end):
            first, transfer, last = bar_cells(bar, axis)
            _fill(found, cells, first, transfer, "waits")
            _fill(found, cells, transfer, last, _style(bar))
    for exposed in lane.figures.exposed:
        if _sees(axis, lane, exposed):
            first, last = axis.span(lane.offset_ns + exposed[0], lane.offset_ns + exposed[1])
            for x in range(max(first, cells[0]) - cells[0], min(last, cells[1]) - cells[0]):
                found[x] = EXPOSED.get(found[x], found[x])
    return found


def _fill(found: Cells, cells: Interval, first: int, last: int, style: str) -> None:
    first, last = max(first, cells[0]), min(last, cells[1])
    if first < last:
        found[first - cells[0] : last - cells[0]] = [style] * (last - first)
