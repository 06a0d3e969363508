"""Which steps are recorded in full, which are watched at all: as many as keep what watching takes within its budget.

Seeing a bucket's collective means to run Python in the middle of a backward that had none. The code itself takes a
few microseconds; that it is cold, and leaves the backward's own caches cold, takes several times that. So not every
step need be recorded in full: a *shadow* step keeps its phases and what DDP notes by itself (when each gradient
came, hence when each bucket was launched), and leaves the collectives alone. That, too, takes a few tenths of a
millisecond: nothing in a step of half a second, noticeable in one of a tenth. The remaining steps are *unwatched*: of
these only begin and end are known. When steps become longer or shorter all at once, the next ones are all watched, and
more of them in full: something has happened that is to be named. Steps of all kinds lie side by side, so what watching
costs can be told at any time by comparison (`ddpwatch.analysis.cost`).

All ranks have to choose the same steps without talking to each other: a choice depends on the step's number alone,
and what a longer period chooses, the shorter ones choose too. (That steps have changed shows on every rank: they
wait for each other.)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from math import inf
from statistics import median

BUDGET = 0.003  # of a step: what watching may take
FIRST_FULL = 12  # steps from the start that are recorded in full: DDP settles its buckets there
UNWATCHED = 32  # every how many steps at least one is not watched
JUDGED = 8  # steps that a decision rests on
CHANGED = (
    0.2  # two steps in a row, so much longer (or shorter) than the longest (shortest) of those before, have a reason
)
ATTENTIVE = 32  # steps that are all watched then
DETAILED = 8  # and every how many of these at least one is full


_log = logging.getLogger("ddpwatch")


class Period:
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
        self._own.append(own_ns)
        self._steps.append(step_ns)
        if len(self._own) < JUDGED:
            return
        wanted = self._unseen * median(self._own) / max(1.0, self._budget * median(self._steps))
        self._own.clear()
        self._steps.clear()
        if wanted > self.value or 4 * wanted < self.value:
            self.value = min(self._longest, 1 << max(0, int(wanted - 1e-9)).bit_length())


class Pace:
    """Chooses. A third of the budget is for full steps, the rest for watching at all.

    Attributes:
        full: The period of the full steps.
        watched: That of the watched ones, the full among them. Both have an end, so that there are always enough of
            them among the newest steps to judge by: watching steps shorter than 50 ms may cost more than the budget.
    """

    def __init__(self) -> None:
        self.full = Period(BUDGET / 3, unseen=10, longest=32)
        self.watched = Period(BUDGET * 2 / 3, unseen=2, longest=4)
        self._durations: list[int] = []
        self._range = 0.0, inf
        self._unusual = 0  # 1: the last step was unusually long, -1: short
        self._attentive = 0  # until this step

    def ended(self, step: int, duration_ns: int) -> None:
        """Takes how long a step was, of whatever kind."""
        shortest, longest = self._range
        unusual = (duration_ns > (1 + CHANGED) * longest) - (duration_ns < (1 - CHANGED) * shortest)
        if unusual and unusual == self._unusual:
            self._attentive = step + 1 + ATTENTIVE
        self._unusual = unusual
        self._durations.append(duration_ns)
        if len(self._durations) == JUDGED:
            self._range = min(self._durations), max(self._durations)
            self._durations.clear()

    def is_shadow(self, step: int) -> bool:
        """Whether this step, if it is watched, is a shadow."""
        period = min(self.full.value, DETAILED) if step < self._attentive else self.full.value
        return step >= FIRST_FULL and not chosen(step, period)

    def is_unwatched(self, step: int) -> bool:
        """Whether this step is not watched. Where few are not, full ones lie elsewhere: both neighbours are shadows."""
        if step < UNWATCHED:
            return False
        return chosen(step ^ 2, UNWATCHED) or (step >= self._attentive and not chosen(step, self.watched.value))


def pace_of(environment: Mapping[str, str] = os.environ) -> Pace | None:
    """The pace of this process, None where every step is to be recorded in full.

    ``DDPWATCH_STEPS`` asks for that with ``full``; with ``watched``, for every step to be watched (but the one in 32).
    """
    wanted = environment.get("DDPWATCH_STEPS", "")
    if wanted == "full":
        return None
    pace = Pace()
    if wanted == "watched":
        pace.watched = Period(BUDGET, unseen=0, longest=1)
    elif wanted:
        _log.warning("DDPWATCH_STEPS is %r, which asks for nothing; hint: full or watched", wanted[:50])
    return pace


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
