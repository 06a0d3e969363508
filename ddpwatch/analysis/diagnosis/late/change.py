"""From when on a rank is later, or more often late, than before: a streak that changes is two incidents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from operator import mul
from statistics import median

from ddpwatch.analysis.diagnosis.late.noise import correlation_time

CHANGE_EVERY = 4  # late steps, from one look for a change to the next
CHANGE_STEPS = 128  # newest watched steps, in which it is looked for
CHANGE_SURE = 6.5  # standard errors by which the steps since then differ from those before
NO_GROWTH = 3.0  # the same, by which they differ more than steady growth explains
CHANGE_GROWTH = 1.5  # and the factor
GROWTH_EVERY = 4  # watched steps, from one possible start of steady growth to the next
FEWEST_CHANGED = 5  # watched steps since then
NEWEST_LATE = 8  # late steps, of which the median says how late the rank is now


def change(values: Sequence[tuple[int, int, bool]], least_ns: float) -> int | None:
    """Returns the step since which a rank is later on average; None if chance, or steady growth, explains it.

    Of all ways to cut the steps in two, it is the one with the greatest likelihood. A deviation counts as no more than
    twice that of a typical late step, so that a single one shows no change.

    Args:
        values: Watched steps, their deviations (ns), and whether they were late; oldest first.
        least_ns: By how much later it is, at least.
    """
    limit = 2 * median(islice((value for _, value, late in reversed(values) if late), NEWEST_LATE))
    late = [min(max(value, -limit), limit) for _, value, _ in values]
    count, total = len(late), sum(late)
    at, before, since, best = 0, 0.0, 0.0, 0.0
    for first, part in enumerate(islice(accumulate(late), max(0, count - FEWEST_CHANGED)), 1):
        mean, mean_since = part / first, (total - part) / (count - first)
        explained = (mean_since - mean) ** 2 * first * (count - first) / count
        if explained > best and mean_since > mean:
            at, before, since, best = first, mean, mean_since, explained
    if not at or since < max(CHANGE_GROWTH * before, before + least_ns):
        return None
    rest = [value - (before if number < at else since) for number, value in enumerate(late)]
    power = sum(map(mul, rest, rest))
    kept = sum(map(mul, rest, islice(rest, 1, None))) / power if power else 0.0
    error = correlation_time(kept, count) * power / (count - 2)
    if best <= CHANGE_SURE**2 * error:
        return None
    growth = max(_of_growth(late, first) for first in range(0, count - 2, GROWTH_EVERY))
    return values[at][0] if best > growth + NO_GROWTH**2 * error else None


def _of_growth(values: Sequence[float], first: int) -> float:
    """Returns the part of the sum of squares that steady growth from a position on explains."""
    count, grown = len(values), len(values) - first
    mean = grown * (grown - 1) / 2 / count
    both: float = sum(map(mul, islice(values, first, None), range(grown))) - mean * sum(values)
    return both * both / ((grown - 1) * grown * (2 * grown - 1) / 6 - count * mean * mean)
