"""The axis of a timeline: time to cells, and the line with round milliseconds below the lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddpwatch.analysis.waiting import Flight
from ddpwatch.tui.paint.canvas import Canvas

Parts = tuple[int, int, int, int]  # a collective's number, first cell, first cell of its transfer, cell after the last


@dataclass(frozen=True, slots=True)
class Axis:
    """Time to cells: [start_ns, start_ns + length_ns) on the cells [left, left + width)."""

    left: int
    width: int
    length_ns: int
    start_ns: int = 0

    @property
    def right(self) -> int:
        """The cell after the last."""
        return self.left + self.width

    @property
    def least_ns(self) -> float:
        """Half a cell: no wait shorter than that is drawn."""
        return self.length_ns / self.width / 2

    def cell(self, ns: float) -> int:
        """Returns the cell boundary nearest to a time."""
        return self.left + round((ns - self.start_ns) * (self.width / self.length_ns))

    def time(self, cell: int) -> int:
        """Returns the time in the middle of a cell."""
        return self.start_ns + int((cell - self.left + 0.5) * self.length_ns / self.width)

    def sees(self, start: float, end: float) -> bool:
        """Returns whether any part of [start, end] lies on the axis."""
        return start < self.start_ns + self.length_ns and end >= self.start_ns

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Returns the cells of [start, end): at least one, none beyond the axis."""
        scale, right = self.width / self.length_ns, self.right
        first = self.left + round((start - self.start_ns) * scale)
        first = self.left if first < self.left else right - 1 if first >= right else first
        last = self.left + round((end - self.start_ns) * scale)
        return first, right if last > right else first + 1 if last <= first else last

    def parts(self, offset_ns: int, flights: Sequence[tuple[int, Flight | None]]) -> list[Parts]:
        """Returns the cells of those collectives that are on the axis; their times count from ``offset_ns``."""
        scale, shift, left, right = self.width / self.length_ns, offset_ns - self.start_ns, self.left, self.right
        found, least_ns = [], self.least_ns
        for number, flight in flights:
            if flight is None or flight[0] + shift >= self.length_ns or flight[2] + shift < 0:
                continue
            start, transfer, done, _ = flight
            first = left + round((start + shift) * scale)
            first = left if first < left else right - 1 if first >= right else first
            last = left + round((done + shift) * scale)
            last = right if last > right else first + 1 if last <= first else last
            middle = left + round((transfer + shift) * scale)
            if transfer - start < least_ns or middle < first:
                middle = first
            found.append((number, first, last if middle > last else middle, last))
        return found

    def half_cell(self, ns: int) -> int:
        """Returns the half cell that holds a time, counted from the left."""
        return min(max(int(2 * (ns - self.start_ns) * self.width / self.length_ns), 0), 2 * self.width - 1)


def paint_axis(canvas: Canvas, axis: Axis, y: int) -> None:
    """Paints a line with round numbers of milliseconds."""
    canvas.fill(axis.left, axis.left + axis.width, y, "─", "faint")
    step = nice_step(axis.length_ns / 1e6, max(axis.width // 10, 1))
    first = math.ceil(axis.start_ns / 1e6 / step)
    for index in range(first, int((axis.start_ns + axis.length_ns) / 1e6 / step) + 1):
        value = index * step
        label = f"╵{round(value, 6):g}" + (" ms" if index == first else "")
        x = axis.cell(value * 1e6)
        if x + len(label) <= axis.left + axis.width:
            canvas.put(x, y, label, "axis")


def nice_step(length: float, ticks: int) -> float:
    """Returns the smallest of 1, 2, 5 times a power of ten that gives at most that many ticks."""
    size = 10.0**-6
    while True:
        for factor in (1, 2, 5):
            if length / (factor * size) <= ticks:
                return factor * size
        size *= 10
