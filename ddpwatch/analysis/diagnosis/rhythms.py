"""Who is late on average, in the steps of a rhythm or in all of them, by less than counting late steps shows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from math import exp
from operator import sub
from statistics import NormalDist, fmean

from ddpwatch.analysis.diagnosis.group_noise import MANY_RANKS, GroupNoise
from ddpwatch.analysis.diagnosis.noise import FALSE_ALARMS, FIGURES, LOW
from ddpwatch.analysis.diagnosis.streak import RHYTHM_STRUCK, RHYTHMS, Rhythm, rhythm, shift

# Newest watched steps in which a rhythm, or a shift, is looked for, and every how many of them
RHYTHM_LOOKS = {64: 8, 128: 16, 256: 32, 512: 64}
SHIFT_LOOKS = {8: 4, 16: 8, 32: 8, 64: 8, 128: 16, 256: 32, 512: 64}
LOOK_EVERY = min(*RHYTHM_LOOKS.values(), *SHIFT_LOOKS.values())
SHIFT_BEFORE = 128  # newest steps before these that show how large noise is, of two ranks
FEWEST_BEFORE = 32
SHIFT_OFTEN = 1.25  # times as often late as others is a rank that is looked at
PINELIS = 2 * exp(3) / 9  # by what a self-normalised sum exceeds a normal distribution's tail at most
RHYTHM_CLIP = 3.0  # standard deviations: no step counts for more, so that the mean of a few is nearly normal
MOST_RHYTHMIC = 4  # of many ranks, those that are late most often


def find_rhythm(noise: GroupNoise, over: Mapping[int, int]) -> tuple[int, Rhythm] | None:
    """The rank, by position, that is late in a rhythm, by more than noise of any size explains.

    Args:
        noise: The group's newest steps, and what noise is.
        over: By position, the end of the rank's streak before.
    """
    best: tuple[int, Rhythm] | None = None
    due = [s for s, every in RHYTHM_LOOKS.items() if noise.seen % every == 0 and 2 * len(noise.rows) > s]
    for index in _often_late(noise) if due else ():
        for steps in due:
            found = rhythm_of(noise, index, steps, over.get(index, -1), rhythm_sure(len(noise.ranks)))
            if found is not None and (best is None or found.sure > best[1].sure):
                best = index, found
    return best


def rhythm_of(noise: GroupNoise, index: int, steps: int, since: int, sure: float) -> Rhythm | None:
    """A rank's rhythm in so many newest steps, as far as they came after one."""
    rows = [(row.step, row.late[index]) for row in islice(reversed(noise.rows), steps) if row.step > since]
    found = rhythm(rows, max(RHYTHM_CLIP * noise.scale_ns, noise.low_ns), sure)
    return found if found is not None and found.late_ns >= max(LOW.ns, LOW.share * noise.step_ns) else None


def find_shift(noise: GroupNoise, over: Mapping[int, int]) -> tuple[int, Rhythm] | None:
    """The rank, by position, that is later than the others on average, by more than noise of any size explains.

    It comes with a rhythm of every step, and takes what `find_rhythm` does.
    """
    best: tuple[int, Rhythm] | None = None
    due = [s for s, every in SHIFT_LOOKS.items() if noise.seen % every == 0 and len(noise.rows) >= s]
    for index in () if noise.bias else _often_late(noise):
        often, mask = SHIFT_OFTEN * noise.clean_rate(LOW, index), noise.exceeded[LOW].mask(index, noise.seen)
        for steps in due:
            if (mask & ((1 << steps) - 1)).bit_count() < often * steps:
                continue
            found = _shift(noise, index, steps, over.get(index, -1))
            if found.sure > (shift_sure(len(noise.ranks)) if best is None else best[1].sure):
                best = index, found
    return None if best is None or best[1].late_ns < max(LOW.ns, LOW.share * noise.step_ns) else best


def _shift(noise: GroupNoise, index: int, steps: int, since: int) -> Rhythm:
    """By how much a rank was later than the others in so many newest steps, as a rhythm of every step.

    By nothing, if some of these did not come after the step that is given.
    """
    noise.estimate_memory()
    rows = list(islice(reversed(noise.rows), steps))
    if not noise.calm or rows[-1].step <= since:
        return Rhythm(1, 0, 0.0, 0.0)
    limit = max(RHYTHM_CLIP * noise.scale_ns, noise.low_ns)
    own = [min(max(row.late[index], -limit), limit) for row in rows]
    if len(noise.ranks) == 2:
        before = [row.late[index] for row in islice(reversed(noise.rows), steps, steps + SHIFT_BEFORE)]
        power = sum(min(abs(value), limit) ** 2 for value in before)
        variance = power / len(before) if len(before) >= FEWEST_BEFORE else None
    else:
        peers = noise.peers(index)
        others = [[min(max(row.late[at], -limit), limit) for at in peers] for row in rows]
        means = list(map(fmean, others))
        power = sum((value - mean) ** 2 for values, mean in zip(others, means, strict=True) for value in values)
        variance = power / steps / len(peers) * (len(peers) + 1) / (len(peers) - 1)
        own = list(map(sub, own, means))
    mean, errors = shift(own, variance and max(variance, noise.scale_ns**2))
    return Rhythm(1, 0, mean, errors / noise.memory**0.5)


def _often_late(noise: GroupNoise) -> list[int]:
    """The ranks, by position, that may have a rhythm or a shift; of many, those that are late most often."""
    counts = {index: mask.bit_count() for index, mask in noise.exceeded[LOW].masks(noise.seen).items()}
    free = [at for at, count in counts.items() if count >= RHYTHM_STRUCK and noise.ranks[at] not in noise.streaks]
    return sorted(free, key=counts.__getitem__)[-MOST_RHYTHMIC:] if len(noise.ranks) > MANY_RANKS else free


@lru_cache
def rhythm_sure(ranks: int) -> float:
    """By how many standard errors a rhythm has to show, in a group of so many ranks."""
    looks = sum(1 / every for every in RHYTHM_LOOKS.values())  # per step
    return -NormalDist().inv_cdf(FALSE_ALARMS / 2 / (FIGURES * RHYTHMS * looks * ranks))


@lru_cache
def shift_sure(ranks: int) -> float:
    """By how many standard errors a rank of so many has to be later on average."""
    looks = sum(1 / every for every in SHIFT_LOOKS.values())  # per step
    return -NormalDist().inv_cdf(FALSE_ALARMS / 2 / PINELIS / (FIGURES * looks * ranks))
