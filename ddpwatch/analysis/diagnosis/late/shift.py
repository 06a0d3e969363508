"""Who is later than the others on average, by less than counting late steps shows.

Noise that lasts hardly jumps: what is new in a step, and not left of the one before, shows a rank that is suddenly
late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from math import exp
from operator import mul, sub
from statistics import NormalDist, fmean, median

from ddpwatch.analysis.diagnosis.late.group_noise import CLIP, GroupNoise
from ddpwatch.analysis.diagnosis.late.noise import FALSE_ALARMS, FIGURES, KEEP_STEPS, LOW
from ddpwatch.analysis.diagnosis.late.streak import Rhythm

# Newest watched steps in which a shift is looked for, and every how many of them
LOOKS = {8: 1, 10: 1, 12: 2, 16: 2, 24: 4, 32: 4, 48: 8, 64: 8, 96: 16, 128: 16, 256: 32, KEEP_STEPS - 1: 64}
JUMP = 2.0  # standard deviations of what is new in a step: where noise lasts, a shift may start with it
FEWEST_OVER = 3  # steps that exceed the lowest threshold
BEFORE = 128  # newest steps before these that show how large noise is, of two ranks
FEWEST_BEFORE = 32
TIMES_AS_OFTEN = 1.25  # times as often late as others is a rank that is looked at
SHIFT_MEDIAN = 0.5  # of the mean deviation: what the median is at least, if every step is late
PINELIS = 2 * exp(3) / 9  # by what a self-normalised sum exceeds a normal distribution's tail at most
LASTING_CLIP = 6.0  # standard deviations of what is new in a step: so far a jump counts; alone, it names nobody


def find_shift(noise: GroupNoise, over: Mapping[int, int]) -> tuple[int, Rhythm] | None:
    """Returns the rank, by position, that is later than the others on average, by more than noise of any size explains.

    It comes with a rhythm of every step.

    Args:
        noise: The group's newest steps, and what noise is.
        over: By position, the end of the rank's streak before.
    """
    best: tuple[int, Rhythm] | None = None
    if noise.bias or not (late := noise.often_late()):
        return None
    noise.estimate_correlation()
    if not noise.correlation_rows:
        return None
    least = shift_sure(len(noise.ranks), noise.kept > 0)
    for index in late:
        often, mask = TIMES_AS_OFTEN * noise.clean_rate(LOW, index), noise.exceeded[LOW].mask(index, noise.seen)
        for steps, every in LOOKS.items():
            if len(noise.rows) <= steps or (mask & ((1 << steps) - 1)).bit_count() < max(FEWEST_OVER, often * steps):
                continue
            if noise.seen % every and not (noise.kept and _jumps(noise, index, steps)):
                continue
            found = _shift(noise, index, steps, over.get(index, -1), least if best is None else best[1].sure)
            best = best if found is None else (index, found)
    return None if best is None or best[1].late_ns < max(LOW.ns, LOW.share * noise.step_ns) else best


def _jumps(noise: GroupNoise, index: int, steps: int) -> bool:
    """Returns whether a rank was suddenly late in the first of so many newest steps."""
    first, before = noise.rows[-steps].late[index], noise.rows[-steps - 1].late[index]
    return first - noise.kept * before > JUMP * noise.fresh_ns


def _shift(noise: GroupNoise, index: int, steps: int, since: int, least: float) -> Rhythm | None:
    """Returns by how much a rank was later than the others in so many newest steps, as a rhythm of every step.

    None if that is not enough standard errors, if some of these steps did not come after the one that is given, or if
    some are much later than others.
    """
    rows, kept = list(islice(reversed(noise.rows), steps + 1)), noise.kept
    if rows[-2].step <= since:
        return None
    limit = max((LASTING_CLIP if kept else CLIP) * noise.fresh_ns, noise.low_ns)
    own, peers = [row.late[index] for row in rows], noise.peers(index) if len(noise.ranks) > 2 else []
    means = [fmean([row.late[at] for at in peers]) for row in rows] if peers else [0.0] * len(rows)
    values = list(map(sub, own, means))
    found, variance = fresh(values, kept, limit), noise.fresh_ns**2
    mean, errors = shift(found, kept, variance)
    if errors <= least or not every_step_is_late(values[:steps], mean):
        return None  # and with what the others show of noise, it would be fewer
    if peers:
        others = [fresh([row.late[at] - by for row, by in zip(rows, means, strict=True)], kept, limit) for at in peers]
        power = sum(sum(map(mul, new, new)) for new in others) / steps / len(peers)
        shown: float | None = power * (len(peers) + 1) / (len(peers) - 1)
    else:
        before = [row.late[index] for row in islice(reversed(noise.rows), steps, steps + BEFORE + 1)]
        new = fresh(before, kept, limit)
        shown = sum(map(mul, new, new)) / len(new) if len(new) >= FEWEST_BEFORE else None
    mean, errors = shift(found, kept, None if shown is None else max(variance, shown))
    return Rhythm(1, 0, mean, errors) if errors > least else None


def every_step_is_late(values: Sequence[float], mean: float) -> bool:
    """Returns whether a rank is later by so much in every step, and not much later in some."""
    return median(values) >= SHIFT_MEDIAN * mean


def fresh(values: Sequence[float], kept: float, limit: float) -> list[float]:
    """Returns what is new in each step, newest first; without the oldest step, which only shows what is left of it.

    Args:
        values: Newest first.
        kept: The correlation of successive ones.
        limit: No step counts for more.
    """
    return [min(max(value - kept * before, -limit), limit) for value, before in pairwise(values)]


def shift(values: Sequence[float], kept: float, variance: float | None) -> tuple[float, float]:
    """Returns by how much a rank is later than before on average, and in standard errors (generalised least squares).

    All of that is new in the first step, and what noise does not keep of it in each step after that.

    Args:
        values: What is new in its steps, newest first.
        kept: The correlation of successive steps.
        variance: That of what is new, at least; None if it is not known: then all squares count as noise.
    """
    weights = [1 - kept] * (len(values) - 1) + [1.0]
    total, squares = sum(map(mul, weights, values)), sum(map(mul, weights, weights))
    mean = total / squares
    if variance is None:
        power = sum((weight * value) ** 2 for weight, value in zip(weights, values, strict=True))
    else:
        power = squares * max(variance, (sum(map(mul, values, values)) - total * mean) / len(values))
    return mean, total / power**0.5 if power > 0 else 0.0


@lru_cache
def shift_sure(ranks: int, lasting: bool) -> float:
    """Returns by how many standard errors a rank of so many has to be later on average."""
    looks = sum(1 if lasting else 1 / every for every in LOOKS.values())  # per step, at most
    return -NormalDist().inv_cdf(FALSE_ALARMS / 2 / PINELIS / (FIGURES * looks * ranks))
