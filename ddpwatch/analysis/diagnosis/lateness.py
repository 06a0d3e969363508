"""Which ranks of one group are late beyond noise, in which steps: streaks, found as they happen."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from ddpwatch.analysis.diagnosis.noise import (
    CLEAN_WEIGHT,
    KEEP_STEPS,
    LOW,
    THRESHOLDS,
    WINDOWS,
    Threshold,
    alarm_count,
    deviations,
    scale,
)

POOLED = 128  # newest deviations, over all ranks: what the scale of noise is estimated from
SETTLE = 64  # newest steps: what the duration of a step is estimated from
SCALE_EVERY = 4  # steps
FEWEST = 5  # steps, before anything is judged
END_SCORE = 4.0  # what a streak may lose before it is over
MOST_STRUCK = 512  # newest struck steps that a streak remembers
MOST_PERIOD = 64
REGULAR = 0.8  # share of the struck steps that fit a period, and of the period's steps that were struck
ENOUGH_STRUCK = 4  # for a period
CONSTANT = 0.7  # share of the steps that were struck, from where on a streak counts as constant
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
        struck: Late steps by number and deviation; the newest `MOST_STRUCK`.
        count: How many late steps there were up to ``until``.
        watched: How many watched steps there were from ``since`` to ``until``.
        open: Whether it lasts.
        typical_ns: Median deviation of its newest late steps.
    """

    rank: int
    step_ns: float
    since: int
    until: int
    typical_ns: float
    expected: float
    struck: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MOST_STRUCK))
    on_time: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_STRUCK))
    count: int = 0
    watched: int = 0
    open: bool = True
    _pending: int = 0  # watched steps since ``until``
    _late: int = 0  # those of them that were late
    _score: float = 0.0
    _best: float = 0.0

    @property
    def share(self) -> float:
        """The share of its watched steps that were late."""
        return self.count / self.watched if self.watched else 0.0

    @property
    def constant(self) -> bool:
        """Whether nearly every step is late."""
        return self.share >= CONSTANT

    def limit(self, low: float) -> float:
        """How late a step has to be, to belong to it."""
        return max(low, self.typical_ns / 2)

    def add(self, step: int, deviation: int, low: float) -> bool:
        """Takes the next watched step; returns whether it was late."""
        self._pending += 1
        late = deviation > self.limit(low)
        if late:
            self.struck.append((step, deviation))
            if len(self.struck) % 4 == 1:
                newest = islice(reversed(self.struck), 32)
                self.typical_ns = median(value for _, value in newest)
        else:
            self.on_time.append(step)
        self._late += late
        self._score += late - self.expected / 2
        if late and self._score >= self._best:
            self._best, self.until = self._score, step
            self.watched, self._pending = self.watched + self._pending, 0
            self.count, self._late = self.count + self._late, 0
        elif self._best - self._score >= END_SCORE:
            self.open = False
        return late

    @property
    def pending(self) -> int:
        """How many watched steps there were since its last late one."""
        return self._pending

    def period(self) -> int | None:
        """Every how many steps it strikes; None if that is not regular."""
        struck = [step for step, _ in self.struck if step <= self.until]
        if self.constant or len(struck) < ENOUGH_STRUCK:
            return None
        return find_period(struck, [step for step in self.on_time if struck[0] <= step <= self.until])


def find_period(struck: Sequence[int], on_time: Sequence[int]) -> int | None:
    """The shortest period that fits the late steps, and the watched steps on time in between; None if none does."""
    for period in range(2, MOST_PERIOD + 1):
        residue, hits = Counter(step % period for step in struck).most_common(1)[0]
        misses = sum(step % period == residue for step in on_time)
        if hits >= max(REGULAR * len(struck), ENOUGH_STRUCK - 1) and hits >= REGULAR * (hits + misses):
            return period
    return None


class GroupLateness:
    """Follows one group's ranks.

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
        self._masks: dict[Threshold, list[int]] = {threshold: [0] * len(ranks) for threshold in THRESHOLDS}
        self._durations: deque[int] = deque(maxlen=SETTLE)
        self._typical: dict[Threshold, int] = {}
        self._over: dict[int, int] = {}  # by position, the end of the rank's streak before

    def add(self, step: int, launches: Sequence[int], step_ns: int) -> list[Streak]:
        """Takes when each rank launched the step's last bucket, and how long the step was.

        Returns:
            The streaks that start to show with this step.
        """
        late = array("q", deviations(launches))
        self.newest = late
        self._durations.append(step_ns)
        self._rows.append((step, late))
        if len(self._rows) % SCALE_EVERY == 0 or len(self._rows) <= 2 * FEWEST:
            self.step_ns = median(self._durations)
            self._estimate_scale()
        self._typical.clear()
        self.low_ns = LOW.at(self.scale_ns, self.step_ns)
        candidates = self._note(late)
        if len(self._rows) < FEWEST:
            return []
        return [streak for index in candidates if (streak := self._judge(index)) is not None]

    def _estimate_scale(self) -> None:
        rows = islice(reversed(self._rows), max(1, POOLED // len(self.ranks)))
        if len(self.ranks) == 2:
            values = [row[0] for _, row in islice(reversed(self._rows), POOLED // 2)]
        else:
            values = [value for _, row in rows for value in row]
        self.scale_ns = scale(values)

    def _note(self, late: Sequence[int]) -> list[int]:
        """Notes who exceeded which threshold; returns the ranks (by position) that may be named now."""
        found: set[int] = set()
        for threshold, masks in self._masks.items():
            limit = threshold.at(self.scale_ns, self.step_ns)
            for index, value in enumerate(late):
                if value > limit:
                    masks[index] = (masks[index] << 1 | 1) & _ALL
                    found.add(index)
                elif masks[index]:
                    masks[index] = masks[index] << 1 & _ALL
        number, ended = self._rows[-1][0], []
        for rank, streak in self.streaks.items():
            streak.add(number, late[self.ranks.index(rank)], self.low_ns)
            if not streak.open:
                ended.append(rank)
        for rank in ended:
            self._forget(self.ranks.index(rank), self.streaks.pop(rank))
        return sorted(index for index in found if self.ranks[index] not in self.streaks)

    def _forget(self, index: int, streak: Streak) -> None:
        """What was late in a streak that is over does not name the rank again."""
        self._over[index] = streak.until
        since = (1 << streak.pending) - 1
        for masks in self._masks.values():
            masks[index] &= since

    def _judge(self, index: int) -> Streak | None:
        """Whether chance does not explain how often this rank was late."""
        seen = len(self._rows)
        for threshold, masks in self._masks.items():
            mask = masks[index]
            probability = self._clean_rate(threshold, index)
            for window in WINDOWS:
                if window > seen:
                    break
                if (mask & ((1 << window) - 1)).bit_count() >= alarm_count(window, probability, len(self.ranks)):
                    return self._start(index, window, threshold)
        return None

    def _clean_rate(self, threshold: Threshold, index: int) -> float:
        """How often a rank like the others exceeds a threshold: as often as the median of them has."""
        seen, others = len(self._rows), len(self.ranks) - 1
        exceeded = self._median_count(threshold, index)
        weight = others * seen
        rate = (exceeded * others + threshold.clean * CLEAN_WEIGHT) / (weight + CLEAN_WEIGHT)
        return max(threshold.floor, rate)

    def _median_count(self, threshold: Threshold, index: int) -> int:
        masks = self._masks[threshold]
        if len(masks) > 16:
            if threshold not in self._typical:
                self._typical[threshold] = sorted(map(int.bit_count, masks))[len(masks) // 2]
            return self._typical[threshold]
        counts = sorted(mask.bit_count() for other, mask in enumerate(masks) if other != index)
        return counts[len(counts) // 2]

    def _start(self, index: int, window: int, threshold: Threshold) -> Streak:
        """Opens a streak, with the late steps that led to it."""
        limit = threshold.at(self.scale_ns, self.step_ns)
        values = [row[index] for _, row in islice(reversed(self._rows), window)]
        typical = median(value for value in values if value > limit)
        share = sum(value > max(self.low_ns, typical / 2) for value in values) / window
        first = self._first(index, max(self.low_ns, typical / 2), share)
        rows = list(islice(self._rows, first, None))
        streak = Streak(self.ranks[index], self.step_ns, rows[0][0], rows[0][0], typical, share)
        for step, row in rows:
            streak.add(step, row[index], self.low_ns)
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
            elif best - score >= END_SCORE:
                break
        return first
