"""Between what a median lies, whatever the values are distributed like."""

from __future__ import annotations

from collections.abc import Collection
from math import floor, sqrt


def median_bounds(values: Collection[float]) -> tuple[float, float]:
    """The two order statistics between which the median lies: the sign test, with the normal approximation.

    Above the one it lies with at least 96 % certainty, and below the other, from five values on (5 of 5, 7 of 8, 12 of
    16). Of fewer, these are the least and the greatest.

    Raises:
        IndexError: There are no values.
    """
    ordered, count = sorted(values), len(values)
    skipped = max(0, floor(count / 2 - 0.98 * sqrt(count)))
    return ordered[skipped], ordered[-1 - skipped]
