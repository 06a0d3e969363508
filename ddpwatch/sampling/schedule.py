"""Chooses how much of each step is recorded, so that the cost of watching stays within a budget.

To see a bucket's collective, Python has to run in the middle of a backward that otherwise runs none. The code itself
takes a few microseconds; its cold caches, and those it leaves to the backward, cost several times that. So only some
steps are *full*. A *light* step leaves the collectives alone: it has its phases, and what DDP records by itself (when
each gradient arrived, hence when each bucket was launched). Of a *bare* step only start and end are known. Steps
of all levels are neighbours, so comparing them shows the cost at any time (`ddpwatch.sampling.cost`).

A light step costs 0.1 to 0.3 ms: nothing in a step of half a second, but 0.2 % of one of 100 ms. So where steps are
short, fewer are watched: every second one from 25 ms on, and of shorter ones as few as 10 per second, which is enough
to look at and to judge by.

The job's detail, and while somebody looks a lease, raise the budget (`ddpwatch.sampling.lease`), and as many steps are
full as it allows.

All ranks must choose the same steps without communicating. So a choice depends on nothing but the step's number, a
period and the lease, and a step that a longer period samples is sampled by every shorter one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from math import inf

from ddpwatch.common.statistics import median
from ddpwatch.common.units import FOREVER_NS
from ddpwatch.errors import UsageError
from ddpwatch.sampling.lease import FULL_PPM, detail_of_job
from ddpwatch.sampling.levels import BARE, FULL

WATCHED_BUDGET = 0.002  # of a step: for watching at all
FULL_BUDGET = 0.00075  # of a step: for full steps on top; together below the 0.3 % that ddpwatch promises
LONGEST_WATCHED_PERIOD = 2  # of steps from `SHORT_NS` on
LONGEST_FULL_PERIOD = 64
SHORT_NS = 50_000_000  # of steps that are n times as short, periods may be n times as long
MOST_TIMES = 32
FULL_PERIOD_TIMES = 16  # of full steps: so much longer than n
FIRST_FULL_STEPS = 12  # from the start, while DDP settles its buckets; of loops without light steps, to judge by
DEAR_TIMES = 4  # as long may the watched steps' period be where each costs about as much as a full one
MOST_COST = 0.01  # of a step, for these of a loop's: for no more, their period may be as long as that of full steps
COST_PER_OWN = 2  # of watched and bare steps: what the hooks measure of themselves is half of what they cost
FULL_COST_PER_OWN = 6
LEAST_BUDGET = 1e-6
SENDER_NS = 2_000_000_000  # of steps, of which the sender thread's share is taken: it wakes twice a second
BARE_PERIOD = 32  # at least one step of each is bare
STEPS_PER_DECISION = 8
DEAR_OWN = 0.1  # of a loop's step: if the hooks measure more of themselves, it is learned from that one step
DEAR_OWN_NS = 2_000_000  # and if that is more: it cannot be noise
CPU_PERIOD = 16  # of watched steps, from which on CPU time is taken only around them

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
        self._wanted = 1  # by the budget alone
        self._own_ns: list[int] = []
        self._step_ns: list[int] = []
        self._chosen = (0, 0, 0)  # a period, its number, and the step of it that is sampled

    def learn(self, own_ns: int, step_ns: int, at_once: bool = False) -> bool:
        """Takes what the hooks measured of themselves in such a step, and the step's duration.

        Args:
            own_ns: The former.
            step_ns: The latter.
            at_once: Whether this step is enough to learn the cost, if it is not known yet.

        Returns:
            Whether that was enough to learn the cost again.
        """
        self._own_ns.append(own_ns)
        self._step_ns.append(step_ns)
        if len(self._own_ns) < STEPS_PER_DECISION and not (at_once and not self.cost):
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
        if at_once or wanted > self._wanted or 4 * wanted < self._wanted:
            self._wanted = 1 << max(0, int(wanted - 1e-9)).bit_length()
            self.value = min(self._longest, self._wanted)

    def limit(self, longest: int) -> None:
        """Ends the period there from now on."""
        self._longest = longest
        self.value = min(longest, self._wanted)

    def chosen(self, step: int) -> int:
        """Returns the step that is sampled in the period which this step lies in.

        A later step of the same one costs little.
        """
        period, number, chosen = self._chosen
        if period != self.value or number != step // period:
            period = self.value
            number = step // period
            chosen = sampled_step(number, period)
            self._chosen = period, number, chosen
        return chosen


class SamplingSchedule:
    """Chooses the level of each step.

    Args:
        light: Whether there are light steps. Without them, every watched step is full, and fewer are watched.
        own_ppm: The job's own budget, without a lease.
        dear: Whether a watched step costs about as much as a full one: then, too, fewer are watched.
        sender_clock: CPU time of ddpwatch's own thread, ns: it holds the GIL, so it counts like the hooks.
        settles: Whether the first steps are full at any cost, while DDP settles its buckets.

    Attributes:
        full: The period of the full steps.
        watched: The period of the watched steps, the full ones among them. Both periods are limited, so that there are
            always enough of either: 10 watched steps per second, or every second step. The cost may then exceed the
            budget.
    """

    def __init__(
        self,
        light: bool = True,
        own_ppm: int = 0,
        dear: bool = False,
        sender_clock: Callable[[], int] = lambda: 0,
        settles: bool = True,
    ) -> None:
        self._settles = settles
        self._dear = dear
        self._light = self._may_be_light = light
        self.full = SamplingPeriod(FULL_BUDGET, cost_per_own=FULL_COST_PER_OWN, longest=LONGEST_FULL_PERIOD)
        self.watched = SamplingPeriod(WATCHED_BUDGET, cost_per_own=COST_PER_OWN, longest=LONGEST_WATCHED_PERIOD)
        self.watched.limit(self._longest)
        self._own_ppm = own_ppm
        self._step_ns = SHORT_NS  # a moving average
        self._limits_hold = (SHORT_NS // 2, FOREVER_NS)  # the average: longer than, and up to
        self._lease_ppm = 0
        self._bare = 0.0  # what the hooks cost in a bare step, as a share of it: a moving average
        self._sender = 0.0  # what the sender thread costs, as a share of all steps
        self._sender_clock = sender_clock
        self._sender_ns = 0
        self._since_ns = 0  # the duration of all steps since that was looked at

    def follow(self, lease_ppm: int) -> None:
        """Keeps watching within the budget of a lease (0: without one) from the step that starts now."""
        lease_ppm = max(lease_ppm, self._own_ppm)
        if lease_ppm != self._lease_ppm:
            self._lease_ppm = lease_ppm
            self._allow(at_once=True)

    def learn(self, level: str, own_ns: int, step_ns: int) -> None:
        """Takes a step of that level: its duration, and what the hooks measured of themselves in it."""
        self._step_ns += (step_ns - self._step_ns) >> 3
        self._since_ns += step_ns
        shorter, longest = self._limits_hold
        if not shorter < self._step_ns <= longest:
            self._limit()
        if level == BARE:
            self._bare += (COST_PER_OWN * own_ns / max(1, step_ns) - self._bare) / 64
            return
        full = level == FULL and self._light
        dear = level == FULL and not self._settles and own_ns > max(DEAR_OWN_NS, DEAR_OWN * step_ns)
        if (self.full if full else self.watched).learn(own_ns, step_ns, dear):
            if not self._light:
                self._limit()
            self._allow()

    def use_light(self, on: bool) -> None:
        """Has light steps from now on, or records every watched step in full, and watches fewer.

        Without light steps from the start, there never are any.
        """
        if self._may_be_light and on is not self._light:
            self._light = on
            self._limit()

    @property
    def _longest(self) -> int:
        """The longest period of the watched steps."""
        if self._light and not self._dear:
            return LONGEST_WATCHED_PERIOD
        longest = DEAR_TIMES * LONGEST_WATCHED_PERIOD
        while longest < LONGEST_FULL_PERIOD and self.watched.cost > MOST_COST * longest and not self._settles:
            longest *= 2
        return longest

    def _limit(self) -> None:
        """Ends the periods where steps of that duration leave enough watched ones: soon after steps become longer."""
        times = 1 << max(0, min(MOST_TIMES, SHORT_NS // max(1, self._step_ns)).bit_length() - 1)
        self._limits_hold = (
            0 if times == MOST_TIMES else SHORT_NS // (2 * times),
            FOREVER_NS if times == 1 else SHORT_NS // times,
        )
        self.watched.limit(self._longest * times)
        self.full.limit(max(LONGEST_FULL_PERIOD, FULL_PERIOD_TIMES * times))

    def _allow(self, at_once: bool = False) -> None:
        """Gives half of a lease to watching at all, and the rest to full steps. A lease never asks for less.

        What bare steps and the sender cost is taken from both. A lease of 100 % asks for all that there is, so
        that a noisy estimate of the cost takes no full step away.
        """
        budget = inf if self._lease_ppm == FULL_PPM else self._lease_ppm / FULL_PPM
        left = 1 - min(1.0, self._floor() / max(WATCHED_BUDGET + FULL_BUDGET, budget))
        watched = left * max(WATCHED_BUDGET, budget / 2)
        self.watched.allow(max(LEAST_BUDGET, watched), at_once)
        full = left * max(FULL_BUDGET, budget - self.watched.cost / self.watched.value)
        self.full.allow(max(LEAST_BUDGET, full), at_once)

    def _floor(self) -> float:
        """Returns what watching costs also where no step is watched, as a share of the step."""
        if self._since_ns >= SENDER_NS:
            before, self._sender_ns = self._sender_ns, self._sender_clock()
            self._sender = (self._sender_ns - before) / self._since_ns
            self._since_ns = 0
        return self._bare + self._sender

    def is_light(self, step: int) -> bool:
        """Returns whether this step, if it is watched (see `is_bare`), is a light step."""
        may_be = self._light and (step >= FIRST_FULL_STEPS or not self._settles)
        return may_be and step != self.full.chosen(step)

    def is_bare(self, step: int) -> bool:
        """Returns whether this step is bare.

        If most are watched, both of its neighbours are usually light steps.
        """
        if step < (BARE_PERIOD if self._light or self._settles else FIRST_FULL_STEPS):
            return False
        if self.watched.value > 1:
            return step != self.watched.chosen(step)
        return is_sampled(step ^ 2, BARE_PERIOD)  # ^ 2: away from the full steps

    def bare_until(self, step: int) -> int:
        """Returns the next step, after this bare one, at whose start there is something to do.

        Most cost nothing so.
        """
        watched = self.watched
        if watched.value < CPU_PERIOD:
            return step + 1
        chosen = watched.chosen(step)
        if step < chosen:
            return max(step, chosen - 2) + 1
        return step + 1 if step <= chosen + 1 else step - step % watched.value + watched.value

    def needs_cpu_time(self, step: int) -> bool:
        """Returns whether this step's CPU time is needed, to compare a watched step with its neighbours."""
        return self.watched.value < CPU_PERIOD or -2 <= self.watched.chosen(step) - step <= 1


def schedule_of(
    environment: Mapping[str, str] = os.environ,
    light: bool = True,
    dear: bool = False,
    sender_clock: Callable[[], int] = lambda: 0,
    settles: bool = True,
) -> SamplingSchedule | None:
    """Returns the schedule of this process, with or without light steps; None if every step shall be full.

    See `SamplingSchedule` for the rest. ``DDPWATCH_DETAIL`` chooses (see `detail_of_job`); ``full`` is for truth: not
    even one step in 32 is bare.
    """
    if environment.get("DDPWATCH_DETAIL") == "full":
        return None
    try:
        own_ppm = detail_of_job(environment, records=bool(environment.get("DDPWATCH_RECORD_DIR")))
    except UsageError as error:
        _log.warning("DDPWATCH_DETAIL: %s; hint: %s", error.message, error.hint)
        own_ppm = 0
    return SamplingSchedule(light, own_ppm, dear, sender_clock, settles)


def is_sampled(step: int, period: int) -> bool:
    """Returns whether this is the one step of its ``period`` (a power of two) that is sampled."""
    for level in reversed(range(period.bit_length() - 1)):
        if step >> level & 1 != _random_bit(step >> level + 1, level):
            return False  # mostly after one bit or two; see `sampled_step`
    return True


def sampled_step(number: int, period: int) -> int:
    """Returns the step of a period (a power of two) that is sampled, by the period's number; not always the same.

    Stratified random sampling: each period is halved again and again, and a pseudo-random bit of that stretch of steps
    picks the half. So the samples have no rhythm that could coincide with one of the job's.
    """
    for level in reversed(range(period.bit_length() - 1)):
        number = 2 * number + _random_bit(number, level)
    return number


def _random_bit(number: int, salt: int) -> int:
    mixed = (number * 0x9E3779B1 + salt * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (mixed >> 16) & 1
