"""One rank's late steps that belong together, and whether they have a rhythm."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import expm1, log1p, sqrt
from operator import add, mul
from statistics import median
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.late.trend import Trend

END_SCORE, END_SCORE_RARE = 4.0, 6.0  # what a streak may lose before it is over; where less than half is late
MOST_LIKELIER, END_LIKELIER = 1.0, 8.0  # logarithms, of one that was found by its mean: of a step, and that it is over
SETTLED_STREAK = 16  # watched steps, from where on its share of late steps is what is expected of it
KEEP_VALUES = 512  # newest watched steps that a streak remembers
SHAPE_STEPS = 32  # watched ones, that its shape may be behind at most
TYPICAL_STEPS = 32  # newest late steps: what is typical of a streak
CAUTIOUS = 1.5  # standard errors (Wilson's), by which a share of late steps is taken to be less than what was seen
OFTEN, SELDOM = 0.8, 0.5  # shares of late steps: of one that is late all the time, and of one that is now and then
OUTLIER = 4.0  # times what is typical of a streak: such a late step is not one of it
CONSTANT_QUANTILE = 0.4  # of all deviations in a streak: if that is far from 0, nearly every step is late
CONSTANT_SHARE = 0.25  # of what is typical of its late steps
MOST_PERIOD = 64
ENOUGH_STRUCK = 4  # for a period; and steps in between
# Mean deviation in the period's steps (at least; and at least that share of the late steps are among them), and between
# them (at most), as shares of what is typical of a late step.
PERIOD_ON, PERIOD_OFF = 0.6, 0.35
MOST_RHYTHM = 16
FEWEST_IN_RHYTHM = 16  # watched steps
RHYTHM_STRUCK = 6  # steps of a period, and steps in between, at least
RUN_CHANCE = 1e-3  # that a rank which is late as often, but at random, makes such a run
RUN_OFF = 0.1  # share of the steps between those of a run that are late at most: more, and it may be chance
RHYTHM_LIKELY = 5.0  # standard errors, of a rank that is known to be late: a chance of 3e-7 for each rhythm


class Rhythm(NamedTuple):
    """A rank is late in the steps that leave a residue.

    Attributes:
        late_ns: Its median deviation in these.
        sure: By how many standard errors they differ from those in between.
    """

    period: int
    residue: int
    late_ns: float
    sure: float

    def strikes(self, step: int) -> bool:
        """Returns whether a step is one of them."""
        return step % self.period == self.residue


@dataclass(slots=True)
class Streak:
    """One rank's late steps. Times in ns.

    The *score* grows with a late step and falls with one on time, by the mean of the shares of late steps that are
    expected of it and of noise. It ends at its maximum: what comes after that is noise.

    Attributes:
        rank: Which one.
        step_ns: A typical step when it was found.
        since, until: Its first and its last late step, by number.
        typical_ns: Median deviation of its newest late steps.
        expected: The share of late steps when it was found; of a rhythm, of its steps.
        rhythm: What it was found by, if that is a rhythm: no other steps are late then.
        noise_ns: The standard deviation of noise when it was found; where that lasts, of steps that show as much each.
        values: Its newest watched steps: number, deviation, and whether that was late.
        trend: Of those of them that are not after ``until``.
        count: How many late steps there were up to ``until``.
        watched: How many watched steps there were from ``since`` to ``until``.
        as_late: In how many watched steps the rank was as late as in one of it: of a rhythm, in others as well.
        open: Whether it lasts.
        named: The step in which it was found.
        changed: Whether the rank was late before it, too, but less, or less often.
        dissolved: Whether it was found only after such a change, so that it has no steps of its own.
    """

    rank: int
    step_ns: float
    since: int
    until: int
    typical_ns: float
    expected: float = 1.0
    rhythm: Rhythm | None = None
    noise_ns: float = 0.0
    values: deque[tuple[int, int, bool]] = field(default_factory=lambda: deque(maxlen=KEEP_VALUES))
    trend: Trend = field(default_factory=Trend)
    count: int = 0
    watched: int = 0
    as_late: int = 0
    open: bool = True
    named: int = 0
    changed: bool = False
    dissolved: bool = False
    pending: int = 0  # watched steps since ``until``
    _late: int = 0  # those of them that were late
    _struck: int = 0  # steps since ``since``; of a rhythm, its steps
    _early: int = 0  # those of them that were early by as much as late ones are late
    _score: float = 0.0
    _best: float = 0.0
    _due: int = 0  # watched steps, from which on its shape is to be worked out again
    _noted: tuple[int, int, float] = (0, -1, 0.0)  # from what: ``watched``, ``until`` and ``typical_ns`` then
    _shape: tuple[tuple[int, int, float], bool, float, int | None] = ((-1, -1, 0.0), True, 0.0, None)

    def limit(self, low: float) -> float:
        """Returns how late a step has to be, to belong to it."""
        return self.typical_ns / 2 if self.rhythm is not None else max(low, self.typical_ns / 2)

    def add_step(self, step: int, deviation: int, low: float) -> bool:
        """Takes the next watched step; returns whether it was late."""
        if len(self.values) == KEEP_VALUES and self.pending < KEEP_VALUES:
            self.trend.drop(*self.values[0][:2])
        self.pending += 1
        strikes = self.rhythm is None or self.rhythm.strikes(step)
        as_late = deviation > self.limit(low)
        late = strikes and as_late
        self.as_late += as_late
        self.values.append((step, deviation, late))
        self._late += late
        self._struck += strikes
        self._early += strikes and deviation < -self.limit(low)
        if self.shifted:
            self._score += self._likelier(deviation)
        else:
            self._score += (late - (self.expected + self._noise) / 2) * strikes
        if late and self._score >= self._best:
            self._best, self.until = self._score, step
            for number, value, _ in islice(reversed(self.values), self.pending):
                self.trend.add_point(number, value)
            self.watched, self.pending = self.watched + self.pending, 0
            self.count, self._late = self.count + self._late, 0
            if self.watched >= SETTLED_STREAK and self.rhythm is None:
                self.expected = likely_share(self.count, self.watched)
            if self.count % 4 == 1 and not self.shifted:
                self.typical_ns = median(islice(self._typical_values(), TYPICAL_STEPS))
            if self.watched >= self._due:
                self._note()
        elif not self.lasts:
            self.open = False
            self._note()
        return late

    def _note(self) -> None:
        """Notes the shape of its steps up to now: all who ask see the same."""
        self._noted = self.watched, self.until, self.typical_ns
        self._due = self.watched + max(1, min(SHAPE_STEPS, self.watched // 16))

    def _likelier(self, deviation: int) -> float:
        """Returns the logarithm of how much likelier a rank that is later on average is to be so late than one on time.

        In normal noise, and no more than `MOST_LIKELIER` either way: some steps are outliers.
        """
        sure = (self.typical_ns / self.noise_ns) ** 2 if self.noise_ns else 2 * MOST_LIKELIER
        return max(-MOST_LIKELIER, min(MOST_LIKELIER, (deviation / self.typical_ns - 0.5) * sure))

    @property
    def lasts(self) -> bool:
        """Whether its newest steps do not show that it is over."""
        if self.shifted:
            return self._best - self._score < END_LIKELIER
        return self._best - self._score < (END_SCORE_RARE if self.rhythm else end_score(self.expected))

    @property
    def _noise(self) -> float:
        """The share of its steps that would be late by chance: as many as are early by that much."""
        return min(self.expected, self._early / max(self._struck, SETTLED_STREAK))

    @property
    def outlier_ns(self) -> float:
        """Steps that are later than this are not of its kind."""
        if not self.shifted:
            return OUTLIER * self.typical_ns
        newest = list(islice((value for _, value, late in reversed(self.values) if late), TYPICAL_STEPS))
        return OUTLIER * max(self.typical_ns, median(newest) if newest else 0.0)

    @property
    def shifted(self) -> bool:
        """Whether it was found by its mean: all steps are its steps."""
        return self.rhythm is not None and self.rhythm.period == 1

    def _typical_values(self) -> Iterator[int]:
        """Yields the deviations of its late steps, newest first; of a rhythm, of all of its steps."""
        if self.rhythm is None:
            return (value for _, value, late in reversed(self.values) if late)
        return (value for step, value, _ in reversed(self.values) if self.rhythm.strikes(step))

    def end_before(self, step: int) -> None:
        """Ends it there: what came since belongs to another streak."""
        gone = [value for value in self.values if value[0] >= step]
        counted = [value for value in gone if value[0] <= self.until]
        for number, value, _ in counted:
            self.trend.drop(number, value)
        self.watched, self.count = self.watched - len(counted), self.count - sum(late for _, _, late in counted)
        for _ in gone:
            self.values.pop()
        self.until = max((number for number, _, late in self.values if late), default=self.since)
        self.open, self.dissolved = False, self.named >= step
        self._note()

    def late_in(self, step: int) -> int | None:
        """Returns by how much it was late in one of the newest watched steps; None if it was not."""
        for number, deviation, late in reversed(self.values):
            if number <= step:
                return deviation if late and number == step else None
        return None

    @property
    def struck(self) -> tuple[int, ...]:
        """Its newest late steps, ascending."""
        return tuple(step for step, _, late in self.values if late and step <= self.until)

    def shared_with(self, other: Streak) -> float:
        """Returns the share of its late steps that are late steps of another streak, too."""
        late = {step for step, _, late in self.values if late}
        known = {step for step, _, late in other.values if late}
        return len(late & known) / len(late) if late else 0.0

    def outdoes(self, other: Streak) -> bool:
        """Returns whether it is late in nearly every step, and another streak was only now and then before."""
        before = [late for step, _, late in other.values if step < self.since]
        return (
            self.count >= OFTEN * self.watched and len(before) >= SETTLED_STREAK and sum(before) <= SELDOM * len(before)
        )

    @property
    def constant(self) -> bool:
        """Whether nearly every step is late, as far as noise shows."""
        return self._described()[1]

    @property
    def late_ns(self) -> float:
        """How late it is: the median deviation of all its steps if it is constant, else of its late ones."""
        return self._described()[2]

    @property
    def period(self) -> int | None:
        """Every how many steps it strikes; None if that is not regular."""
        return self._described()[3]

    @property
    def by_chance(self) -> float:
        """The share of its late steps that noise explains: it was early by that much as often."""
        limit = min((value for _, value, late in self.values if late), default=0)
        late = sum(late for _, _, late in self.values)
        return min(1.0, sum(value <= -limit for _, value, _ in self.values) / late) if late and limit > 0 else 0.0

    def _rhythmic_period(self, values: Sequence[tuple[int, int, bool]], typical_ns: float) -> int | None:
        """Returns the period that shows in all of its steps, where late ones alone show none."""
        if self.rhythm is not None and not self.shifted:
            return self.rhythm.period
        found = rhythm([value[:2] for value in values], 2 * typical_ns, RHYTHM_LIKELY)
        return None if found is None else found.period

    def _described(self) -> tuple[tuple[int, int, float], bool, float, int | None]:
        """Returns what follows from its steps, worked out again when there are a few more."""
        if self._shape[0] != self._noted:
            _, until, typical = self._noted
            values = [value for value in self.values if value[0] <= until][SHAPE_STEPS - KEEP_VALUES :]
            ordered = sorted(value for _, value, _ in values)
            low = ordered[int(CONSTANT_QUANTILE * len(ordered))] if ordered else 0
            period = find_period(values, typical)  # also where most steps that are watched are late ones
            constant = self.rhythm is None and period is None and low >= CONSTANT_SHARE * typical
            if not constant and period is None:
                period = self._rhythmic_period(values, typical)
                constant = self.shifted and period is None
            late = float(median(ordered)) if constant and ordered else typical
            self._shape = self._noted, constant, late, period
        return self._shape


def rhythm(rows: Sequence[tuple[int, int]], limit_ns: float, sure: float) -> Rhythm | None:
    """Returns the rhythm whose steps are later than those in between; None if none is by enough standard errors.

    Args:
        rows: Steps and deviations.
        limit_ns: Deviations count up to that.
        sure: How many standard errors are enough, as of a normal distribution.
    """
    steps, clipped = [step for step, _ in rows], [min(max(value, -limit_ns), limit_ns) for _, value in rows]
    count, total = len(steps), sum(clipped)
    if count < FEWEST_IN_RHYTHM:
        return None
    spread = max(0.0, sum(map(mul, clipped, clipped)) / count - (total / count) ** 2) ** 0.5
    best, found = sqrt(explained(sure, count) * count) * spread, None
    # what a period's steps add up to at least, if they stand out: the sums of most periods rule them out
    least = best * (RHYTHM_STRUCK * (count - RHYTHM_STRUCK) / count) ** 0.5 * (1 - 1e-9) + min(0.0, total)
    for period, sums in _folded(steps, clipped):
        if max(sums) < least:
            continue
        counts = Counter(step % period for step in steps)
        for residue, part in enumerate(sums):
            struck = counts[residue]
            if not RHYTHM_STRUCK <= struck <= count - RHYTHM_STRUCK:
                continue
            on, off = part / struck, (total - part) / (count - struck)
            score = (on - off) * (struck * (count - struck) / count) ** 0.5
            if score > best and -on <= off <= PERIOD_OFF * on:  # one that is early in between is not late
                best, found = score, (period, residue)
    if found is None or not spread:
        return None
    period, residue = found
    late_ns = median(value for step, value in rows if step % period == residue)
    return Rhythm(period, residue, late_ns, standard_errors((best / spread) ** 2 / count, count))


def explained(errors: float, count: int) -> float:
    """Returns the share of the variance of so many values that a difference between two parts of them explains.

    Of normal noise, it exceeds that as seldom as a normal distribution exceeds so many standard errors (Student's t, by
    Wallace's approximation).
    """
    free = count - 2
    return -expm1(-((errors * (8 * free + 3) / (8 * free + 1)) ** 2) / free)


def standard_errors(share: float, count: int) -> float:
    """Returns the reverse of `explained`."""
    free = count - 2
    return sqrt(-free * log1p(-min(share, 1 - 1e-12))) * (8 * free + 1) / (8 * free + 3)


def newest_run(late: int, steps: Iterable[int], least: int) -> tuple[int, int] | None:
    """Returns the period in each of whose newest steps a rank was late, and hardly in between; None if there is none.

    Args:
        late: Which steps were late: bit 0 is the newest one.
        steps: Their numbers, newest first.
        least: How many late ones in a row are no noise.

    Returns:
        The period, and in how many newest steps it lies.
    """
    newest = None
    runs = dict.fromkeys(range(2, MOST_RHYTHM + 1), 0)
    spans = dict.fromkeys(runs, 0)
    going = list(runs)
    for age, step in enumerate(steps):
        newest = step if newest is None else newest
        struck = late >> age & 1
        for period in [period for period in going if (newest - step) % period == 0]:
            if struck:
                runs[period], spans[period] = runs[period] + 1, age + 1
            else:
                going.remove(period)
        if not going:
            break
    for period in sorted(runs, key=runs.__getitem__, reverse=True):
        run, span = runs[period], spans[period]
        if run < least:
            break
        struck = (late & ((1 << span) - 1)).bit_count()
        if struck - run <= RUN_OFF * (span - run) and len(runs) * (struck / span) ** run <= RUN_CHANCE:
            return period, span
    return None


def _folded(steps: Sequence[int], values: Sequence[float]) -> Iterator[tuple[int, list[float]]]:
    """Yields per period up to `MOST_RHYTHM`, shortest first, the values of the steps of each residue added up."""
    folded: dict[int, list[float]] = {}
    for period in range(MOST_RHYTHM, MOST_RHYTHM // 2, -1):
        sums = folded[period] = [0.0] * period
        for step, value in zip(steps, values, strict=True):
            sums[step % period] += value
    for period in range(MOST_RHYTHM // 2, 1, -1):
        double = folded[2 * period]
        folded[period] = list(map(add, double[:period], double[period:]))
    yield from sorted(folded.items())


def likely_share(late: int, steps: int) -> float:
    """Returns the share of late steps to expect of a rank: at least, where it is late now and then.

    It was found, and its share is counted, when it had been late more often than it mostly is.
    """
    share, z2 = late / steps, CAUTIOUS**2
    if share >= OFTEN:
        return share
    spread: float = CAUTIOUS * (share * (1 - share) / steps + z2 / (4 * steps**2)) ** 0.5
    return (share + z2 / (2 * steps) - spread) / (1 + z2 / steps)


def end_score(expected: float) -> float:
    """Returns how far a streak's score may fall before it is over, by the expected share of late steps."""
    return END_SCORE if expected >= 0.5 else END_SCORE_RARE


def find_period(values: Sequence[tuple[int, int, bool]], typical_ns: float) -> int | None:
    """Returns the period whose steps stand out most from those in between; None if none stands out enough.

    Args:
        values: Steps, their deviations, and whether they were late; oldest first.
        typical_ns: The deviation of a late step.
    """
    clipped = [(step, min(max(value, -typical_ns), 2 * typical_ns)) for step, value, _ in values]
    struck_steps = [step for step, _, late in values if late]
    count, total = len(clipped), sum(value for _, value in clipped)
    best, found = 0.0, None
    for period in range(2, min(MOST_PERIOD, count // 2) + 1):
        sums, counts = [0.0] * period, [0] * period
        for step, value in clipped:
            sums[step % period] += value
            counts[step % period] += 1
        residue = max(range(period), key=lambda at: sums[at] / counts[at] if counts[at] >= ENOUGH_STRUCK - 1 else 0.0)
        struck = counts[residue]
        if not ENOUGH_STRUCK <= struck <= count - ENOUGH_STRUCK:
            continue
        if sum(step % period == residue for step in struck_steps) < PERIOD_ON * len(struck_steps):
            continue
        on, off = sums[residue] / struck, (total - sums[residue]) / (count - struck)
        score = (on - off) * (struck * (count - struck) / count) ** 0.5
        if on >= PERIOD_ON * typical_ns and off <= PERIOD_OFF * typical_ns and score > best:
            best, found = score, period
    return found
