"""Intervals of means over steps, which are not independent: caches, clocks and neighbours drift.

A run is cut into consecutive blocks, longer ones where blocks resemble their neighbours, and the interval is Student's
t of their means (batch means: Law, Simulation Modeling and Analysis, 9.5.3). It is wide where a few steps are long, or
where a run changed half-way: then another run of the kind might take something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, pvariance

from ddpwatch.common.statistics import student

CONFIDENCE = 0.99
MOST_BLOCKS = 40
FEWEST_BLOCKS = 6
STEPS_PER_BLOCK = 5
LEAST_AUTOCORRELATION, MOST_AUTOCORRELATION = -0.3, 0.15  # of neighbouring blocks
FEWEST_STEPS = 20

_Level = Callable[[Sequence[float]], float]


def ratio_of_means(a: Sequence[float], b: Sequence[float], level: _Level = fmean) -> tuple[float, float, float] | None:
    """Returns the mean of B over that of A, less 1, and its interval; of another ``level``, if that is given.

    None with too few steps, or where the level of A is 0.
    """
    if min(len(a), len(b)) < FEWEST_STEPS or not (base := level(a)):
        return None
    ratio = level(b) / base
    reach = _reach(_blocks(a, level), _blocks(b, level), ratio) / base
    return ratio - 1, ratio - 1 - reach, ratio - 1 + reach


def reach_of_change(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns half the width of the interval of the difference of two means."""
    return _reach(_blocks(a, fmean), _blocks(b, fmean), 1.0)


def _blocks(values: Sequence[float], level: _Level) -> list[float]:
    """Returns the levels of consecutive blocks, long enough that neighbours are nearly independent.

    They resemble each other in noise that lasts, and take turns where a long step of each period is in every other one.
    """
    count = max(FEWEST_BLOCKS, min(MOST_BLOCKS, len(values) // STEPS_PER_BLOCK))
    while True:
        edges = [round(block * len(values) / count) for block in range(count + 1)]
        found = [level(values[start:end]) for start, end in pairwise(edges)]
        if count <= FEWEST_BLOCKS or LEAST_AUTOCORRELATION < _autocorrelation(found) < MOST_AUTOCORRELATION:
            return found
        count = max(FEWEST_BLOCKS, count * 2 // 3)


def _autocorrelation(values: Sequence[float]) -> float:
    """Correlates each value with the next."""
    centre = fmean(values)
    spread = sum((value - centre) ** 2 for value in values)
    return sum((a - centre) * (b - centre) for a, b in pairwise(values)) / spread if spread else 0.0


def _reach(a: Sequence[float], b: Sequence[float], ratio: float) -> float:
    """Returns half the width of B's mean less ``ratio`` times A's, with the degrees of freedom of the fewer blocks."""
    variance = _variance(b) + ratio**2 * _variance(a)
    return math.sqrt(variance) * student(CONFIDENCE, min(len(a), len(b)) - 1)


def _variance(blocks: Sequence[float]) -> float:
    """Returns that of their mean, given how much they still resemble their neighbours (an AR(1) process)."""
    kept = max(_autocorrelation(blocks), 0.0)
    return pvariance(blocks) / (len(blocks) - 1) * (1 + kept) / (1 - kept)
