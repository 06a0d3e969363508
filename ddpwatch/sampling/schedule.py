"""Which steps are recorded in full, which are watched at all, so that what watching takes stays within a budget.

Seeing a bucket's collective means to run Python in the middle of a backward that had none. The code itself takes a
few microseconds; that it is cold, and leaves the backward's own caches cold, takes several times that. So not every
step need be recorded in full: a *shadow* step keeps its phases and what DDP notes by itself (when each gradient
came, hence when each bucket was launched), and leaves the collectives alone. And a few steps are *unwatched*: of these
only begin and end are known. Steps of all kinds lie side by side, so what watching costs can be told at any time by
comparison (`ddpwatch.sampling.cost`).

A shadow, too, takes two tenths of a millisecond: nothing in a step of half a second, 0.2 % of one of a tenth. So where
steps are short, every second one is watched, and one in 64 in full. Who minds more can have every fourth watched; who
minds less, all.

All ranks have to choose the same steps without talking to each other: a choice depends on the step's number alone,
and what a longer period chooses, the shorter ones choose too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from statistics import median

WATCHED_BUDGET = 0.002  # of a step: what watching at all may take
FULL_BUDGET = 0.00075  # what full steps may take beyond that; together less than the 0.3 % that ddpwatch promises
LONGEST = {"": 2, "all": 1, "few": 4}  # period of the watched steps
LONGEST_FULL = 64  # period of the full ones
FIRST_FULL = 12  # steps from the start that are recorded in full: DDP settles its buckets there
UNWATCHED = 32  # every how many steps at least one is not watched
JUDGED = 8  # steps that a decision rests on

_log = logging.getLogger("ddpwatch")


class SamplingPeriod:
    """One step in so many, a power of two: what they take, spread over all steps, is to stay within a budget.

    Args:
        budget: As a share of the step.
        unseen: What such a step takes for each nanosecond that the hooks see of themselves (`benchmarks/overhead.py`
            prints both).
        longest: The longest period, whatever they take.

    Attributes:
        value: The period.
    """

    def __init__(self, budget: float, unseen: float, longest: int) -> None:
        self.value = 1
        self._budget = budget
        self._unseen = unseen
        self._longest = longest
        self._own: list[int] = []
        self._steps: list[int] = []

    def learn(self, own_ns: int, step_ns: int) -> None:
        """Takes what the hooks saw of themselves in such a step, and its duration."""
        if self._longest == 1:  # nothing to choose, and this runs in every step of the job
            return
        self._own.append(own_ns)
        self._steps.append(step_ns)
        if len(self._own) < JUDGED:
            return
        wanted = self._unseen * median(self._own) / max(1.0, self._budget * median(self._steps))
        self._own.clear()
        self._steps.clear()
        if wanted > self.value or 4 * wanted < self.value:
            self.value = min(self._longest, 1 << max(0, int(wanted - 1e-9)).bit_length())


class SamplingSchedule:
    """Chooses.

    Args:
        longest: The longest period of the watched steps.

    Attributes:
        full: The period of the full steps.
        watched: That of the watched ones, the full among them. Both have an end, so that there are always enough of
            them among the newest steps to judge by: watching steps shorter than 80 ms may cost more than the budget.
    """

    def __init__(self, longest: int = LONGEST[""]) -> None:
        self.full = SamplingPeriod(FULL_BUDGET, unseen=6, longest=LONGEST_FULL)
        self.watched = SamplingPeriod(WATCHED_BUDGET, unseen=2, longest=longest)

    def is_shadow(self, step: int) -> bool:
        """Whether this step, if it is watched, is a shadow."""
        return step >= FIRST_FULL and not chosen(step, self.full.value)

    def is_unwatched(self, step: int) -> bool:
        """Whether this step is not watched. Where few are not, full ones lie elsewhere: both neighbours are shadows."""
        if self.watched.value > 1:
            return step >= UNWATCHED and not chosen(step, self.watched.value)
        return step >= UNWATCHED and chosen(step ^ 2, UNWATCHED)


def schedule_of(environment: Mapping[str, str] = os.environ) -> SamplingSchedule | None:
    """The pace of this process, None where every step is to be recorded in full.

    ``DDPWATCH_STEPS`` asks for that with ``full``; with ``all``, for every step to be watched, but for one in 32; with
    ``few``, for at least every fourth rather than every second, where steps are short.
    """
    wanted = environment.get("DDPWATCH_STEPS", "")
    if wanted == "full":
        return None
    if wanted not in ("", *LONGEST):
        _log.warning("DDPWATCH_STEPS is %r, which asks for nothing; hint: few, all or full", wanted[:50])
    return SamplingSchedule(LONGEST.get(wanted, LONGEST[""]))


def chosen(step: int, period: int) -> bool:
    """One step of each ``period`` (a power of two), not the same one each time.

    The first half or the second, then which half of that, and so on: each by the toss of a coin that belongs to that
    stretch of steps. So the choice has no rhythm that could coincide with one of the job's.
    """
    for level in range(period.bit_length() - 1):
        half, step = step & 1, step >> 1
        if half != _coin(step, level):
            return False
    return True


def _coin(number: int, salt: int) -> int:
    mixed = (number * 0x9E3779B1 + salt * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (mixed >> 16) & 1
