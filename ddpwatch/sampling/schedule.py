"""Chooses how much of each step is recorded, so that the cost of watching stays within a budget.

To see a bucket's collective, Python has to run in the middle of a backward that otherwise runs none. The code itself
takes a few microseconds; its cold caches, and those it leaves to the backward, cost several times that. So only some
steps are *full*. A *shadow* step leaves the collectives alone: it has its phases, and what DDP records by itself (when
each gradient arrived, hence when each bucket was launched). Of an *unwatched* step only start and end are known. Steps
of all levels are neighbours, so comparing them shows the cost at any time (`ddpwatch.sampling.cost`).

A shadow step costs 0.2 ms: nothing in a step of half a second, but 0.2 % of one of 100 ms. So where steps are short,
only every second one is watched and one in 64 is full. ``DDPWATCH_STEPS`` asks for fewer or more.

While somebody looks, a lease (`ddpwatch.sampling.lease`) raises the budget, and as many steps are full as it allows.

All ranks must choose the same steps without communicating. So a choice depends on nothing but the step's number, a
period and the lease, and a step that a longer period samples is sampled by every shorter one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from statistics import median

from ddpwatch.sampling.lease import FULL_PPM
from ddpwatch.sampling.levels import FULL

WATCHED_BUDGET = 0.002  # of a step: for watching at all
FULL_BUDGET = 0.00075  # of a step: for full steps on top; together below the 0.3 % that ddpwatch promises
LONGEST_WATCHED_PERIOD = {"": 2, "all": 1, "few": 4}  # by the value of DDPWATCH_STEPS
LONGEST_FULL_PERIOD = 64
FIRST_FULL_STEPS = 12  # from the start, while DDP settles its buckets
UNWATCHED_PERIOD = 32  # at least one step of each is unwatched
STEPS_PER_DECISION = 8

_log = logging.getLogger("ddpwatch")


class SamplingPeriod:
    """A sampling period, one step in a power of two: it keeps the steps' cost, spread over all steps, within a budget.

    Args:
        budget: As a share of the step.
        cost_per_own: What such a step costs for each nanosecond that the hooks measure of themselves
            (`benchmarks/overhead.py` prints both).
        longest: The longest period, whatever the cost.

    Attributes:
        value: The period.
        cost: Of one such step, as far as it is known, as a share of the step.
    """

    def __init__(self, budget: float, cost_per_own: float, longest: int) -> None:
        self.value = 1
        self.cost = 0.0
        self._budget = budget
        self._cost_per_own = cost_per_own
        self._longest = longest
        self._own_ns: list[int] = []
        self._step_ns: list[int] = []

    def learn(self, own_ns: int, step_ns: int) -> bool:
        """Takes what the hooks measured of themselves in such a step, and the step's duration.

        Returns:
            Whether that was enough to learn the cost again.
        """
        self._own_ns.append(own_ns)
        self._step_ns.append(step_ns)
        if len(self._own_ns) < STEPS_PER_DECISION:
            return False
        self.cost = self._cost_per_own * median(self._own_ns) / max(1.0, median(self._step_ns))
        self._own_ns.clear()
        self._step_ns.clear()
        self.allow(self._budget)
        return True

    def allow(self, budget: float, at_once: bool = False) -> None:
        """Keeps the known cost within this budget from now on; small changes count only ``at_once``."""
        self._budget = budget
        wanted = self.cost / budget
        if at_once or wanted > self.value or 4 * wanted < self.value:
            self.value = min(self._longest, 1 << max(0, int(wanted - 1e-9)).bit_length())


class SamplingSchedule:
    """Chooses the level of each step.

    Args:
        longest: The longest period of the watched steps.
        shadows: Whether there are shadow steps. Without them, every watched step is full.

    Attributes:
        full: The period of the full steps.
        watched: The period of the watched steps, the full ones among them. Both periods are limited, so that the newest
            steps always include enough of either. Where steps are shorter than 80 ms, watching may exceed its budget.
    """

    def __init__(self, longest: int = LONGEST_WATCHED_PERIOD[""], shadows: bool = True) -> None:
        self.full = SamplingPeriod(FULL_BUDGET, cost_per_own=6, longest=LONGEST_FULL_PERIOD)
        self.watched = SamplingPeriod(WATCHED_BUDGET, cost_per_own=2, longest=longest)
        self._lease_ppm = 0
        self._shadows = shadows

    def follow(self, lease_ppm: int) -> None:
        """Keeps watching within the budget of a lease (0: without one) from the step that starts now."""
        if lease_ppm != self._lease_ppm:
            self._lease_ppm = lease_ppm
            self._allow(at_once=True)

    def learn(self, level: str, own_ns: int, step_ns: int) -> None:
        """Learns the cost of a step of that level; see `SamplingPeriod.learn`."""
        full = level == FULL and self._shadows
        if (self.full if full else self.watched).learn(own_ns, step_ns) and self._lease_ppm:
            self._allow()

    def _allow(self, at_once: bool = False) -> None:
        """Half of a lease is for watching at all; full steps take what that leaves. A lease never asks for less."""
        budget = self._lease_ppm / FULL_PPM
        self.watched.allow(max(WATCHED_BUDGET, budget / 2), at_once)
        self.full.allow(max(FULL_BUDGET, budget - self.watched.cost / self.watched.value), at_once)

    def is_shadow(self, step: int) -> bool:
        """Whether this step, if it is watched (see `is_unwatched`), is a shadow step."""
        return self._shadows and step >= FIRST_FULL_STEPS and not is_sampled(step, self.full.value)

    def is_unwatched(self, step: int) -> bool:
        """Whether this step is unwatched. If most are watched, both of its neighbours are usually shadow steps."""
        if step < UNWATCHED_PERIOD:
            return False
        if self.watched.value > 1:
            return not is_sampled(step, self.watched.value)
        return is_sampled(step ^ 2, UNWATCHED_PERIOD)  # ^ 2: away from the full steps


def schedule_of(environment: Mapping[str, str] = os.environ, shadows: bool = True) -> SamplingSchedule | None:
    """The schedule of this process, with or without shadow steps; None if every step shall be full.

    ``DDPWATCH_STEPS`` chooses: ``full`` records every step in full, ``all`` watches all steps but one in 32, and
    ``few`` watches every fourth step rather than every second one where steps are short.
    """
    wanted = environment.get("DDPWATCH_STEPS", "")
    if wanted == "full":
        return None
    if wanted not in LONGEST_WATCHED_PERIOD:
        _log.warning("DDPWATCH_STEPS is %r, which is not a choice; hint: few, all or full", wanted[:50])
        wanted = ""
    longest = LONGEST_WATCHED_PERIOD[wanted]
    return SamplingSchedule(longest if shadows else 4 * longest, shadows)


def is_sampled(step: int, period: int) -> bool:
    """Whether this is the one step of its ``period`` (a power of two) that is sampled; not the same one each time.

    Stratified random sampling: each period is halved again and again, and a pseudo-random bit of that stretch of steps
    picks the half. So the samples have no rhythm that could coincide with one of the job's.
    """
    for level in range(period.bit_length() - 1):
        half, step = step & 1, step >> 1
        if half != _random_bit(step, level):
            return False
    return True


def _random_bit(number: int, salt: int) -> int:
    mixed = (number * 0x9E3779B1 + salt * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (mixed >> 16) & 1
