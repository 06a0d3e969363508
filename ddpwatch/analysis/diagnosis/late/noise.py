"""How late is too late: what is noise in a group of alike ranks, and how often chance alone goes beyond it.

In each step, every rank's *deviation* is how much later than the median rank of its group it launched the step's last
bucket. Ranks that are alike exceed a threshold alike, and rarely. So a rank is named by counting: it exceeded a
threshold in more of the newest steps than chance explains. ``docs/diagnosis.md`` derives the rate of false alarms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import asin, ceil, exp, fsum, lgamma, log, log1p, log10, pi, sin
from operator import sub
from statistics import NormalDist
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.late.trend import Trend

WINDOWS = (5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # newest steps, counted again and again
KEEP_STEPS = WINDOWS[-1]
FALSE_ALARMS = 1e-6  # per step and group, at most: all figures, ranks, windows and thresholds together
FIGURES = 5  # by which ranks are compared: their lateness, and four phases
_GRID = 16  # probabilities per factor of ten
_NORMAL_THIRD = 0.4307  # half of the stretch that holds a third of a normal distribution, in standard deviations
_NEVER = 1 << 30
_LEAST_UNSURE = 1 / 16384  # what one of `alarm_counts` is rounded up to multiples of
_PER_STEP, _STRIPS, _UNLIKE = 4, 32, 1e-3  # of `lasting`: its grid, strips of an integral, the least correlation
MOST_PROBABLE = 0.99  # what a probability is taken to be at most


class Threshold(NamedTuple):
    """When a deviation counts.

    Attributes:
        ns, share: At least: that long, and that share of a step.
        deviations: At least: so many standard deviations.
        clean: How often an alike rank exceeds it, before anything is known of this job. Noise with heavier tails
            than a normal distribution's is allowed for.
        floor: How seldom it may be taken to do so, whatever was seen.
    """

    ns: float
    share: float
    deviations: float
    clean: float
    floor: float

    def at(self, scale_ns: float, step_ns: float) -> float:
        """Returns the threshold in ns, for noise and steps of that size."""
        return max(self.ns, self.share * step_ns, self.deviations * scale_ns)


THRESHOLDS = (  # the larger ones count where noise has outliers: those are smaller than a fault, or rarer
    Threshold(ns=1e6, share=0.03, deviations=1.5, clean=0.15, floor=0.05),
    Threshold(ns=1e6, share=0.04, deviations=4.0, clean=0.01, floor=0.005),
    Threshold(ns=1e6, share=0.08, deviations=8.0, clean=0.004, floor=0.002),
    Threshold(ns=1e6, share=0.16, deviations=16.0, clean=0.002, floor=0.001),
)
LOW, *RARE = THRESHOLDS
LASTING = THRESHOLDS[:2]  # those that noise which lasts for several steps can exceed again and again
GROWTH_FIT = 0.8  # share of the variance that a straight line explains: noise that lasts seldom looks like that
CORRELATION_NOTICED = 0.25  # correlation of successive steps: less may be chance
LONGEST_CORRELATION_TIME = 20.0
FURTHEST_NS = 1 << 61  # 73 years
CLEAN_WEIGHT = 64  # how many steps of a rank what is assumed of clean ranks counts for


def deviations(launches: Sequence[int]) -> list[int]:
    """Returns how much later than the median rank each rank launched (ns); of two ranks, than the other.

    No more than `FURTHEST_NS`: launches that a file makes up may be further apart than 64 bits reach.
    """
    ordered = sorted(launches)
    if ordered[-1] - ordered[0] > FURTHEST_NS:
        return deviations([min(launch, ordered[0] + FURTHEST_NS) for launch in launches])
    if len(launches) == 2:
        first, second = launches
        return [first - second, second - first]
    middle = ordered[(len(launches) - 1) // 2]
    return [launch - middle for launch in launches]


def scale(values: Sequence[int]) -> float:
    """Returns the standard deviation of noise (ns), from the shortest stretch that holds a third of the values.

    The others may be anything: ranks that are always late, or first one and then the other.
    """
    ordered, count = sorted(values), len(values)
    third = (count + 2) // 3
    if third < 2:
        return 0.0
    width: int = min(map(sub, ordered[third - 1 :], ordered))
    return width / 2 / _NORMAL_THIRD * (1 + 8 / count)


def without_growth(values: Sequence[int]) -> list[int]:
    """Returns the values without their straight line, if that is nearly all that there is to them."""
    trend = Trend()
    for x, y in enumerate(values):
        trend.add_point(x, y)
    line = trend.line(len(values) - 1)
    if line.fit < GROWTH_FIT:
        return list(values)
    return [y - int(line.at(x)) for x, y in enumerate(values)]


def correlation_time(kept: float, count: int) -> float:
    """Returns how many successive steps noise makes alike: 1 if each step is independent of the one before.

    Args:
        kept: The correlation of successive steps.
        count: Of how many.
    """
    if kept <= CORRELATION_NOTICED:
        return 1.0
    kept += (1 + 3 * kept) / count + ((1 - kept**2) / count) ** 0.5  # Kendall's bias, and an error
    return min(LONGEST_CORRELATION_TIME, (1 + kept) / (1 - kept)) if kept < 1 else LONGEST_CORRELATION_TIME


def lasting(correlation_time: float, deviations: float) -> float:
    """Returns for how many successive steps noise exceeds a threshold: the higher that is, the sooner it is below.

    Noise is taken to be a first-order autoregression with normal steps.

    Args:
        correlation_time: How many successive steps it makes alike.
        deviations: The threshold, in standard deviations.
    """
    return _lasting(ceil(correlation_time * _PER_STEP), deviations)


@lru_cache
def _lasting(correlation_time: int, deviations: float) -> float:
    """Returns one, and twice the correlation of exceeding the threshold in a step and in each one after it."""
    kept = (correlation_time - _PER_STEP) / (correlation_time + _PER_STEP)
    tail = NormalDist().cdf(-deviations)
    steps, correlation = 1.0, kept
    while correlation > _UNLIKE:
        width = asin(correlation) / _STRIPS
        both = sum(exp(-(deviations**2) / (1 + sin((strip + 0.5) * width))) for strip in range(_STRIPS))
        steps += 2 * both * width / (2 * pi) / (tail * (1 - tail))
        correlation *= kept
    return steps


def alarm_counts(probability: float, ranks: int, unsure: float = 0.0) -> tuple[int, ...]:
    """Returns for each window how many of its steps have to exceed a threshold to name one of so many ranks.

    Args:
        probability: How often a step does.
        ranks: How many.
        unsure: The variance of that estimate, as a share of the variance of one step.
    """
    step = -int(-log10(probability) * _GRID)  # rounded up
    return _alarm_counts(step, ranks.bit_length(), ceil(unsure / _LEAST_UNSURE))


@lru_cache(maxsize=4096)
def _alarm_counts(grid: int, doublings: int, unsure: int) -> tuple[int, ...]:
    known = zip(WINDOWS, _sure_counts(grid, doublings), strict=True)
    return tuple(_unsure_count(window, _of_grid(grid), count, unsure * _LEAST_UNSURE) for window, count in known)


@lru_cache(maxsize=4096)
def _sure_counts(grid: int, doublings: int) -> tuple[int, ...]:
    allowed = FALSE_ALARMS / (FIGURES * len(WINDOWS) * len(THRESHOLDS) * 2**doublings)
    return tuple(_alarm_count(window, _of_grid(grid), allowed) for window in WINDOWS)


def _of_grid(grid: int) -> float:
    return min(MOST_PROBABLE, 10 ** (grid / _GRID))


def _unsure_count(window: int, probability: float, count: int, unsure: float) -> int:
    """Returns the count that is as many standard deviations beyond the mean, where that is an estimate."""
    mean = window * probability
    wider = round(mean + (count - mean) * (1 + window * unsure) ** 0.5)
    return wider if wider <= window else _NEVER


def at_least(count: int, steps: int, probability: float) -> float:
    """Returns the chance that at least so many steps exceed a threshold, each with a probability."""
    probability = min(MOST_PROBABLE, probability)
    return fsum(exp(_log_chance(late, steps, probability)) for late in range(count, steps + 1))


def _log_chance(count: int, steps: int, probability: float) -> float:
    """Returns the logarithm of the chance that so many of the steps do.

    It may be far too small, or have too many ways.
    """
    ways = lgamma(steps + 1) - lgamma(count + 1) - lgamma(steps - count + 1)
    return ways + count * log(probability) + (steps - count) * log1p(-probability)


def _alarm_count(window: int, probability: float, allowed: float) -> int:
    """Returns the least count whose binomial tail is below what is allowed."""
    tail = 0.0
    for count in range(window, -1, -1):
        tail += exp(_log_chance(count, window, probability))
        if tail > allowed:
            return count + 1 if count < window else _NEVER
    return 0
