"""One rank's late steps that belong together, and whether they have a rhythm."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf, log
from operator import mul
from statistics import fmean, median
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.late.bets import BETS, END, always_late, wins
from ddpwatch.analysis.diagnosis.late.residuals import KEEP_STEPS, spread

FEWEST_LATE = 3  # late steps, to name a rank
NEWEST = 32  # late steps: what is typical of a streak. Of twice as many watched ones, outliers may be another streak
FAR_LATER, ALL_LATER = 2.2, 6  # times as late as before, in so many late steps
OUTLIER = 4.0  # times what is typical of a streak: such a late step is not one of it
MOSTLY = 0.6  # of the steps, in a streak of nearly every step; of the late ones, in a period's steps, if it has one
CONSTANT_SHARE = 0.25  # of what is typical of its late steps, in these
MOST_PERIOD = 64


class SeenStep(NamedTuple):
    """A watched step: by how much the rank deviates (ns), whether that is late, and how likely it is by chance."""

    step: int
    deviation: int
    is_late: bool
    p: float


@dataclass(slots=True)
class Streak:
    """One rank's late steps. Times in ns.

    Attributes:
        rank: Which one.
        step_ns: A typical step when it was found.
        since, until: Its first and its last late step, by number.
        typical_ns: Median deviation of its newest late steps.
        found_in: The rhythm that it was found by, if that is one.
        values: Its newest watched steps.
        count: How many late steps there were up to ``until``.
        watched: How many watched steps there were from ``since`` to ``until``.
        open: Whether it lasts.
        named: The step in which it was found.
        noise_ns: The standard deviation of alike ranks' deviations then.
        changed: Whether the rank was late before it, too, but less.
        dissolved: Whether it was found only after such a change, so that it has no steps of its own.
    """

    rank: int
    step_ns: float
    since: int
    until: int
    typical_ns: float
    found_in: tuple[int, int] | None = None
    values: deque[SeenStep] = field(default_factory=lambda: deque(maxlen=KEEP_STEPS))
    count: int = 0
    watched: int = 0
    open: bool = True
    named: int = 0
    noise_ns: float = inf
    changed: bool = False
    dissolved: bool = False
    pending: int = 0  # watched steps since ``until``
    _late: int = 0  # those of them that were late
    _won: list[float] = field(default_factory=lambda: [0.0] * (BETS + 1))  # the last one in the rhythm's steps
    _best: float = 0.0
    _due: int = 0  # watched steps, from which on its shape is to be worked out again
    _shape: tuple[bool, float, int | None] | None = None

    def limit(self, low: float) -> float:
        """Returns how late a step has to be, to belong to it."""
        return max(low, self.typical_ns / 2)

    def add_step(self, step: int, deviation: int, low: float, p: float) -> bool:
        """Takes the next watched step, and how likely it is by chance; returns whether it was late."""
        self.pending += 1
        late = deviation > self.limit(low)
        self.values.append(SeenStep(step, deviation, late, p))
        self._late += late
        self._bet(step, p)
        top = max(self._won)
        if late and top >= self._best:
            self._best, self.until = top, step
            self.watched, self.pending = self.watched + self.pending, 0
            self.count, self._late = self.count + self._late, 0
            if self.count > 1 and self.count % 4 == 1:  # not by its first one: that may be far later than the others
                self.typical_ns = median(islice(self._typical_values(), NEWEST))
            if self.watched >= self._due:
                self._note()
        elif self._best - top >= END:
            self.open = False
            self._note()
        return late

    def _bet(self, step: int, p: float) -> None:
        """Adds up what each bet wins since the streak began."""
        factors = wins(p)
        won, gains = self._won, list(map(log, factors))
        for bet, gain in enumerate(gains):
            won[bet] += gain
        if self.found_in is None:
            won[-1] = -1e9
        elif step % self.found_in[0] == self.found_in[1]:
            won[-1] += log(always_late(factors))

    def _note(self) -> None:
        """Has the shape of its steps up to now worked out: all who ask see the same."""
        self._shape = None
        self._described()
        self._due = self.watched + max(1, min(NEWEST, self.watched // 16))

    @property
    def outlier_ns(self) -> float:
        """Steps that are later than this are not of its kind."""
        return OUTLIER * self.typical_ns

    def _typical_values(self) -> Iterable[int]:
        """Yields the deviations of its late steps, newest first."""
        return (seen.deviation for seen in reversed(self.values) if seen.is_late)

    def end_before(self, step: int) -> None:
        """Ends it there: what came since belongs to another streak."""
        gone = [seen for seen in self.values if seen.step >= step]
        counted = [seen for seen in gone if seen.step <= self.until]
        self.watched, self.count = self.watched - len(counted), self.count - sum(seen.is_late for seen in counted)
        for _ in gone:
            self.values.pop()
        self.until = max((seen.step for seen in self.values if seen.is_late), default=self.since)
        self.open, self.dissolved = False, self.named >= step
        self._note()

    def deviation_in(self, step: int) -> tuple[float, bool]:
        """Returns the deviation in one of the newest watched steps, and whether that was late; else what is usual."""
        for seen in reversed(self.values):
            if seen.step <= step:
                return (seen.deviation, seen.is_late) if seen.step == step else (self.late_ns, False)
        return self.late_ns, False

    @property
    def struck(self) -> tuple[int, ...]:
        """Its newest late steps, ascending."""
        return tuple(seen.step for seen in self.values if seen.is_late and seen.step <= self.until)

    def shared_with(self, other: Streak) -> float:
        """Returns the share of its late steps that are late steps of another streak, too."""
        late, known = ({seen.step for seen in streak.values if seen.is_late} for streak in (self, other))
        return len(late & known) / len(late) if late else 0.0

    def far_later_since(self) -> tuple[int, float] | None:
        """Returns the step since which it is far later than before, and by how much at least (ns); None if it is not.

        That is so if all of the newest late steps are, or if some that are no longer of its kind came in the newest.
        """
        if not self.values[-1].is_late:
            return None
        late = [(seen.step, seen.deviation) for seen in self.values if seen.is_late]
        far = [(step, value) for step, value in late if value > self.outlier_ns]
        fresh = self.values[max(0, len(self.values) - 2 * NEWEST)].step
        if len(far) >= ALL_LATER and far[0][0] > fresh > self.since:
            return far[0][0], self.outlier_ns
        newest, before = late[-ALL_LATER:], late[:-ALL_LATER][-NEWEST:]
        if len(before) < FEWEST_LATE:
            return None
        least = FAR_LATER * max(median(value for _, value in before), line_through(before, newest[0][0]).end)
        return (newest[0][0], 0.0) if min(value for _, value in newest) >= least else None

    @property
    def constant(self) -> bool:
        """Whether nearly every step is late, as far as noise shows."""
        return self._described()[0]

    @property
    def late_ns(self) -> float:
        """How late it is: the median deviation of all its steps if it is constant, else of its late ones."""
        return self._described()[1]

    @property
    def period(self) -> int | None:
        """Every how many steps it strikes; None if that is not regular."""
        return self._described()[2]

    @property
    def own(self) -> float:
        """The share of how its lateness varies (its variance) that noise does not explain."""
        varied = sorted(seen.deviation for seen in self.values if seen.is_late or self.constant)
        return max(0.0, 1 - (self.noise_ns / spread(varied, 1.0)) ** 2)

    def _described(self) -> tuple[bool, float, int | None]:
        """Returns whether it is constant, how late it is, and its period."""
        if self._shape is None:
            values = [seen for seen in self.values if seen.step <= self.until]
            ordered = sorted(seen.deviation for seen in values)
            low = ordered[int((1 - MOSTLY) * len(ordered))] if ordered else 0
            period = find_period(values, self.typical_ns)  # also where most steps that are watched are late ones
            constant = period is None and low >= CONSTANT_SHARE * self.typical_ns
            late = float(median(ordered)) if constant and ordered else self.typical_ns
            self._shape = constant, late, period
        return self._shape


def find_period(values: Sequence[SeenStep], typical_ns: float) -> int | None:
    """Returns the period whose steps stand out most from those in between; None if none stands out enough.

    Args:
        values: Watched steps, oldest first.
        typical_ns: The deviation of a late step.
    """
    clipped = [(seen.step, min(max(seen.deviation, -typical_ns), 2 * typical_ns)) for seen in values]
    struck_steps = [seen.step for seen in values if seen.is_late]
    count, total = len(clipped), sum(value for _, value in clipped)
    best, found = 0.0, None
    for period in range(2, min(MOST_PERIOD, count // 2) + 1):
        sums, counts = [0.0] * period, [0] * period
        for step, value in clipped:
            sums[step % period] += value
            counts[step % period] += 1
        residue = max(range(period), key=lambda at: sums[at] / counts[at] if counts[at] >= FEWEST_LATE else 0.0)
        struck = counts[residue]
        if not FEWEST_LATE < struck < count - FEWEST_LATE:
            continue
        if sum(step % period == residue for step in struck_steps) < MOSTLY * len(struck_steps):
            continue
        on, off = sums[residue] / struck, (total - sums[residue]) / (count - struck)
        score = (on - off) * (struck * (count - struck) / count) ** 0.5
        if on >= MOSTLY * typical_ns and off <= (1 - MOSTLY) * typical_ns and score > best:
            best, found = score, period
    return found


class Line(NamedTuple):
    """A straight line: its slope, the share of variance that it explains, and its end."""

    slope: float
    fit: float
    end: float


def line_through(points: Sequence[tuple[int, float]], last: int) -> Line:
    """Returns the line of the least squares, up to ``last``."""
    x, y = map(fmean, zip(*points, strict=True))
    xs, ys = [at - x for at, _ in points], [value - y for _, value in points]
    xx, xy, yy = sum(map(mul, xs, xs)), sum(map(mul, xs, ys)), sum(map(mul, ys, ys))
    slope = xy / xx if xx else 0.0
    return Line(slope, slope * xy / yy if yy else 0.0, y + slope * (last - x))
