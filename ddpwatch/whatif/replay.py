"""Replays the recorded steps one after the other under a plan, and says how long they take.

A rank starts a step where it ended the one before, so that a rank that is late in its optimizer is late in the next
backward. The steps form a ring: the last one comes before the first, and only sets the ranks off.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from statistics import fmean
from typing import NamedTuple

from ddpwatch.whatif.assignment import Buckets
from ddpwatch.whatif.model import Physics, StepWork, Work, wait_end
from ddpwatch.whatif.scenarios import Plan
from ddpwatch.whatif.schedule import Played, Speeds, play

Ready = list[list[list[float]]]  # per step, rank and bucket, on the rank's own clock


class Outcome(NamedTuple):
    """What comes of a plan. ns.

    Attributes:
        steps: Per step, the mean of its ranks.
        exposed: Per bucket, what it adds to a rank's exposed communication; the mean of the ranks.
    """

    steps: list[float]
    exposed: list[float]

    @property
    def mean(self) -> float:
        """The mean step."""
        return fmean(self.steps)


def ready_times(steps: Sequence[StepWork], buckets: Buckets) -> Ready:
    """Returns when each rank could launch these buckets, on the clock of compute with nothing beside it."""
    in_order = [unit for bucket in buckets for unit in bucket] == list(range(sum(map(len, buckets))))
    last = [bucket[-1] for bucket in buckets]
    found: Ready = []
    for step in steps:
        rows = []
        for work, busy in zip(step.ranks, step.busy, strict=True):
            if in_order:  # a bucket also waits for the buckets before it
                moments = [work.latest[unit] for unit in last]
            else:
                moments = [max([work.at[unit] for unit in bucket]) for bucket in buckets]
            rows.append([min(work.compute, at) for at in busy.worked(moments)])
        found.append(rows)
    return found


class Replay:
    """Plays all steps under plans. Ready times are kept for plans with equal buckets, and outcomes for equal plans.

    Args:
        steps: The steps, taken apart under these physics.
        physics: How things behave.
    """

    def __init__(self, steps: Sequence[StepWork], physics: Physics) -> None:
        self._steps = steps
        self._speeds = Speeds(
            physics.workers, physics.sharing.value, physics.compute_slowdown.value, physics.comm_slowdown.value
        )
        self._ready: dict[tuple[tuple[int, ...], ...], Ready] = {}
        self._outcomes: dict[str, Outcome] = {}

    def run(self, plan: Plan) -> Outcome:
        """Returns the outcome of one plan; plans that differ in name only are played once."""
        numbers = (plan.buckets, plan.works, plan.encode, plan.work_of, plan.copy, plan.sharing)
        key = str((numbers, plan.change.no_input, plan.change.accumulate))
        found = self._outcomes.get(key)
        if found is None:
            found = self._outcomes[key] = self._run(plan)
        return found

    def _run(self, plan: Plan) -> Outcome:
        key = tuple(map(tuple, plan.buckets))
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = ready_times(self._steps, plan.buckets)
        count, course = len(self._steps), _Course(plan, self._speeds._replace(sharing=plan.sharing))
        as_recorded = plan.work_of == [(rank, 0) for rank in range(len(self._steps[0].ranks))]
        work_of = [] if as_recorded else plan.work_of
        course.step(*self._step(count - 1, work_of, ready))
        course.start_counting()
        for number in range(count):
            for earlier in range(1, plan.change.accumulate):
                course.skip(self._step(number - earlier, work_of, ready)[0])
            course.step(*self._step(number, work_of, ready))
        return course.outcome()

    def _step(
        self, number: int, work_of: Sequence[tuple[int, int]], ready: Ready
    ) -> tuple[Sequence[Work], Sequence[Sequence[float]], Sequence[float]]:
        """Returns each rank's work in a step, when it could launch each bucket, and how slow the wire was.

        ``work_of`` is the plan's; empty if each rank does its own work.
        """
        count = len(self._steps)
        number %= count
        step = self._steps[number]
        if not work_of:
            return step.ranks, ready[number], step.residuals
        at = [((number + later) % count, rank) for rank, later in work_of]
        works = [self._steps[of].ranks[rank] for of, rank in at]
        return works, [ready[of][rank] for of, rank in at], step.residuals


class _Course:
    """The ranks' clocks on their way through the steps."""

    def __init__(self, plan: Plan, speeds: Speeds) -> None:
        self._plan = plan
        self._speeds = speeds
        self._encode = list(accumulate(plan.encode))
        self._after = list(accumulate(reversed(plan.sizes)))[::-1]
        self._clocks = [0.0] * len(plan.work_of)
        self._before = 0.0
        self._steps: list[float] = []
        self._exposed = [0.0] * len(plan.sizes)

    def start_counting(self) -> None:
        """Forgets what was played so far, but not where the ranks are."""
        self._before = fmean(self._clocks)
        self._steps.clear()
        self._exposed = [0.0] * len(self._exposed)

    def skip(self, works: Sequence[Work]) -> None:
        """Plays a batch whose gradients are only added up: no bucket, no optimizer."""
        for rank, (work, start) in enumerate(zip(works, self._starts(works), strict=True)):
            self._clocks[rank] = start + work.compute + max(0.0, work.tail - work.optimizer)

    def step(self, works: Sequence[Work], ready: Sequence[Sequence[float]], residuals: Sequence[float]) -> None:
        """Plays a step with all its buckets."""
        starts = self._starts(works)
        absolute = [[start + at for at in row] for start, row in zip(starts, ready, strict=True)]
        launches = list(accumulate(map(max, zip(*absolute, strict=True)), max))
        extra = self._encode[-1] if self._encode else 0.0
        if extra:
            launches = list(map(add, launches, self._encode))
        ends = [start + work.compute + extra for start, work in zip(starts, works, strict=True)]
        played = play(launches, self._works(residuals), max(ends), self._speeds)
        self._finish(played, ends, [work.tail for work in works])

    def _starts(self, works: Sequence[Work]) -> list[float]:
        """Returns when each rank's backward starts."""
        if self._plan.change.no_input:
            return [clock + work.before - (work.data or 0.0) for clock, work in zip(self._clocks, works, strict=True)]
        return [clock + work.before for clock, work in zip(self._clocks, works, strict=True)]

    def _works(self, residuals: Sequence[float]) -> list[float]:
        """Returns what each bucket takes alone in a step whose wire is so slow."""
        return [
            work * (residuals[shares[0][0]] if len(shares) == 1 else sum([residuals[i] * share for i, share in shares]))
            for work, shares in zip(self._plan.works, self._plan.shares, strict=True)
        ]

    def _finish(self, played: Played, ends: Sequence[float], tails: Sequence[float]) -> None:
        copy, after = self._plan.copy, self._after
        computed = list(map(played.wall, ends))
        waited = wait_end(played.dones, after, copy)
        copied = copy * after[0]
        self._clocks = [max(end + copied, waited) + tail for end, tail in zip(computed, tails, strict=True)]
        now = fmean(self._clocks)
        self._steps.append(now - self._before)
        self._before = now
        self._expose(played.dones, computed)

    def _expose(self, dones: Sequence[float], computed: Sequence[float]) -> None:
        """Adds up per bucket by how much the mean rank waits longer because of it."""
        reach, waited = min(computed), 0.0
        for number, done in enumerate(dones):
            if done > reach:
                before, reach = waited, done
                waited = sum([done - end for end in computed if end < done]) / len(computed)
                self._exposed[number] += waited - before

    def outcome(self) -> Outcome:
        count, batches = len(self._steps), self._plan.change.accumulate
        return Outcome([step / batches for step in self._steps], [exposed / count for exposed in self._exposed])
