"""A late rank's incident while it grows: its late steps, why, and what the others waited for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from statistics import fmean, median
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.analysis.diagnosis.late.cause import LatenessCause, StepFacts
from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness
from ddpwatch.analysis.diagnosis.late.residuals import KEEP_STEPS
from ddpwatch.analysis.diagnosis.late.streak import MOST_PERIOD, NEWEST, Streak, line_through
from ddpwatch.analysis.diagnosis.thresholds import WORTH_SHARE

TREND = 0.5  # of the lateness at the end has to have come over time; and of its variance, a straight line explains that


class LateRank:
    """One rank's streak of late steps.

    Args:
        streak: These, by the figure that shows them.
        peers: The ranks of its group.
        launches: How much later they launch, if another figure shows it: a phase is a part of that.
        ranks: How many ranks may wait for it, and itself: its group's wait for it, others for these.

    Attributes:
        streak: Its late steps.
        cause: Why.
        peers: The ranks of its group.
        start_ns, end_ns: From its first late step to its newest one.
        span_ns: Rank-time from the first late step to the last.
    """

    def __init__(
        self, streak: Streak, peers: Sequence[int], launches: GroupLateness | None = None, ranks: int = 0
    ) -> None:
        self.streak = streak
        self.peers = tuple(peers)
        self._launches = launches
        self._ranks = max(2, len(self.peers), ranks)
        self._others = self._ranks - 1
        self.cause = LatenessCause(streak.rank, self.peers)
        self.span_ns = 0
        self.start_ns = self.end_ns = 0
        self._cost_ns: int | None = None  # once somebody asked, until the next step
        self._older_ns = 0.0  # waits for it in steps that are no longer kept
        self._before: deque[StepSplit] = deque(maxlen=MOST_PERIOD)  # the newest steps before its first late one
        self._kept: deque[_Waits] = deque()  # in the newest
        self._pending: list[_Waits] = []  # since its newest late step

    def catch_up(self, splits: Iterable[StepSplit], recent: Iterable[StepFacts]) -> None:
        """Takes the steps since its first late one."""
        for split in splits:
            if split.step >= self.streak.since:
                self.add_split(split)
            else:
                self._before.append(split)
        for facts in recent:
            self.add_facts(facts)

    def add_facts(self, facts: StepFacts) -> None:
        """Takes a watched step, to find out why it was late, if it was."""
        deviation, is_late = self.streak.deviation_in(facts.across.step)
        if is_late and deviation <= self.streak.outlier_ns and facts.across.members >= set(self.peers):
            self.cause.add_step(facts, int(deviation))

    def add_split(self, split: StepSplit) -> None:
        """Takes the waits of any step."""
        self.start_ns = self.start_ns or split.start_ns
        self._pending.append(self._waits(split))
        self._cost_ns = None
        if split.step <= self.streak.until:
            self.end_ns = split.end_ns
            self._flush()

    def _waits(self, split: StepSplit) -> _Waits:
        waited, others = split.waits.get(self.streak.rank, 0), self._others
        known = self.streak.deviation_in(split.step if split.like is None else split.like)
        lead = split.leads.get(self.streak.rank, waited // others)
        return _Waits(split.step, min(waited, lead * others), *known, split.total, split.like is None)

    def _flush(self) -> None:
        for waits in self._pending:
            self.span_ns += waits.total
            self._kept.append(waits)
        self._pending.clear()
        while len(self._kept) > KEEP_STEPS:
            waits = self._kept.popleft()
            if waits.ns or not waits.watched:
                self._older_ns += self._due_to_it([waits])

    def end(self) -> None:
        """Ends it: forgets what came after its last late step, if that turned out to be another incident."""
        self.streak.open = False
        while self._kept and self._kept[-1].step > self.streak.until:
            self.span_ns -= self._kept.pop().total
            self._cost_ns = None
            self._pending.clear()
        self.cause.end(self.streak.until)

    @property
    def cost_ns(self) -> int:
        """What all others waited because of it: less than they waited for it, which chance does, too."""
        if self._cost_ns is None:
            self._cost_ns = int(self._older_ns + self._due_to_it([*self._kept, *self._beyond()]))
        return self._cost_ns

    @property
    def late_ns(self) -> float:
        """The time (ns) by which it launches late in such a step, whatever figure shows that it does."""
        late_ns = self.streak.late_ns
        return late_ns if self._launches is None else max(late_ns, self._launches.median_in(self.streak))

    def _due_to_it(self, steps: Collection[_Waits]) -> float:
        """Returns by how much the next rank, or it, would have been last earlier without its lateness.

        A bare step costs as much as the mean watched one.
        """
        due = self._due(steps)
        costs = self._costs([waits for waits in due if waits.watched])
        if len(costs) == len(due):
            return sum(costs)
        seen = self._costs([waits for waits in self._due(self._kept) if waits.watched])
        return sum(costs) + (len(due) - len(costs)) * (fmean(seen) if seen else 0.0)

    def _due(self, steps: Collection[_Waits]) -> list[_Waits]:
        """Returns the steps that it makes late: all, those of its rhythm, or those that are late."""
        if self.streak.constant:
            return list(steps)
        if (period := self.streak.period) is not None:
            residue = self._residue(period)
            return [waits for waits in steps if waits.step % period == residue]
        return [waits for waits in steps if waits.is_late]

    def _costs(self, steps: Collection[_Waits]) -> list[float]:
        """Returns what the others waited for its lateness in each of these steps.

        It is late by what is usual and, as far as noise does not explain how that varies, by what each step shows.
        """
        usual, own = self.late_ns, self.streak.own
        each = usual / max(1.0, self.streak.late_ns)  # another figure may show it, of which this is a part
        found = []
        for waits in steps:
            shown = min(waits.deviation, self.streak.outlier_ns)
            found.append(min(waits.ns, self._others * max(0.0, usual + own * (each * shown - usual))))
        return found

    def _residue(self, period: int) -> int:
        """Returns which steps of a period are late."""
        residues = Counter(waits.step % period for waits in self._kept if waits.is_late and waits.watched)
        return residues.most_common(1)[0][0] if residues else 0

    def _beyond(self) -> list[_Waits]:
        """Returns the late steps of a rhythm before its first one that was watched, and after the last one.

        It started, and ended, at one of the bare ones up to the next that was on time. Of these, the longer steps
        are its: those that took rather as long as its watched ones than as those in between.
        """
        if self.streak.constant or (period := self.streak.period) is None:
            return []
        residue, watched = self._residue(period), [waits for waits in self._kept if waits.watched]
        struck = [waits.total for waits in watched if waits.step % period == residue]
        between = [waits.total for waits in watched if waits.step % period != residue]
        if not struck or not between:
            return []
        longer = (median(struck) + median(between)) / 2
        before = (self._waits(split) for split in reversed(self._before) if split.step % period == residue)
        after = (waits for waits in self._pending if waits.step % period == residue)
        bare = (takewhile(lambda waits: not waits.watched, due) for due in (before, after))
        return [waits for due in bare for waits in due if waits.total > longer]

    @property
    def gain(self) -> float | None:
        """By how much a step would be shorter without it, as a share."""
        return self.cost_ns / self._others / (self.span_ns / self._ranks) if self.span_ns else None

    @property
    def matters(self) -> bool:
        """Whether it has cost the time of a step, and costs enough of each."""
        waited = self.cost_ns / self._others
        return waited >= self.streak.step_ns and (self.gain or 0.0) >= WORTH_SHARE

    def kind(self, phase: str) -> Kind:
        """Returns what kind of incident it is, if that phase is why."""
        if not self.streak.constant:
            return "intermittent"
        if self._is_growing:
            return "drift"
        return "slow_input" if phase == "data" else "straggler"

    @property
    def _is_growing(self) -> bool:
        """True if it has become later and later, along a straight line."""
        until = self.streak.until
        values = [(seen.step, seen.deviation) for seen in self.streak.values if seen.step <= until]
        if len(values) < NEWEST:
            return False
        line = line_through(values, until)
        return line.slope * (until - values[0][0]) >= TREND * line.end > 0 and line.fit >= TREND


class _Waits(NamedTuple):
    """What others waited in a step because of it, at most: until the next rank launched (ns).

    ``deviation`` is by how much its rank was late, its usual one where that is not known; ``total`` the step's
    rank-time. A bare one was split like the watched step that took most nearly as long: it need not be one of the same
    rhythm.
    """

    step: int
    ns: int
    deviation: float
    is_late: bool
    total: int
    watched: bool
