"""Medians, means and quantiles, where those of the standard library are too slow, or slow to import in every rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from math import floor, sqrt


def median(values: Iterable[float]) -> float:
    """Returns the median, as `statistics.median` does. Needs at least one value."""
    return middle(sorted(values))


def middle(ordered: Sequence[float]) -> float:
    """Returns the median of ascending values. Needs at least one."""
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2


def median_low(values: Iterable[int]) -> int:
    """Returns the lower of the two in the middle, as `statistics.median_low` does. Needs at least one value."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def p50(values: Iterable[float | None]) -> float | None:
    """Returns the median of the known values; None without any."""
    known = sorted([value for value in values if value is not None])
    return middle(known) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns a quantile (nearest rank) of ascending values. Needs at least one."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_bounds(values: Collection[float], certainty: float) -> tuple[float, float]:
    """Bounds the median by two of the values: the sign test, with the normal approximation of its statistic.

    Args:
        values: At least one, however they are distributed.
        certainty: Of each bound by itself: how sure the median is not below the first, and not above the second. With
            too few values for that, the bounds are the least and the greatest.
    """
    from statistics import NormalDist  # 2 ms, which ranks do not spend

    ordered, count = sorted(values), len(values)
    deviations = NormalDist().inv_cdf(certainty)
    skipped = max(0, floor((count - deviations * sqrt(count) - 1) / 2))
    return ordered[skipped], ordered[-1 - skipped]


def student(confidence: float, freedom: float) -> float:
    """Returns the two-sided quantile of Student's t, by its expansion (Abramowitz and Stegun 26.7.5)."""
    from statistics import NormalDist

    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


class RollingMedian:
    """The newest values, and their median. They are kept in order: a new value needs no sorting.

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

    def add_value(self, value: float) -> None:
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

    def smallest(self, count: int) -> list[float]:
        """Returns so many of them, ascending."""
        return self._ordered[:count]

    def largest(self, count: int) -> list[float]:
        """Returns so many of them, ascending."""
        return self._ordered[-count:]

    def share_from(self, value: float) -> float:
        """Returns which share of them is at least that. Needs at least one value."""
        return 1 - bisect_left(self._ordered, value) / len(self._ordered)

    @property
    def lowest(self) -> float:
        """The least of them. Needs at least one value."""
        return self._ordered[0]

    @property
    def highest(self) -> float:
        """The greatest of them. Needs at least one value."""
        return self._ordered[-1]

    @property
    def median(self) -> float:
        """The median. Needs at least one value."""
        return middle(self._ordered)
