"""A late rank's incident while it grows: its late steps, why, and what the others waited for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.accounts import StepSplit
from ddpwatch.analysis.diagnosis.cause import Cause, StepFacts
from ddpwatch.analysis.diagnosis.incident import Kind
from ddpwatch.analysis.diagnosis.lateness import KEEP_VALUES, Streak

TREND_STEPS = 48  # watched, before a trend is judged
TREND_GROWTH = 0.5  # how much of the lateness at the end has to have come over time
TREND_FIT = 0.5  # share of the variance that a straight line explains


class LateRank:
    """One rank's streak of late steps.

    Attributes:
        streak: Its late steps.
        cause: Why.
        peers: The ranks of its group.
        start_ns, end_ns: From its first late step to its newest one.
        span_ns: Rank-time from the first late step to the last.
    """

    def __init__(self, streak: Streak, peers: Sequence[int]) -> None:
        self.streak = streak
        self.peers = tuple(peers)
        self.cause = Cause(streak.rank, self.peers)
        self.span_ns = 0
        self.start_ns = self.end_ns = 0
        self._older_ns = 0.0  # waits for it in steps that are no longer kept
        self._kept: deque[_Waits] = deque()  # in the newest
        self._pending: list[tuple[int, _Waits]] = []  # with the step's rank-time: since its newest late one

    def catch_up(self, splits: Iterable[StepSplit], recent: Iterable[StepFacts]) -> None:
        """Takes the steps since its first late one."""
        for split in splits:
            if split.step >= self.streak.since:
                self.add_split(split)
        for facts in recent:
            self.add_facts(facts)

    def add_facts(self, facts: StepFacts) -> None:
        """Takes a watched step, to find out why it was late, if it was."""
        late = self.streak.late_in(facts.across.step)
        if late is not None and self.streak.rank in facts.across.members:
            self.cause.add(facts, late)

    def add_split(self, split: StepSplit) -> None:
        """Takes the waits of any step."""
        waited, others = split.waits.get(self.streak.rank, 0), max(1, len(self.peers) - 1)
        late = self.streak.late_in(split.step if split.like is None else split.like) is not None
        lead = split.leads.get(self.streak.rank, waited // others)
        self.start_ns = self.start_ns or split.start_ns
        self._pending.append((split.total, _Waits(split.step, waited, lead * others, late)))
        if split.step <= self.streak.until:
            self.end_ns = split.end_ns
            self._flush()

    def _flush(self) -> None:
        for total, waits in self._pending:
            self.span_ns += total
            self._kept.append(waits)
        self._pending.clear()
        while len(self._kept) > KEEP_VALUES:
            self._older_ns += self._due_to_it([self._kept.popleft()])

    @property
    def cost_ns(self) -> int:
        """What all others waited because of it: less than they waited for it, which chance does, too."""
        return int(self._older_ns + self._due_to_it(self._kept))

    def _due_to_it(self, steps: Collection[_Waits]) -> float:
        """Without it, the next rank would have been the last one, or it would: earlier by as much as it is late."""
        streak, others = self.streak, max(1, len(self.peers) - 1)
        if streak.constant:
            late_at = self._late_at()
            return sum(min(waits.ns, waits.most_ns, max(0.0, others * late_at(waits.step))) for waits in steps)
        limit, period = others * streak.late_ns, streak.period
        struck = [waits for waits in steps if waits.late]
        if period is not None:
            residues = Counter(waits.step % period for waits in self._kept if waits.late)
            residue = residues.most_common(1)[0][0] if residues else 0
            fitting = (waits for waits in steps if waits.step % period == residue)
            return sum(min(waits.ns, waits.most_ns, limit) for waits in fitting)
        return (1 - streak.by_chance) * sum(min(waits.ns, waits.most_ns, limit) for waits in struck)

    def _late_at(self) -> Callable[[int], float]:
        """How late it was in a step: on a straight line if it has become later and later."""
        late_ns = self.streak.late_ns
        points = self._points()
        if not self._grows():
            return lambda step: late_ns
        slope, _, end = _line(points)
        last = points[-1][0]
        return lambda step: end - slope * (last - step)

    @property
    def gain(self) -> float | None:
        """By how much a step would be shorter without it, as a share."""
        others = len(self.peers) - 1
        ranks = max(len(self.peers), 1)
        return self.cost_ns / others / (self.span_ns / ranks) if others and self.span_ns else None

    def kind(self, phase: str) -> Kind:
        """What kind of incident it is, if that phase is why."""
        if not self.streak.constant:
            return "intermittent"
        if self._grows():
            return "drift"
        return "slow_input" if phase == "data" else "straggler"

    def _grows(self) -> bool:
        """Whether it has become later and later, in a straight line."""
        points = self._points()
        if len(points) < TREND_STEPS:
            return False
        slope, fit, end = _line(points)
        grown = slope * (points[-1][0] - points[0][0])
        return grown >= TREND_GROWTH * end > 0 and fit >= TREND_FIT

    def _points(self) -> list[tuple[int, int]]:
        return [(step, value) for step, value, _ in self.streak.values if step <= self.streak.until]


class _Waits(NamedTuple):
    """What others waited for it in a step, and at most because of it: until the next rank launched (ns)."""

    step: int
    ns: int
    most_ns: int
    late: bool


def _line(points: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """The straight line through points: its slope, the share of variance it explains, and its value at the last."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    yy = sum((y - mean_y) ** 2 for _, y in points)
    slope = xy / xx if xx else 0.0
    return slope, slope * xy / yy if yy else 0.0, mean_y + slope * (points[-1][0] - mean_x)
