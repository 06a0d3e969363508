"""Whether a rank is late on average, though few of its steps are later than noise explains: a fault smaller than noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median

STEADY_WINDOWS = (16, 24, 32, 48, 64, 96, 128, 192, 256)  # newest watched steps
STEADY_SURE = 6.5  # standard errors of a normal distribution: a chance of 4e-11 for one window
UNNOTICED = 5 / 3  # factor of the variance: correlation of successive steps of up to 0.25 is not noticed
MOST_OTHERS = 16  # ranks that the rank is compared with


def steady_lateness(rows: Sequence[Sequence[int]], index: int, limit_ns: float) -> tuple[int, float] | None:
    """The longest window over which a rank is later on average than others, and by how much; None if chance explains it.

    Args:
        rows: The deviations of all ranks, newest step first.
        index: The rank's position.
        limit_ns: Deviations count up to that.
    """
    count = min(len(rows), STEADY_WINDOWS[-1])
    others = [] if len(rows[0]) == 2 else [at for at in range(len(rows[0])) if at != index][:MOST_OTHERS]
    own = _clipped(rows[:count], index, limit_ns)
    sums, squares = list(accumulate(own)), list(accumulate(value * value for value in own))
    usual = [list(accumulate(_clipped(rows[:count], at, limit_ns))) for at in others]
    for window in reversed(STEADY_WINDOWS):
        if window > count:
            continue
        mean = sums[window - 1] / window
        late = mean - (median(column[window - 1] for column in usual) / window if usual else 0.0)
        variance = max(0.0, squares[window - 1] / window - mean * mean) * (1 + 1 / len(others) if others else 1)
        if late > _sure(window) * (variance * UNNOTICED / window) ** 0.5:
            return window, late
    return None


def _clipped(rows: Sequence[Sequence[int]], index: int, limit_ns: float) -> list[float]:
    return [min(max(row[index], -limit_ns), limit_ns) for row in rows]


def _sure(count: int) -> float:
    """`STEADY_SURE` where the variance is estimated from so many steps: Student's distribution (Cornish and Fisher)."""
    z, free = STEADY_SURE, count - 1
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
