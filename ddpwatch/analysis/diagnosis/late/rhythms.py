"""Who is late on average in the steps of a rhythm, by less than counting late steps shows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from statistics import NormalDist, fmean, pstdev

from ddpwatch.analysis.diagnosis.late.group_noise import GroupNoise
from ddpwatch.analysis.diagnosis.late.noise import FALSE_ALARMS, FIGURES, LOW
from ddpwatch.analysis.diagnosis.late.shift import BEFORE, FEWEST_BEFORE
from ddpwatch.analysis.diagnosis.late.streak import MOST_RHYTHM, RHYTHM_STRUCK, Rhythm, rhythm

# Newest watched steps in which a rhythm is looked for, and every how many of them
RHYTHM_LOOKS = {16: 2, 20: 2, 24: 2, 32: 4, 48: 8, 64: 8, 128: 16, 256: 32, 512: 64}
LOOK_EVERY = 8  # watched steps, or sooner where one is late
KNOWN_FROM = 64  # watched steps, that show noise well enough


def find_rhythm(noise: GroupNoise, over: Mapping[int, int]) -> tuple[int, Rhythm] | None:
    """Returns the rank, by position, that is late in a rhythm, by more than noise of any size explains.

    Args:
        noise: The group's newest steps, and what noise is.
        over: By position, the end of the rank's streak before.
    """
    best: tuple[int, Rhythm] | None = None
    due = [s for s, every in RHYTHM_LOOKS.items() if noise.seen % every == 0 and 2 * len(noise.rows) > s]
    for index in noise.often_late() if due else ():
        since = over.get(index, -1)
        for steps in due:
            sure = rhythm_sure(len(noise.ranks), steps)
            found = rhythm_of(noise, index, steps, since, sure)
            if found is None or (best is not None and found.sure <= best[1].sure):
                continue
            if steps >= KNOWN_FROM or _stands_out(noise, index, steps, since, found):
                best = index, found
    return best


def _stands_out(noise: GroupNoise, index: int, steps: int, since: int, found: Rhythm) -> bool:
    """Returns whether a rhythm is as sure by the noise before so few steps: in these, all may vary alike by chance.

    All of these steps must have come after the one that is given.
    """
    limit, newest = noise.most_ns, islice(reversed(noise.rows), steps + BEFORE)
    rows = [(row.step, min(max(row.late[index], -limit), limit)) for row in newest]
    before = [value for _, value in rows[steps:]]
    if len(before) < FEWEST_BEFORE or rows[steps - 1][0] <= since:
        return False
    on, off = ([value for step, value in rows[:steps] if found.strikes(step) == struck] for struck in (True, False))
    error = pstdev(before) * (1 / len(on) + 1 / len(off)) ** 0.5
    return bool(fmean(on) - fmean(off) >= rhythm_sure(len(noise.ranks), steps) * error)


def rhythm_of(noise: GroupNoise, index: int, steps: int, since: int, sure: float) -> Rhythm | None:
    """Returns a rank's rhythm in so many newest steps, as far as they came after one."""
    rows = [(row.step, row.late[index]) for row in islice(reversed(noise.rows), steps) if row.step > since]
    found = rhythm(rows, noise.most_ns, sure)
    return found if found is not None and found.late_ns >= max(LOW.ns, LOW.share * noise.step_ns) else None


@lru_cache
def rhythm_sure(ranks: int, steps: int) -> float:
    """Returns by how many standard errors a rhythm has to show in so many newest steps, in a group of so many ranks.

    Each look has the same share of the false alarms.
    """
    rhythms = sum(min(period, steps // RHYTHM_STRUCK) for period in range(2, MOST_RHYTHM + 1))
    allowed = FALSE_ALARMS / 2 / (FIGURES * ranks * len(RHYTHM_LOOKS))
    return -NormalDist().inv_cdf(allowed * RHYTHM_LOOKS[steps] / rhythms)
