"""A rank's communication: waiting for the last rank, transfer, and what of both is exposed. In rows, or in half a row.

Where several collectives share a cell, one that waits is on top, of these the last launched; else the first launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from operator import ne

from ddpwatch.common.intervals import Interval
from ddpwatch.common.text import size
from ddpwatch.sampling.levels import is_watched
from ddpwatch.tui.models.lanes import Bar, Lane
from ddpwatch.tui.paint.axis import Axis, Parts
from ddpwatch.tui.paint.canvas import Canvas
from ddpwatch.tui.paint.glyphs import COMM, EXPOSED, HALVES, IDLE, LAUNCH, PHASES

# What a cell shows, as a number: 0 for nothing, else these bits, below the bucket's place in launch order.
_WIRE, _WAITS, _EXPOSED, _BITS = 4, 2, 1, 3
_LOOK = 15  # the bits that a cell's look depends on: of the place, only whether it is odd


def _style(code: int) -> str:
    if not code & _WIRE:
        return "none"
    style = "waits" if code & _WAITS else "comm-b" if code >> _BITS & 1 else "comm-a"
    return EXPOSED[style] if code & _EXPOSED else style


_STYLES = [_style(code) for code in range(_LOOK + 1)]
_ROW_LOOKS = [(COMM.get(style, " "), style if style in COMM else "text") for style in _STYLES]
_HALF_LOOKS = {
    (above, code): (COMM.get(below) or PHASES.get(above, IDLE), f"{above}{HALVES}{below}")
    for above, (code, below) in product(("idle", *PHASES), enumerate(_STYLES))
} | {("idle", 0): (IDLE, "idle")}


def centred(first: int, last: int, texts: Sequence[str]) -> tuple[int, str]:
    """Returns the first of the texts that leaves a cell of bar on both sides, and where it starts.

    Empty if none does.
    """
    for text in texts:
        if len(text) + 2 <= last - first:
            return first + (last - first - len(text)) // 2, text
    return first, ""


def _codes(lane: Lane, parts: Sequence[Parts], axis: Axis, span: Interval) -> list[int]:
    """Returns what buckets show on the cells of ``span``."""
    left, right = span
    found = [0] * (right - left)
    if any(first < left or last > right for _, first, _, last in parts):
        parts = [_clipped(part, left, right) for part in parts]
    for position, first, _, last in reversed(parts):
        found[first - left : last - left] = [position << _BITS | _WIRE] * (last - first)
    for position, first, transfer, _ in parts:
        if first < transfer:
            waits = [position << _BITS | _WIRE | _WAITS] * (transfer - first)
            found[first - left : transfer - left] = waits
    for start, end in lane.figures.exposed:
        if axis.sees(lane.offset_ns + start, lane.offset_ns + end):
            first, last = axis.span(lane.offset_ns + start, lane.offset_ns + end)
            stretch = slice(max(first - left, 0), max(last - left, 0))
            found[stretch] = [code and code | _EXPOSED for code in found[stretch]]
    return found


def _clipped(part: Parts, left: int, right: int) -> Parts:
    position, first, transfer, last = part
    return position, min(max(first, left), right), min(max(transfer, left), right), min(max(last, left), right)


# -- in rows -------------------------------------------------------------------------------------------------


def paint_comm(canvas: Canvas, lane: Lane, axis: Axis, y: int, rows: int, thick: int) -> None:
    """Paints the buckets, stacked on ``rows`` rows from ``y`` on; the last row holds all that need more."""
    stacked, bars = lane.stacked(), lane.bars
    for number in range(min(rows, len(stacked))):
        own = stacked[number : number + 1] if number < rows - 1 else stacked[number:]
        row = sorted((bar for stack in own for bar in stack), key=lambda bar: bar.position)
        top = y + number * thick
        _paint_row(canvas, lane, [bar.position for bar in row], bars, axis, range(top, top + thick))
        _paint_launches(canvas, lane, [bar for bar in row if bar.end is None], axis, top, named=True)


def _paint_row(canvas: Canvas, lane: Lane, row: Sequence[int], bars: Sequence[Bar], axis: Axis, ys: range) -> None:
    parts = axis.parts(lane.offset_ns, [(position, lane.flights[position]) for position in row])
    if not parts:
        return
    left = min(first for _, first, _, _ in parts)
    codes = _codes(lane, parts, axis, (left, max(last for *_, last in parts)))
    looks = [_ROW_LOOKS[code & _LOOK] for code in codes]
    for y in ys:
        canvas.put_cells(left, y, [glyph for glyph, _ in looks], [style for _, style in looks])
    widest: dict[int, tuple[int, int, int]] = {}  # by bucket: first cell, cell after the last, what they show
    for first, last, code in _runs([code | _EXPOSED for code in codes]):
        before = widest.get(code >> _BITS, (0, 0, 0))
        if code & _WIRE and last - first > before[1] - before[0]:
            widest[code >> _BITS] = (first, last, code)
    for position, (first, last, code) in widest.items():
        _name(canvas, bars[position], (left + first, left + last), ys[0], bool(code & _WAITS))


def _runs(codes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields stretches of equal cells, as (first, the one after the last, what they show)."""
    cuts = [x for x, differs in enumerate(map(ne, codes, codes[1:]), start=1) if differs]
    for first, last in zip([0, *cuts], [*cuts, len(codes)], strict=True):
        yield first, last, codes[first]


def _name(canvas: Canvas, bar: Bar, cells: Interval, y: int, waits: bool) -> None:
    """Names a bucket inside the cells that show it."""
    name, (first, last) = bar.label, cells
    more = f"waits for rank {bar.last_rank}" if waits else f"· {size(bar.nbytes)}"
    with_more = [f" {bar.name} {more} "]
    if not (bar.own or bar.use):  # a number alone is no bucket's to who reads it first
        with_more = [f" bucket {bar.name} {more} ", f" {more} " if waits else f" {bar.name} {more} "]
    x, text = centred(first, last, (*with_more, f" {bar.name} ", f" {name} ", name))
    if not text and len(name) <= last - first and canvas.style_at(first, y).startswith("comm"):
        text = name
    style = canvas.style_at(x, y)
    if style == canvas.style_at(x + len(text) - 1, y):
        canvas.put(x, y, text, f"{style}-label")
        return
    for at, char in enumerate(text, start=x):
        canvas.put(at, y, char, f"{canvas.style_at(at, y)}-label")


def _paint_launches(canvas: Canvas, lane: Lane, bars: Sequence[Bar], axis: Axis, y: int, named: bool) -> None:
    """Paints signs for buckets of which only the launch is known."""
    for bar in bars:
        if axis.sees(bar.start, bar.start):
            canvas.put(axis.span(bar.start, bar.start)[0], y, f"{LAUNCH}{bar.label if named else ''}", "launch")


# -- in half a row -------------------------------------------------------------------------------------------


def paint_halves(canvas: Canvas, lane: Lane, axis: Axis, y: int) -> None:
    """Paints one row per rank: compute in the upper half of the cells, communication in the lower half."""
    start, end = lane.offset_ns, lane.offset_ns + lane.step.duration_ns
    if not is_watched(lane.step.status) or not axis.sees(start, end):
        return
    span = axis.span(start, end)
    parts = axis.parts(lane.offset_ns, list(enumerate(lane.flights)))
    lower = [code & _LOOK for code in _codes(lane, parts, axis, span)]
    looks = [_HALF_LOOKS[cell] for cell in zip(_compute(lane, axis, span), lower, strict=True)]
    canvas.put_cells(span[0], y, [glyph for glyph, _ in looks], [style for _, style in looks])
    if None in lane.flights:
        _paint_launches(canvas, lane, [bar for bar in lane.bars if bar.end is None], axis, y, named=False)


def _compute(lane: Lane, axis: Axis, span: Interval) -> list[str]:
    """Returns what the training thread does on the cells of ``span``."""
    found, offset = ["idle"] * (span[1] - span[0]), lane.offset_ns
    for phase, start, end in lane.stretches():
        if start < end and phase in PHASES and axis.sees(offset + start, offset + end):
            first, last = axis.span(offset + start, offset + end)
            first, last = max(first, span[0]), min(last, span[1])
            found[first - span[0] : last - span[0]] = [phase] * (last - first)
    return found
