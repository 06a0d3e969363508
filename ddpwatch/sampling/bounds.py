"""Between what a median lies, whatever the values are distributed like."""

from __future__ import annotations

from collections.abc import Collection
from math import floor, sqrt
from statistics import NormalDist


def median_bounds(values: Collection[float], certainty: float) -> tuple[float, float]:
    """The two values between which the median lies: the sign test, with the normal approximation of its statistic.

    Args:
        values: At least one.
        certainty: How sure it is to be that the median is no less than the first; likewise, no more than the second.
            Of values too few for that, the bounds are the least and the greatest.
    """
    ordered, count = sorted(values), len(values)
    deviations = NormalDist().inv_cdf(certainty)
    skipped = max(0, floor((count - deviations * sqrt(count) - 1) / 2))
    return ordered[skipped], ordered[-1 - skipped]
