"""What watching costs the job, by comparing steps that are watched with those beside them that are not.

Some steps are not watched at all, and of the others most are shadows, whose collectives are left alone
(`ddpwatch.sampling.schedule`). The kinds lie side by side in one run, so a step of one kind is set against its two
neighbours
of another: what is different in the CPU time of the rank's process is what the additional watching took. CPU time,
because a step's duration also holds what other ranks and the network did.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import hypot
from statistics import median

from ddpwatch.messages import Step
from ddpwatch.sampling.bounds import median_bounds

PAIRS = 2048
ENOUGH_PAIRS = 8
FEW_PAIRS = 3  # for steps that are rare: however wrong, it is little of the whole
RARE = 1 / 12  # of all steps
STEPS = 512  # that shares and the median are taken over
LESS = ("unwatched", "shadow", "ok")  # kinds of steps, from less to more watching


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching costs, as a share of the step.

    Attributes:
        ratio: (What each kind of step takes more than an unwatched one × its share + what the hooks see of themselves
            in an unwatched one) / median step.
        low, high: 95 % interval of that, from the order statistics of the differences (no assumption on their shape).
        pairs: How many times watched and unwatched steps were compared.
        full_share: Share of the steps that are recorded in full.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    full_share: float


class Differences:
    """CPU time of steps of one kind less that of their neighbours of another (ns); the newest.

    Attributes:
        values: In the order in which they came.
        count: How many there have ever been.
    """

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=PAIRS)
        self.count = 0

    def add(self, value: float) -> None:
        """Takes one."""
        self.values.append(value)
        self.count += 1

    def enough(self, share: float) -> bool:
        """Whether there are enough to speak of a median, for steps that make up such a share of all."""
        return len(self.values) >= (FEW_PAIRS if share < RARE else ENOUGH_PAIRS)

    def interval(self) -> tuple[float, float, float]:
        """The median, and between what it lies with 95 %; of fewer than six values, the least and the greatest."""
        return median(self.values), *median_bounds(self.values, 0.975)


@dataclass(slots=True)
class CostMeter:
    """Takes steps, tells the cost. It follows one rank: all run the same code, and share what disturbs a step.

    Attributes:
        differences: By the two kinds of steps that were compared, the one with less watching first.
    """

    differences: dict[tuple[str, str], Differences] = field(default_factory=dict)
    _before: tuple[str, str] | None = None  # what the comparison was of that has just used the step before
    _rank: int | None = None
    _last: list[Step] = field(default_factory=list)
    _kinds: deque[str] = field(default_factory=lambda: deque(maxlen=STEPS))
    _durations: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))
    _own: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))

    def add(self, step: Step) -> None:
        """Takes one step of one rank, in order. Of several ranks, the first that comes is followed."""
        if self._rank is None:
            self._rank = step.rank
        if step.rank != self._rank:
            return
        if step.status not in LESS or step.cpu_ns is None:
            self._last.clear()
            return
        self._kinds.append(step.status)
        self._durations.append(step.duration_ns)
        if step.status == "unwatched":
            self._own.append(step.own_ns)
        self._last.append(step)
        if len(self._last) == 3:
            kinds = _compared(*self._last)
            if kinds is not None and kinds != self._before:  # differences that share a step are not independent
                self._compare(kinds, *self._last)
                self._before = kinds
                del self._last[:2]
            else:
                self._before = None
                del self._last[0]

    def _compare(self, kinds: tuple[str, str], before: Step, middle: Step, after: Step) -> None:
        """Between its two neighbours: what grows from step to step cancels out."""
        difference = _cpu_ns(middle) - (_cpu_ns(before) + _cpu_ns(after)) / 2
        self.differences.setdefault(kinds, Differences()).add(difference if middle.status == kinds[1] else -difference)

    def cost(self) -> Cost | None:
        """The cost, None while too little was compared."""
        step_ns = median(self._durations) if self._durations else 0
        if not step_ns:
            return None
        kinds, count = Counter(self._kinds), len(self._kinds)
        found = []
        for steps, known in self._terms(kinds["ok"], kinds["shadow"]):
            share = steps / count
            if known is None or not known.enough(share):
                return None
            found.append((share, known))
        return _cost(found, median(self._own), step_ns, kinds["ok"] / count)

    def _terms(self, full: int, shadow: int) -> list[tuple[int, Differences | None]]:
        """Numbers of steps, and what each of them takes more; a full one than an unwatched one, or than a shadow."""
        direct, watched, further = (
            self.differences.get(kinds) for kinds in (("unwatched", "ok"), ("unwatched", "shadow"), ("shadow", "ok"))
        )
        if full > shadow:
            return [(full + shadow, direct)]
        if not full:
            return [(shadow, watched)]
        if direct is not None and (further is None or direct.count > further.count):
            return [(shadow, watched), (full, direct)]
        return [(full + shadow, watched), (full, further)]


def _cost(terms: Iterable[tuple[float, Differences]], own_ns: float, step_ns: float, full_share: float) -> Cost:
    """The terms' sum; their errors are independent."""
    total, below, above, pairs = own_ns, 0.0, 0.0, 0
    for share, known in terms:
        middle, low, high = known.interval()
        total += share * middle
        below, above = hypot(below, share * (middle - low)), hypot(above, share * (high - middle))
        pairs = pairs or known.count
    return Cost(total / step_ns, (total - below) / step_ns, (total + above) / step_ns, pairs, full_share)


def _compared(before: Step, middle: Step, after: Step) -> tuple[str, str] | None:
    """The two kinds, if the outer two are of one and the middle of another, all in a row, and all did the same work."""
    if before.status != after.status or before.status == middle.status:
        return None
    if (before.step, after.step) != (middle.step - 1, middle.step + 1):
        return None
    if not (_alike(before, after) and _alike(before, middle)):
        return None
    less, more = sorted((before.status, middle.status), key=LESS.index)
    return less, more


def _alike(one: Step, other: Step) -> bool:
    """Whether two steps did the same work, as far as is known."""
    if "unwatched" in (one.status, other.status):
        return True
    return (one.synced, one.micro_steps) == (other.synced, other.micro_steps)


def _cpu_ns(step: Step) -> int:
    return step.cpu_ns or 0
