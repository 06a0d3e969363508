"""The median of the newest values. They are kept in order: a new value needs no sorting."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class RollingMedian:
    """The newest values, and their median.

    Args:
        size: How many.
    """

    __slots__ = ("_newest", "_ordered", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, value: float) -> None:
        """Takes the next value; forgets the oldest beyond the size."""
        newest, ordered = self._newest, self._ordered
        if len(newest) == self._size:
            del ordered[bisect_left(ordered, newest.popleft())]
        newest.append(value)
        insort(ordered, value)

    def clear(self) -> None:
        """Forgets all values."""
        self._newest.clear()
        self._ordered.clear()

    def largest(self, count: int) -> list[float]:
        """So many of them, ascending."""
        return self._ordered[-count:]

    @property
    def median(self) -> float:
        """As by `statistics.median`. Needs at least one value."""
        half, odd = divmod(len(self._ordered), 2)
        return self._ordered[half] if odd else (self._ordered[half - 1] + self._ordered[half]) / 2
