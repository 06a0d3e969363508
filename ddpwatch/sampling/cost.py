"""What watching costs the job, from the differences between neighbouring steps of different levels.

Bare, light and full steps lie side by side in one run (`ddpwatch.sampling.schedule`). So a step of one level is
compared with its two neighbours of another: the difference in the CPU time of the rank's process is the cost of the
additional watching. CPU time, because a step's duration also includes what other ranks and the network did. That of the
sender thread is apart: it falls into any step, so it is no difference between neighbours, and counts as it is. So does
that of the collector, a process of its own, as if its node's ranks gave it their cores.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import hypot
from statistics import fmean, median

from ddpwatch.common.statistics import median_bounds
from ddpwatch.sampling.levels import BARE, FULL, LEVELS, LIGHT, is_watched
from ddpwatch.sampling.schedule import COST_PER_OWN
from ddpwatch.wire.messages import Status, Step

KEEP_PAIRS = 2048
ENOUGH_PAIRS = 8
ENOUGH_BARE = 8  # steps of a rank, for what hooks measure of themselves in these
NO_COST = "too few steps to compare"  # what is said then
FEW_PAIRS = 3  # for a rare level: even a wrong median is little of the whole
RARE_SHARE = 1 / 12  # of all steps
SHARE_STEPS = 512  # for the shares of the levels and the median step
STATUSES = 128  # of the collector: a minute
OWN_RANKS = 8  # of which some wait for no core, mostly


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching costs, as a share of the step.

    Attributes:
        ratio: (Sum over the levels of the extra CPU time against a bare step × the level's share + what the hooks
            measure of themselves in a bare step, times `COST_PER_OWN`, + the sender thread's CPU time per step) /
            median step, + ``collector``.
        low, high: The 95 % interval, from order statistics of the differences (no assumption on their distribution).
        pairs: How many comparisons of watched and bare steps it rests on.
        full_share: The share of full steps.
        collector: Its CPU time for each rank of its node, as a share of all time; None if it does not say.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    full_share: float
    collector: float | None = None


class Differences:
    """CPU time of steps of one level less that of their neighbours of another (ns).

    Attributes:
        values: The newest, oldest first.
        count: How many there have ever been.
    """

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=KEEP_PAIRS)
        self.count = 0

    def add_value(self, value: float) -> None:
        """Adds one difference."""
        self.values.append(value)
        self.count += 1

    def enough(self, share: float) -> bool:
        """Returns whether there are enough for a median, if steps of that level are such a share of all."""
        return len(self.values) >= (FEW_PAIRS if share < RARE_SHARE else ENOUGH_PAIRS)

    def interval(self) -> tuple[float, float, float]:
        """Returns the median and its 95 % interval; with fewer than six values, from the least to the greatest."""
        return median(self.values), *median_bounds(self.values, 0.975)


@dataclass(slots=True)
class CostMeter:
    """Measures the cost from the steps of one rank: all ranks run the same code, and share what disturbs a step.

    In what hooks measure of themselves, a rank may have waited for a core: the least of some ranks counts.

    Attributes:
        differences: By the two levels that were compared, the one with less watching first.
    """

    differences: dict[tuple[str, str], Differences] = field(default_factory=dict)
    _before: tuple[str, str] | None = None  # the levels of the comparison that has just used the previous step
    _rank: int | None = None
    _last: list[Step] = field(default_factory=list)
    _levels: deque[str] = field(default_factory=lambda: deque(maxlen=SHARE_STEPS))
    _durations: deque[int] = field(default_factory=lambda: deque(maxlen=SHARE_STEPS))
    _own: dict[int, deque[tuple[bool, int]]] = field(default_factory=dict)  # by rank
    _sender: deque[int] = field(default_factory=lambda: deque(maxlen=SHARE_STEPS))
    _collector: deque[Status] = field(default_factory=lambda: deque(maxlen=STATUSES))

    def add_step(self, step: Step) -> None:
        """Adds a step; each rank's come in order. Of all but the first rank that came, only bare steps count."""
        if self._rank is None:
            self._rank = step.rank
        self._note_own(step)
        if step.rank != self._rank:
            return
        if step.status not in LEVELS:
            self._restart()
            return
        self._sender.append(step.sender_ns if self._levels else 0)  # the first one's includes the start of the thread
        self._levels.append(step.status)
        self._durations.append(step.duration_ns)
        if step.cpu_ns is None:
            self._restart()
            return
        self._last.append(step)
        if len(self._last) == 3:
            levels = _compared(*self._last)
            if levels is not None and levels != self._before:  # differences that share a step are not independent
                self._compare(levels, *self._last)
                self._before = levels
                del self._last[:2]
            else:
                self._before = None
                del self._last[0]

    def _note_own(self, step: Step) -> None:
        """Notes what hooks measure of themselves in a bare step, of the first ranks that come."""
        if step.status == BARE:
            if step.rank not in self._own and len(self._own) < OWN_RANKS:
                self._own[step.rank] = deque(maxlen=SHARE_STEPS)
            if step.rank in self._own:
                self._own[step.rank].append((step.cpu_ns is None, step.own_ns))

    def add_status(self, status: Status) -> None:
        """Adds what the collector says of itself; each comes after what it said before, or from a new one."""
        if status.cpu_ns is None or not status.here:
            return
        if self._collector and status.cpu_ns < (self._collector[-1].cpu_ns or 0):
            self._collector.clear()
        self._collector.append(status)

    def _collector_share(self) -> float | None:
        if not self._collector:
            return None
        first, last = self._collector[0], self._collector[-1]
        elapsed_ns = last.at_ns - first.at_ns
        ranks = max(status.here for status in self._collector)  # at the end of a run, they leave one by one
        return None if elapsed_ns <= 0 else ((last.cpu_ns or 0) - (first.cpu_ns or 0)) / elapsed_ns / ranks

    def _restart(self) -> None:
        """Compares nothing across a gap."""
        self._last.clear()
        self._before = None

    def _compare(self, levels: tuple[str, str], before: Step, middle: Step, after: Step) -> None:
        """Compares a step with the mean of its two neighbours: a steady drift cancels out."""
        difference = _cpu_ns(middle) - (_cpu_ns(before) + _cpu_ns(after)) / 2
        known = self.differences.setdefault(levels, Differences())
        known.add_value(difference if middle.status == levels[1] else -difference)

    def cost(self) -> Cost | None:
        """Returns the cost; None while there are too few comparisons."""
        step_ns, own_ns = median(self._durations) if self._durations else 0, self._own_ns()
        if not step_ns or own_ns is None:
            return None
        levels, count = Counter(self._levels), len(self._levels)
        for terms in self._ways(levels[FULL], levels[LIGHT]):
            found = [(steps / count, known) for steps, known in terms if known is not None]
            if len(found) == len(terms) and all(known.enough(share) for share, known in found):
                collector = self._collector_share()
                certain_ns = COST_PER_OWN * own_ns + fmean(self._sender) + (collector or 0.0) * step_ns
                return _cost(found, certain_ns, step_ns, levels[FULL] / count, collector)
        return None

    def _own_ns(self) -> float | None:
        """Returns what the hooks measure of themselves in a bare step; None while no rank has enough of these.

        More where CPU time is taken than elsewhere.
        """
        enough = [steps for steps in self._own.values() if len(steps) >= ENOUGH_BARE]
        return min(map(_own_of, enough), default=None)

    def _ways(self, full: int, light: int) -> Iterator[list[tuple[int, Differences | None]]]:
        """Yields numbers of steps, and the extra cost of each: a full step's is against a bare one, or a light one.

        The best way comes first. When a viewer comes or goes, most steps change their level, and for a while only the
        comparisons from before are enough.
        """
        direct, watched, further = (
            self.differences.get(levels) for levels in ((BARE, FULL), (BARE, LIGHT), (LIGHT, FULL))
        )
        apart = [(light, watched), (full, direct)]
        chained = [(full + light, watched), (full, further)]
        if full and light:
            yield from (apart, chained) if _count(direct) > _count(further) else (chained, apart)
        elif full:
            yield from ([(full, direct)], chained)
        else:
            yield [(light, watched)]


def _own_of(steps: Collection[tuple[bool, int]]) -> float:
    kinds = [[own_ns for kind, own_ns in steps if kind is without_cpu] for without_cpu in (False, True)]
    return sum(len(kind) * median(kind) for kind in kinds if kind) / len(steps)


def _count(known: Differences | None) -> int:
    return 0 if known is None else known.count


def _cost(
    terms: Iterable[tuple[float, Differences]],
    certain_ns: float,
    step_ns: float,
    full_share: float,
    collector: float | None,
) -> Cost:
    """Returns the sum of the terms, whose errors are independent, and of what ddpwatch measures of itself."""
    total, below, above, pairs = certain_ns, 0.0, 0.0, 0
    for share, known in terms:
        middle, low, high = known.interval()
        total += share * middle
        below, above = hypot(below, share * (middle - low)), hypot(above, share * (high - middle))
        pairs = pairs or known.count
    low, high = (total - below) / step_ns, (total + above) / step_ns
    return Cost(total / step_ns, low, high, pairs, full_share, collector)


def _compared(before: Step, middle: Step, after: Step) -> tuple[str, str] | None:
    """Returns the two levels, if three steps in a row did the same work and only the middle one differs in level."""
    if before.status != after.status or before.status == middle.status:
        return None
    if (before.step, after.step) != (middle.step - 1, middle.step + 1):
        return None
    if not (_alike(before, after) and _alike(before, middle)):
        return None
    less, more = sorted((before.status, middle.status), key=LEVELS.index)
    return less, more


def _alike(one: Step, other: Step) -> bool:
    """Returns whether two steps did the same work, as far as that is known."""
    if not (is_watched(one.status) and is_watched(other.status)):
        return True
    return (one.synced, one.micro_steps) == (other.synced, other.micro_steps)


def _cpu_ns(step: Step) -> int:
    return step.cpu_ns or 0
