"""Confidence bounds of a median, whatever the distribution of the values."""

from __future__ import annotations

from collections.abc import Collection
from math import floor, sqrt
from statistics import NormalDist


def median_bounds(values: Collection[float], certainty: float) -> tuple[float, float]:
    """The two values that bound the median: the sign test, with the normal approximation of its statistic.

    Args:
        values: At least one.
        certainty: Of each bound by itself: how sure the median is not below the first, and not above the second. With
            too few values for that, the bounds are the least and the greatest.
    """
    ordered, count = sorted(values), len(values)
    deviations = NormalDist().inv_cdf(certainty)
    skipped = max(0, floor((count - deviations * sqrt(count) - 1) / 2))
    return ordered[skipped], ordered[-1 - skipped]
