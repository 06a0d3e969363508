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

from ddpwatch.analysis.whatif.assignment import Buckets
from ddpwatch.analysis.whatif.model import Physics, StepWork, Work, wait_end
from ddpwatch.analysis.whatif.scenarios import Plan
from ddpwatch.analysis.whatif.schedule import Played, Speeds, play

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
    """When each rank could launch these buckets, on the clock of compute with nothing beside it."""
    ranges = [(bucket[0], bucket[-1] + 1) for bucket in buckets]
    whole = all(end - start == len(bucket) for (start, end), bucket in zip(ranges, buckets, strict=True))
    found: Ready = []
    for step in steps:
        rows = []
        for work, busy in zip(step.ranks, step.busy, strict=True):
            at = work.at
            if whole:
                last = [max(at[start:end]) for start, end in ranges]
            else:
                last = [max([at[unit] for unit in bucket]) for bucket in buckets]
            rows.append([min(work.compute, busy.worked(moment)) for moment in last])
        found.append(rows)
    return found


class Replay:
    """Plays all steps under plans. Ready times are kept for plans with equal buckets.

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

    def run(self, plan: Plan) -> Outcome:
        """The outcome of one plan."""
        key = tuple(map(tuple, plan.buckets))
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = ready_times(self._steps, plan.buckets)
        count, course = len(self._steps), _Course(plan, self._speeds)
        course.step(*self._rows(count - 1, plan, ready))
        course.start_counting()
        for number in range(count):
            for earlier in range(1, plan.change.accumulate):
                course.skip([work for work, _ in self._rows(number - earlier, plan, ready)[0]])
            course.step(*self._rows(number, plan, ready))
        return course.outcome()

    def _rows(self, number: int, plan: Plan, ready: Ready) -> tuple[list[tuple[Work, list[float]]], list[float]]:
        count = len(self._steps)
        at = [((number + shift) % count, rank) for rank, shift in plan.rows]
        rows = [(self._steps[step].ranks[rank], ready[step][rank]) for step, rank in at]
        return rows, self._steps[number % count].residuals


class _Course:
    """The ranks' clocks on their way through the steps."""

    def __init__(self, plan: Plan, speeds: Speeds) -> None:
        self._plan = plan
        self._speeds = speeds
        self._encode = list(accumulate(plan.encode))
        self._after = list(accumulate(reversed(plan.sizes)))[::-1]
        self._clocks = [0.0] * len(plan.rows)
        self._before = 0.0
        self._steps: list[float] = []
        self._exposed = [0.0] * len(plan.sizes)

    def start_counting(self) -> None:
        """Forgets what was played so far, but not where the ranks are."""
        self._before = fmean(self._clocks)
        self._steps.clear()
        self._exposed = [0.0] * len(self._exposed)

    def skip(self, works: Sequence[Work]) -> None:
        """A batch whose gradients are only added up: no bucket, no optimizer."""
        for rank, work in enumerate(works):
            self._clocks[rank] += self._lead_in(work) + work.compute + max(0.0, work.tail - work.optimizer)

    def step(self, rows: Sequence[tuple[Work, list[float]]], residuals: Sequence[float]) -> None:
        """A step with all its buckets."""
        plan = self._plan
        begins = [clock + self._lead_in(work) for clock, (work, _) in zip(self._clocks, rows, strict=True)]
        absolute = [[begin + at for at in ready] for begin, (_, ready) in zip(begins, rows, strict=True)]
        launches = list(accumulate(map(max, zip(*absolute, strict=True)), max))
        extra = self._encode[-1] if self._encode else 0.0
        if extra:
            launches = list(map(add, launches, self._encode))
        ends = [begin + work.compute + extra for begin, (work, _) in zip(begins, rows, strict=True)]
        works = [
            work * sum([residuals[number] * share for number, share in shares])
            for work, shares in zip(plan.works, plan.shares, strict=True)
        ]
        played = play(launches, works, max(ends), self._speeds)
        self._finish(played, ends, [work.tail for work, _ in rows])

    def _finish(self, played: Played, ends: Sequence[float], tails: Sequence[float]) -> None:
        copy, after = self._plan.copy, self._after
        computed = [played.wall(end) for end in ends]
        waited = wait_end(played.dones, after, copy)
        copied = copy * after[0]
        self._clocks = [max(end + copied, waited) + tail for end, tail in zip(computed, tails, strict=True)]
        now = fmean(self._clocks)
        self._steps.append(now - self._before)
        self._before = now
        reach = min(computed)
        for number, done in enumerate(played.dones):
            if done > reach:
                waits = [done - max(reach, end) for end in computed if end < done]
                self._exposed[number] += sum(waits) / len(computed)
                reach = done

    def _lead_in(self, work: Work) -> float:
        return work.before - (work.data or 0.0) if self._plan.change.no_input else work.before

    def outcome(self) -> Outcome:
        count, batches = len(self._steps), self._plan.change.accumulate
        return Outcome([step / batches for step in self._steps], [exposed / count for exposed in self._exposed])
