"""Which ranks of one group are late beyond noise, in which steps: streaks, found as they happen."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import median

from ddpwatch.analysis.diagnosis.noise import (
    CLEAN_WEIGHT,
    KEEP_STEPS,
    LASTING,
    LOW,
    THRESHOLDS,
    WINDOWS,
    Threshold,
    alarm_counts,
    deviations,
    scale,
)

POOLED = 128  # newest deviations, over all ranks: what the scale of noise is estimated from
SETTLE = 64  # newest steps: what the duration of a step is estimated from
SCALE_EVERY = 8  # steps
FEWEST = 5  # steps, before anything is judged
FEWEST_LATE = 4  # late steps, to name a rank
FEWEST_IN_STREAK = 3  # of them, that are about as late as is typical: a single one is no streak
END_SCORE, END_SCORE_RARE = 4.0, 6.0  # what a streak may lose before it is over; where less than half is late
SETTLED_STREAK = 16  # watched steps, from where on its share of late steps is what is expected of it
KEEP_VALUES = 512  # newest watched steps that a streak remembers
TYPICAL_STEPS = 32  # newest late steps: what is typical of a streak
CONSTANT_QUANTILE = 0.4  # of all deviations in a streak: if that is far from 0, nearly every step is late
CONSTANT_SHARE = 0.25  # of what is typical of its late steps
MOST_PERIOD = 64
ENOUGH_STRUCK = 4  # for a period
# Mean deviation in the period's steps (at least; and at least that share of the late steps are among them), and between
# them (at most), as shares of what is typical of a late step.
PERIOD_ON, PERIOD_OFF = 0.6, 0.35
MEMORY_AFTER = 16  # newest steps that do not count for how long noise lasts: a fault may have started in them
MEMORY_STEPS = 144
KEEP_STRUCK = 32
MEMORY_EVERY = 16  # steps
MOST_MEMORY = 20.0
ASSUMED_MEMORY = 6.0  # before it is known
MEMORY_NOTICED = 0.25  # correlation of successive steps: less may be chance
MANY_RANKS = 16  # among so many, one more or less does not change a median
RHYTHM_EVERY, RHYTHM_STEPS = 16, 128  # watched steps: how often a rhythm is looked for, and in how many
MOST_RHYTHM = 16
RHYTHM_STRUCK = 6  # steps of a period, at least
RHYTHM_SURE = 6.5  # standard errors: a chance of 4e-11 for one of 135 rhythms
_ALL = (1 << KEEP_STEPS) - 1


@dataclass(slots=True)
class Streak:
    """One rank's late steps. Times in ns.

    The *score* grows with a late step and falls with one on time, by the share of late steps that is expected. It ends
    at its maximum: what comes after that is noise.

    Attributes:
        rank: Which one.
        step_ns: A typical step when it was found.
        since, until: Its first and its last late step, by number.
        typical_ns: Median deviation of its newest late steps.
        expected: The share of late steps when it was found.
        values: Its newest watched steps: number, deviation, and whether that was late.
        count: How many late steps there were up to ``until``.
        watched: How many watched steps there were from ``since`` to ``until``.
        open: Whether it lasts.
    """

    rank: int
    step_ns: float
    since: int
    until: int
    typical_ns: float
    expected: float
    values: deque[tuple[int, int, bool]] = field(default_factory=lambda: deque(maxlen=KEEP_VALUES))
    count: int = 0
    watched: int = 0
    open: bool = True
    pending: int = 0  # watched steps since ``until``
    _late: int = 0  # those of them that were late
    _score: float = 0.0
    _best: float = 0.0
    _shape: tuple[int, bool, float, int | None] = (-1, True, 0.0, None)

    def limit(self, low: float) -> float:
        """How late a step has to be, to belong to it."""
        return max(low, self.typical_ns / 2)

    def add(self, step: int, deviation: int, low: float) -> bool:
        """Takes the next watched step; returns whether it was late."""
        self.pending += 1
        late = deviation > self.limit(low)
        self.values.append((step, deviation, late))
        self._late += late
        self._score += late - self.expected / 2
        if late and self._score >= self._best:
            self._best, self.until = self._score, step
            self.watched, self.pending = self.watched + self.pending, 0
            self.count, self._late = self.count + self._late, 0
            if self.watched >= SETTLED_STREAK:
                self.expected = self.count / self.watched
            if self.count % 4 == 1:
                newest = islice((value for _, value, struck in reversed(self.values) if struck), TYPICAL_STEPS)
                self.typical_ns = median(newest)
        elif self._best - self._score >= _end_score(self.expected):
            self.open = False
        return late

    def late_in(self, step: int) -> int | None:
        """By how much it was late in one of the newest watched steps; None if it was not."""
        for number, deviation, late in reversed(self.values):
            if number <= step:
                return deviation if late and number == step else None
        return None

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

    def _described(self) -> tuple[int, bool, float, int | None]:
        """What follows from its values, computed again when there are a few more."""
        if self.watched >= self._shape[0] + max(1, self.watched // 16) or self._shape[0] > self.watched:
            values = [value for value in self.values if value[0] <= self.until]
            ordered = sorted(value for _, value, _ in values)
            low = ordered[int(CONSTANT_QUANTILE * len(ordered))] if ordered else 0
            constant = low >= CONSTANT_SHARE * self.typical_ns
            late = float(median(ordered)) if constant and ordered else self.typical_ns
            period = None if constant else find_period(values, self.typical_ns)
            self._shape = self.watched, constant, late, period
        return self._shape


def rhythm(rows: Sequence[tuple[int, int]], limit_ns: float) -> tuple[int, float] | None:
    """The period whose steps are later than those in between, by `RHYTHM_SURE` standard errors, and by how much.

    Args:
        rows: Steps and deviations.
        limit_ns: Deviations count up to that.
    """
    clipped = [(step, min(max(value, -limit_ns), limit_ns)) for step, value in rows]
    count = len(clipped)
    if count < RHYTHM_EVERY:
        return None
    total = sum(value for _, value in clipped)
    spread = max(0.0, sum(value * value for _, value in clipped) / count - (total / count) ** 2) ** 0.5
    best, found = RHYTHM_SURE * spread, None
    for period in range(2, MOST_RHYTHM + 1):
        sums, counts = [0.0] * period, [0] * period
        for step, value in clipped:
            sums[step % period] += value
            counts[step % period] += 1
        for part, struck in zip(sums, counts, strict=True):
            if not RHYTHM_STRUCK <= struck < count:
                continue
            on, off = part / struck, (total - part) / (count - struck)
            score = (on - off) * (struck * (count - struck) / count) ** 0.5
            if score > best and off <= PERIOD_OFF * on:
                best, found = score, (period, on)
    return found


def _end_score(expected: float) -> float:
    return END_SCORE if expected >= 0.5 else END_SCORE_RARE


def find_period(values: Sequence[tuple[int, int, bool]], typical_ns: float) -> int | None:
    """The period whose steps stand out most from those in between; None if none stands out enough.

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
        if not ENOUGH_STRUCK <= struck < count:
            continue
        if sum(step % period == residue for step in struck_steps) < PERIOD_ON * len(struck_steps):
            continue
        on, off = sums[residue] / struck, (total - sums[residue]) / (count - struck)
        score = (on - off) * (struck * (count - struck) / count) ** 0.5
        if on >= PERIOD_ON * typical_ns and off <= PERIOD_OFF * typical_ns and score > best:
            best, found = score, period
    return found


class _Exceeded:
    """In which of the newest steps each rank (by position) exceeded a threshold: bit 0 is the newest step."""

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: dict[int, tuple[int, int]] = {}  # bits, and when they were noted: shifted only when they are read

    def note(self, index: int, now: int) -> None:
        """The rank exceeded it in the newest step."""
        self._noted[index] = self.mask(index, now) | 1, now

    def mask(self, index: int, now: int) -> int:
        """The bits of one rank."""
        bits, noted = self._noted.get(index, (0, now))
        return bits << min(now - noted, KEEP_STEPS) & _ALL

    def masks(self, now: int) -> dict[int, int]:
        """The bits of all ranks that have any."""
        found = {index: self.mask(index, now) for index in self._noted}
        self._noted = {index: (bits, now) for index, bits in found.items() if bits}
        return {index: bits for index, bits in found.items() if bits}

    def keep(self, index: int, now: int, steps: int) -> None:
        """Forgets all but a rank's newest steps."""
        self._noted[index] = self.mask(index, now) & ((1 << steps) - 1), now


class GroupLateness:
    """Follows one group's ranks, by one figure of each step.

    Attributes:
        ranks: Its members, in ascending order.
        streaks: The open ones, by rank.
        low_ns: Deviations above this are late, as far as noise goes.
        step_ns: A typical step.
        newest: The deviations in the newest step, in the order of the ranks.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.streaks: dict[int, Streak] = {}
        self.low_ns = 0.0
        self.step_ns = 0.0
        self.scale_ns = 0.0
        self.newest: Sequence[int] = ()
        self._rows: deque[tuple[int, array[int]]] = deque(maxlen=KEEP_STEPS)
        self._exceeded = {threshold: _Exceeded() for threshold in THRESHOLDS}
        self._positions = {rank: index for index, rank in enumerate(ranks)}
        self._durations: deque[int] = deque(maxlen=SETTLE)
        self._typical: dict[Threshold, int] = {}
        self._seen = 0
        self._memory = ASSUMED_MEMORY  # how many steps noise lasts
        self._struck: deque[tuple[int, int]] = deque(maxlen=KEEP_STRUCK)  # first and last steps of newest streaks
        self._over: dict[int, int] = {}  # by position, the end of the rank's streak before

    def add(self, step: int, launches: Sequence[int], step_ns: int, error_ns: int = 0) -> list[Streak]:
        """Takes when each rank launched the step's last bucket, within an error, and how long the step was.

        Returns:
            The streaks that start to show with this step.
        """
        late = array("q", deviations(launches))
        if error_ns:  # what clocks of several hosts leave open is nobody's lateness
            late = array("q", [max(0, value - error_ns) + min(0, value + error_ns) for value in late])
        self.newest = late
        self._durations.append(step_ns)
        self._rows.append((step, late))
        self._seen += 1  # the rows that are kept do not grow for ever
        if self._seen % SCALE_EVERY == 0 or self._seen <= 2 * FEWEST:
            self.step_ns = median(self._durations)
            self._estimate_scale()
        if self._seen % MEMORY_EVERY == 0:
            self._memory = self._estimate_memory()
        self._typical.clear()
        self.low_ns = LOW.at(self.scale_ns, self.step_ns)
        candidates = self._note(late)
        if len(self._rows) < FEWEST:
            return []
        found = [streak for index in candidates if (streak := self._judge(index)) is not None]
        if self._seen % RHYTHM_EVERY == 0 and (rhythmic := self._find_rhythm()) is not None:
            found.append(rhythmic)
        return found

    def _estimate_scale(self) -> None:
        rows = islice(reversed(self._rows), max(1, POOLED // len(self.ranks)))
        if len(self.ranks) == 2:
            values = [row[0] for _, row in islice(reversed(self._rows), POOLED // 2)]
        else:
            values = [value for _, row in rows for value in row]
        self.scale_ns = scale(values)

    def _estimate_memory(self) -> float:
        """How many successive steps noise makes alike: 1 if each step is independent of the one before."""
        rows = [(self._is_calm(step), row) for step, row in islice(reversed(self._rows), MEMORY_AFTER, MEMORY_STEPS)]
        count = sum(calm for calm, _ in rows)
        if count < MEMORY_AFTER:
            return self._memory
        ranks = range(1 if len(self.ranks) == 2 else min(len(self.ranks), 16))
        kept = median(_kept([row[index] if calm else None for calm, row in rows], 4 * self.scale_ns) for index in ranks)
        if kept <= MEMORY_NOTICED:
            return 1.0
        kept += (1 + 3 * kept) / count + ((1 - kept**2) / count) ** 0.5  # Kendall's bias, and an error
        return min(MOST_MEMORY, (1 + kept) / (1 - kept)) if kept < 1 else MOST_MEMORY

    def _is_calm(self, step: int) -> bool:
        """Whether no streak shows what is late in this step: that is no noise."""
        return not any(since <= step <= until for since, until in self._struck) and not any(
            streak.since <= step for streak in self.streaks.values()
        )

    def _note(self, late: Sequence[int]) -> list[int]:
        """Notes who exceeded which threshold; returns the ranks (by position) that may be named now."""
        found: set[int] = set()
        highest = max(late)
        for threshold, exceeded in self._exceeded.items():
            limit = threshold.at(self.scale_ns, self.step_ns)
            if highest > limit:
                for index, value in enumerate(late):
                    if value > limit:
                        exceeded.note(index, self._seen)
                        found.add(index)
        if not self.streaks:
            return sorted(found)
        number, ended = self._rows[-1][0], []
        for rank, streak in self.streaks.items():
            streak.add(number, late[self._positions[rank]], self.low_ns)
            if not streak.open:
                ended.append(rank)
        for rank in ended:
            self._forget(self._positions[rank], self.streaks.pop(rank))
        return sorted(index for index in found if self.ranks[index] not in self.streaks)

    def mean_in(self, streak: Streak) -> float:
        """The rank's mean deviation in the late steps of a streak, which another figure of it may show."""
        late = {step for step, _, struck in streak.values if struck}
        index = self._positions[streak.rank]
        found = [row[index] for step, row in self._rows if step in late]
        return sum(found) / len(found) if found else 0.0

    def dismiss(self, streak: Streak) -> None:
        """Forgets a streak that makes nobody late."""
        self._forget(self._positions[streak.rank], self.streaks.pop(streak.rank))

    def _forget(self, index: int, streak: Streak) -> None:
        """What was late in a streak that is over does not name the rank again."""
        self._over[index] = streak.until
        self._struck.append((streak.since, streak.until))
        for exceeded in self._exceeded.values():
            exceeded.keep(index, self._seen, streak.pending)

    def _judge(self, index: int) -> Streak | None:
        """Whether chance does not explain how often this rank was late: in the longest stretch for which that holds.

        Noise is known better with every step. What exceeded a threshold when noise seemed smaller counts only if it
        exceeds half of what the threshold is now.
        """
        for threshold, exceeded in self._exceeded.items():
            mask = exceeded.mask(index, self._seen)
            if not mask & 1 or mask.bit_count() < FEWEST_LATE:
                continue
            counts = alarm_counts(self._clean_rate(threshold, index), len(self.ranks))
            memory = self._memory if threshold in LASTING else 1.0
            if self._alarming(mask, counts, memory) is None:
                continue
            steps = self._alarming(mask & self._late_by(index, threshold), counts, memory)
            if steps is not None:
                return self._start(index, steps, threshold)
        return None

    def _alarming(self, mask: int, counts: Sequence[int], memory: float) -> int | None:
        """The longest stretch of newest steps of which so many were late that chance does not explain it."""
        for window, count in zip(reversed(WINDOWS), reversed(counts), strict=True):
            steps = int(window * memory)
            if steps <= len(self._rows) and (mask & ((1 << steps) - 1)).bit_count() >= count * memory:
                return steps
        return None

    def _late_by(self, index: int, threshold: Threshold) -> int:
        """In which steps the rank exceeds half of a threshold, as it is now: bit 0 is the newest step."""
        limit = threshold.at(self.scale_ns, self.step_ns) / 2
        return sum(1 << age for age, (_, row) in enumerate(reversed(self._rows)) if row[index] > limit)

    def _clean_rate(self, threshold: Threshold, index: int) -> float:
        """How often a rank like the others exceeds a threshold: as often as the median of them has."""
        seen, others = len(self._rows), len(self.ranks) - 1
        exceeded = self._median_count(threshold, index)
        weight = others * seen
        rate = (exceeded * others + threshold.clean * CLEAN_WEIGHT) / (weight + CLEAN_WEIGHT)
        return max(threshold.floor, rate)

    def _median_count(self, threshold: Threshold, index: int) -> int:
        ranks = len(self.ranks)
        if ranks > MANY_RANKS:
            if threshold not in self._typical:
                self._typical[threshold] = _middle(self._exceeded[threshold].masks(self._seen).values(), ranks)
            return self._typical[threshold]
        masks = self._exceeded[threshold].masks(self._seen)
        return _middle((mask for other, mask in masks.items() if other != index), ranks - 1)

    def _find_rhythm(self) -> Streak | None:
        """Whether the rank that is late most often is so in a rhythm, by more than noise of any size explains."""
        counts = {index: mask.bit_count() for index, mask in self._exceeded[LOW].masks(self._seen).items()}
        free = [index for index in counts if self.ranks[index] not in self.streaks]
        index = max(free, key=counts.__getitem__, default=None)
        if index is None or counts[index] < RHYTHM_STRUCK:
            return None
        since = self._over.get(index, -1)
        rows = [(step, row[index]) for step, row in islice(reversed(self._rows), RHYTHM_STEPS) if step > since]
        found = rhythm(rows, 4 * self.scale_ns)
        if found is None or found[1] < max(LOW.ns, LOW.share * self.step_ns):
            return None
        return self._open(index, found[1], 1 / found[0])

    def _start(self, index: int, window: int, threshold: Threshold) -> Streak | None:
        """Opens a streak, with the late steps that led to it."""
        limit = threshold.at(self.scale_ns, self.step_ns)
        values = [row[index] for _, row in islice(reversed(self._rows), window)]
        typical = median(value for value in values if value > limit)
        return self._open(index, typical, sum(value > max(self.low_ns, typical / 2) for value in values) / window)

    def _open(self, index: int, typical: float, share: float) -> Streak | None:
        """A new streak, from its first late step on; None if that is too few of them."""
        limit = max(self.low_ns, typical / 2)
        rows = list(islice(self._rows, self._first(index, limit, share), None))
        expected = sum(row[index] > limit for _, row in rows) / len(rows)
        streak = Streak(self.ranks[index], self.step_ns, rows[0][0], rows[0][0], typical, max(expected, share))
        for step, row in rows:
            streak.add(step, row[index], self.low_ns)
        if streak.count < FEWEST_IN_STREAK:
            return None
        streak.open = True
        self.streaks[streak.rank] = streak
        return streak

    def _first(self, index: int, limit: float, share: float) -> int:
        """The row where the streak starts: the score, counted backwards, is greatest there."""
        score = best = 0.0
        first = len(self._rows) - 1
        for back, (step, row) in enumerate(reversed(self._rows)):
            if step <= self._over.get(index, -1):
                break
            late = row[index] > limit
            score += late - share / 2
            if late and score >= best:
                best, first = score, len(self._rows) - 1 - back
            elif best - score >= _end_score(share):
                break
        return first


def _kept(column: Sequence[int | None], limit: float) -> float:
    """The correlation of successive values; None is left out."""
    middle, limit = median(value for value in column if value is not None), max(1.0, limit)
    noise = [None if value is None else min(max(value - middle, -limit), limit) for value in column]
    power = sum(value * value for value in noise if value is not None)
    both = (one * other for one, other in pairwise(noise) if one is not None and other is not None)
    return sum(both) / power if power else 0.0


def _middle(masks: Iterable[int], count: int) -> int:
    """The median of how many steps were late; of ``count`` ranks, those without a mask never were."""
    counts = sorted(map(int.bit_count, masks))
    rank = count // 2 - (count - len(counts))
    return counts[rank] if rank >= 0 else 0
