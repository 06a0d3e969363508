"""The past of a device or rank in little memory: each sample of the last minutes, and means of the minutes before."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from ddpwatch.common.statistics import mean

FULL_ROWS = 120  # at least: two minutes at a sample a second
MEAN_ROWS = 60  # of which a mean is kept
MOST_MEANS = 15


class Series:
    """Figures of a device or rank by time. One that was not measured is None, and left out of means.

    Args:
        width: How many figures a sample has.
    """

    __slots__ = ("_means", "_rows")

    def __init__(self, width: int) -> None:
        self._rows, self._means = _Table(width), _Table(width)

    def add_sample(self, at_ns: int, row: Sequence[float | None]) -> None:
        """Adds a sample. If time has gone back, it is another clock's, and the past goes."""
        if self._rows.times and at_ns < self._rows.times[-1]:
            self._rows.drop(len(self._rows.times))
            self._means.drop(len(self._means.times))
        self._rows.add_row(at_ns, row)
        if len(self._rows.times) >= FULL_ROWS + MEAN_ROWS:
            means = [_mean(column[:MEAN_ROWS]) for column in self._rows.columns]
            self._means.add_row(self._rows.times[MEAN_ROWS - 1], means)
            self._rows.drop(MEAN_ROWS)
            self._means.drop(len(self._means.times) - MOST_MEANS)

    def means(self, after_ns: int, until_ns: int) -> list[float | None]:
        """Returns the mean of each figure over the samples in that time.

        What was folded into a mean counts as its end.
        """
        old, new = self._means.between(after_ns, until_ns), self._rows.between(after_ns, until_ns)
        return [_mean(a * MEAN_ROWS + b) for a, b in zip(old, new, strict=True)]

    def count(self, after_ns: int, until_ns: int) -> int:
        """Returns how many samples there were in that time."""
        spans = ((self._means.span(after_ns, until_ns), MEAN_ROWS), (self._rows.span(after_ns, until_ns), 1))
        return sum((last - first) * rows for (first, last), rows in spans)


class _Table:
    """Rows by time, column by column."""

    __slots__ = ("columns", "times")

    def __init__(self, width: int) -> None:
        self.times = array("q")
        self.columns = [array("f") for _ in range(width)]

    def add_row(self, at_ns: int, row: Sequence[float | None]) -> None:
        self.times.append(at_ns)
        for column, value in zip(self.columns, row, strict=True):
            column.append(math.nan if value is None else value)

    def drop(self, count: int) -> None:
        """Drops the oldest rows."""
        if count > 0:
            del self.times[:count]
            for column in self.columns:
                del column[:count]

    def span(self, after_ns: int, until_ns: int) -> tuple[int, int]:
        first = bisect_right(self.times, after_ns)
        return first, max(bisect_right(self.times, until_ns), first)

    def between(self, after_ns: int, until_ns: int) -> list[array[float]]:
        first, last = self.span(after_ns, until_ns)
        return [column[first:last] for column in self.columns]


def _mean(values: array[float]) -> float | None:
    return mean(value for value in values if not math.isnan(value))
