"""Who is late on average in the steps of a rhythm, by less than counting late steps shows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from statistics import NormalDist

from ddpwatch.analysis.diagnosis.group_noise import CLIP, GroupNoise
from ddpwatch.analysis.diagnosis.noise import FALSE_ALARMS, FIGURES, LOW
from ddpwatch.analysis.diagnosis.streak import RHYTHMS, Rhythm, rhythm

# Newest watched steps in which a rhythm is looked for, and every how many of them
RHYTHM_LOOKS = {64: 8, 128: 16, 256: 32, 512: 64}
LOOK_EVERY = min(RHYTHM_LOOKS.values())


def find_rhythm(noise: GroupNoise, over: Mapping[int, int]) -> tuple[int, Rhythm] | None:
    """The rank, by position, that is late in a rhythm, by more than noise of any size explains.

    Args:
        noise: The group's newest steps, and what noise is.
        over: By position, the end of the rank's streak before.
    """
    best: tuple[int, Rhythm] | None = None
    due = [s for s, every in RHYTHM_LOOKS.items() if noise.seen % every == 0 and 2 * len(noise.rows) > s]
    for index in noise.often_late() if due else ():
        for steps in due:
            found = rhythm_of(noise, index, steps, over.get(index, -1), rhythm_sure(len(noise.ranks)))
            if found is not None and (best is None or found.sure > best[1].sure):
                best = index, found
    return best


def rhythm_of(noise: GroupNoise, index: int, steps: int, since: int, sure: float) -> Rhythm | None:
    """A rank's rhythm in so many newest steps, as far as they came after one."""
    rows = [(row.step, row.late[index]) for row in islice(reversed(noise.rows), steps) if row.step > since]
    found = rhythm(rows, max(CLIP * noise.scale_ns, noise.low_ns), sure)
    return found if found is not None and found.late_ns >= max(LOW.ns, LOW.share * noise.step_ns) else None


@lru_cache
def rhythm_sure(ranks: int) -> float:
    """By how many standard errors a rhythm has to show, in a group of so many ranks."""
    looks = sum(1 / every for every in RHYTHM_LOOKS.values())  # per step
    return -NormalDist().inv_cdf(FALSE_ALARMS / 2 / (FIGURES * RHYTHMS * looks * ranks))
