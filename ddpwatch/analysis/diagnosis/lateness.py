"""Which ranks of one group are late beyond noise, in which steps: streaks, found as they happen."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from math import ceil, exp, log
from operator import mul, sub
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.change import CHANGE_EVERY, CHANGE_STEPS, change
from ddpwatch.analysis.diagnosis.noise import (
    CLEAN_WEIGHT,
    FALSE_ALARMS,
    FIGURES,
    KEEP_STEPS,
    LASTING,
    LOW,
    RARE,
    THRESHOLDS,
    WINDOWS,
    Threshold,
    alarm_counts,
    deviations,
    lasting,
    memory,
    scale,
)
from ddpwatch.analysis.diagnosis.onset import onset
from ddpwatch.analysis.diagnosis.streak import (
    MOST_RHYTHM,
    OFTEN,
    RHYTHM_LIKELY,
    RHYTHM_STRUCK,
    RHYTHMS,
    Rhythm,
    Streak,
    likely_share,
    newest_run,
    rhythm,
    shift,
)

POOLED = 128  # newest deviations, over all ranks: what the scale of noise is estimated from
SETTLE = 64  # newest steps: what the duration of a step is estimated from
SCALE_EVERY = 8  # steps
FEWEST = 5  # steps, before anything is judged
FEWEST_LATE = 4  # late steps, to name a rank
FEWEST_IN_STREAK = 3  # of them, that are about as late as is typical: a single one is no streak
MEMORY_AFTER = 16  # newest steps that do not count for how long noise lasts: a fault may have started in them
CALM_STEPS = 64  # the same, of half as many steps at most; and steps that show well how long noise lasts
MEMORY_STEPS = 128
KEEP_STRUCK = 32
OUTLIER = 4.0  # times what is typical of a streak: such a late step is not one of it
LOOK_BACK = (6, 8, 12, 16, 24, 32, 48, 64)  # late steps of a streak: since when they come is then known better
MEMORY_EVERY = 16  # steps
MOST_COMPARED = 16  # ranks whose noise shows how long it lasts
ASSUMED_MEMORY = 6.0  # before it is known
MANY_RANKS = 16  # among so many, one more or less does not change a median
# Newest watched steps in which a rhythm, or a shift, is looked for, and every how many of them
RHYTHM_LOOKS = {64: 8, 128: 16, 256: 32, 512: 64}
SHIFT_LOOKS = {8: 4, 16: 8, 32: 8, 64: 8, 128: 16, 256: 32, 512: 64}
LOOK_EVERY = min(*RHYTHM_LOOKS.values(), *SHIFT_LOOKS.values())
SHIFT_BEFORE = 128  # newest steps before these that show how large noise is, of two ranks
FEWEST_BEFORE = 32
SHIFT_OFTEN = 1.25  # times as often late as others is a rank that is looked at
PINELIS = 2 * exp(3) / 9  # by what a self-normalised sum exceeds a normal distribution's tail at most
RHYTHM_CLIP = 3.0  # standard deviations: no step counts for more, so that the mean of a few is nearly normal
MOST_RHYTHMIC = 4  # of many ranks, those that are late most often
BIAS_STEPS = 32  # newest steps: what clocks of several hosts seem to be off by
_ALL = (1 << KEEP_STEPS) - 1
_NO_END = 1 << 62
_UNKNOWN = (None,) * MOST_COMPARED


class _Row(NamedTuple):
    """A watched step: by how much each rank (by position) is late beyond the clocks' error, and as clocks show it."""

    step: int
    late: array[int]
    measured: array[int]
    error_ns: int


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

    How large noise is, how long it lasts, and what a typical step is, is estimated now and then, and worked out only if
    a deviation is large enough to matter: mostly none is.

    Attributes:
        ranks: Its members, in ascending order.
        streaks: The open ones, by rank.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.streaks: dict[int, Streak] = {}
        self._sized = 0  # when the size of noise and the typical step were estimated last
        self._scale_ns: float | None = None  # once it was needed
        self._step_ns: float | None = None  # once it was needed
        self._limits: list[tuple[float, _Exceeded]] = []  # of the thresholds, ascending; once they were needed
        self._rows: deque[_Row] = deque(maxlen=KEEP_STEPS)
        self._bias: Sequence[float] = ()  # by position, what clocks seem to add; empty without an error
        self._exceeded = {threshold: _Exceeded() for threshold in THRESHOLDS}
        self._noisy = self._exceeded  # the same of what is known of noise: without the bias, but with the error
        self._positions = {rank: index for index, rank in enumerate(ranks)}
        self._durations: deque[int] = deque(maxlen=SETTLE + SCALE_EVERY)
        self._typical: dict[Threshold, int] = {}
        self._seen = 0
        self._memory = ASSUMED_MEMORY  # how many steps noise lasts
        self._calm = 0  # of how many steps that is known
        self._memory_due = 0  # when that was to be estimated, if it has not been
        self._struck: deque[tuple[int, int]] = deque(maxlen=KEEP_STRUCK)  # first and last steps of newest streaks
        self._over: dict[int, int] = {}  # by position, the end of the rank's streak before
        self._changed: list[Streak] = []  # in the newest step, what streaks became

    def add(self, step: int, launches: Sequence[int], step_ns: int, error_ns: int = 0) -> list[Streak]:
        """Takes when each rank launched the step's last bucket, within an error, and how long the step was.

        Returns:
            The streaks that start to show with this step.
        """
        late = measured = array("q", deviations(launches))
        if error_ns:  # what clocks of several hosts leave open is nobody's lateness
            late = array("q", [max(0, value - error_ns) + min(0, value + error_ns) for value in measured])
        self._durations.append(step_ns)
        self._rows.append(_Row(step, late, measured, error_ns))
        if error_ns and not self._bias:
            self._noisy = {threshold: _Exceeded() for threshold in THRESHOLDS}
            self._bias = [0.0] * len(self.ranks)
        seen = self._seen = self._seen + 1  # the rows that are kept do not grow for ever
        if seen % SCALE_EVERY == 0 or seen <= 2 * FEWEST:
            self._estimate_size()
        if seen % MEMORY_EVERY == 0:
            self._memory_due = seen
            if self.streaks or self._struck:  # which rows are calm changes with them
                self._estimate_memory()
        if self._bias:
            self._note_noise(measured)
        if seen % LOOK_EVERY and not self.streaks and not self._matters(max(late)):
            return []
        self._typical.clear()
        self._changed.clear()
        candidates = self._note(late)
        if len(self._rows) < FEWEST:
            return []
        found = self._changed + [streak for index in candidates if (streak := self._judge(index)) is not None]
        if self._seen % LOOK_EVERY == 0 and (rhythmic := self._find_rhythm() or self._find_shift()) is not None:
            found.append(rhythmic)
        return found

    def _estimate_size(self) -> None:
        """Noise is estimated from the newest rows: these, and not those that come until it is worked out."""
        self._sized, self._scale_ns, self._step_ns = self._seen, None, None
        self._limits = []
        if self._bias:
            self._bias = self._estimate_bias(self._rows[-1].error_ns)

    def _estimate_bias(self, error_ns: int) -> list[float]:
        """By how much each rank always differs from the others, as far as the clocks' error explains it."""
        rows = [row.measured for row in islice(reversed(self._rows), BIAS_STEPS)]
        usual = list(map(median, zip(*rows, strict=True)))
        middle = median(usual)
        return [max(-error_ns, min(error_ns, value - middle)) for value in usual]

    def _matters(self, late_ns: float) -> bool:
        """Whether a deviation may be above a limit, however small noise is."""
        return late_ns > LOW.ns and late_ns > LOW.at(0.0, self.step_ns)

    @property
    def step_ns(self) -> float:
        """A typical step."""
        if self._step_ns is None:
            ago = self._seen - self._sized
            self._step_ns = median(islice(reversed(self._durations), ago, ago + SETTLE))
        return self._step_ns

    @property
    def scale_ns(self) -> float:
        """The standard deviation of noise."""
        if self._scale_ns is None:
            self._estimate_memory()
            ago = self._seen - self._sized
            self._scale_ns = self._scale(ago)
            if self._calm and self._memory > 1:  # of noise that lasts, these rows show a part
                self._scale_ns = max(self._scale_ns, self._changes(ago) * (self._memory + 1) ** 0.5 / 2)
        return self._scale_ns

    @property
    def low_ns(self) -> float:
        """Deviations above this are late, as far as noise goes."""
        return LOW.at(self.scale_ns, self.step_ns)

    def _known_limits(self) -> list[tuple[float, _Exceeded]]:
        if not self._limits:
            scale_ns, step_ns = self.scale_ns, self.step_ns
            self._limits = [(at.at(scale_ns, step_ns), exceeded) for at, exceeded in self._exceeded.items()]
        return self._limits

    def _scale(self, ago: int) -> float:
        """The standard deviation of noise, from the rows that were the newest so many steps ago."""
        rows = list(islice(reversed(self._rows), ago, ago + max(1, POOLED // len(self.ranks))))
        if len(self.ranks) == 2:
            return scale([row.measured[0] for row in rows])
        if self._bias:
            return scale([int(value) for row in rows for value in map(sub, row.measured, self._bias)])
        values = [value for row in rows for value in row.measured if value]
        alike = len(rows) * (len(self.ranks) - 1) - len(values)  # with the median rank, which shows no noise
        return scale(values + [0] * alike)

    def _changes(self, ago: int) -> float:
        """The standard deviation of what changes from a row to the next."""
        rows = list(islice(reversed(self._rows), ago, ago + 1 + max(1, POOLED // len(self.ranks))))
        pairs = pairwise(row.measured[:1] if len(self.ranks) == 2 else row.measured for row in rows)
        return scale([change for one, other in pairs for change in map(sub, one, other)])

    def _estimate_memory(self) -> None:
        """How many successive steps noise makes alike: 1 if each step is independent of the one before."""
        if not self._memory_due:
            return
        ago = self._seen - self._memory_due
        rows = self._calm_rows(ago)
        count = sum(row is not None for row in rows)
        if count >= MEMORY_AFTER:
            limit = 4 * self._scale(ago)
            ranks = 1 if len(self.ranks) == 2 else min(len(self.ranks), MOST_COMPARED)
            columns = zip(*[_UNKNOWN[:ranks] if row is None else row[:ranks] for row in rows], strict=True)
            self._memory = memory(median(_kept(column, limit) for column in columns), count)
            self._calm = count
        self._memory_due = 0

    def _calm_rows(self, ago: int) -> list[array[int] | None]:
        """The rows before those newest then, newest first; None for a step of a streak, which shows more than noise."""
        newest = max(MEMORY_AFTER, min(CALM_STEPS, (self._seen - ago) // 2))
        rows = list(islice(reversed(self._rows), ago + newest, ago + newest + MEMORY_STEPS))
        first = rows[-1].step if rows else 0
        struck = [(since, until) for since, until in self._struck if until >= first]
        struck += [(streak.since, _NO_END) for streak in self.streaks.values()]
        if not struck:
            return [row.measured for row in rows]
        return [None if any(since <= row.step <= until for since, until in struck) else row.measured for row in rows]

    def _note_noise(self, measured: Sequence[int]) -> None:
        """Notes who exceeded which threshold by noise: clocks hide that of some ranks, and not that of others."""
        noise = list(map(sub, measured, self._bias))
        if self._matters(max(noise)):
            for (limit, _), exceeded in zip(self._known_limits(), self._noisy.values(), strict=True):
                for index, value in enumerate(noise):
                    if value > limit:
                        exceeded.note(index, self._seen)

    def _note(self, late: Sequence[int]) -> list[int]:
        """Notes who exceeded which threshold; returns the ranks (by position) that may be named now."""
        found: list[int] = []
        if self._matters(max(late)):
            limits = self._known_limits()
            found = [at for at, value in enumerate(late) if value > limits[0][0]]
            for limit, exceeded in limits:
                for index in found:
                    if late[index] > limit:
                        exceeded.note(index, self._seen)
        if not self.streaks:
            return found
        number, low = self._rows[-1].step, self.low_ns
        for rank, streak in list(self.streaks.items()):
            struck = streak.add(number, late[self._positions[rank]], low)
            if not streak.open:
                del self.streaks[rank]
                if not streak.shifted or not self._goes_on(streak):
                    self._forget(self._positions[rank], streak, streak.until)
                continue
            if struck and streak.count in LOOK_BACK and streak.count < OFTEN * streak.watched:
                self._look_back(streak)
            if struck and streak.count % CHANGE_EVERY == 0 and self.streaks[rank] is streak:
                self._look_for_a_change(streak)
            if late[self._positions[rank]] > OUTLIER * streak.typical_ns and self.streaks[rank] is streak:
                self._look_for_outliers(streak)
        return [index for index in found if self.ranks[index] not in self.streaks]

    def _look_back(self, streak: Streak) -> None:
        """More late steps of a rank that is late now and then may show that it was late before, too."""
        again = self._open(self._positions[streak.rank], streak.typical_ns, streak.rhythm)
        if again is None or not again.lasts or again.since >= streak.since:
            self.streaks[streak.rank] = streak
        else:
            again.named, again.changed = streak.named, streak.changed

    def _goes_on(self, streak: Streak) -> bool:
        """Whether a rank that is no longer late in every step has been late now and then since: that is one streak."""
        index, low = self._positions[streak.rank], self.low_ns
        values = [row.late[index] for row in self._rows if row.step >= streak.since and row.late[index] > low]
        again = self._open(index, median(values), self._rhythm(index, KEEP_STEPS, RHYTHM_LIKELY)) if values else None
        if again is not None and again.lasts and again.since <= streak.until < again.until:
            again.named, again.changed = streak.named, streak.changed
            return True
        self.streaks.pop(streak.rank, None)
        return False

    def _look_for_a_change(self, streak: Streak) -> None:
        """If the rank is far later than before, or far more often late, what began then is a streak of its own."""
        newest = islice(reversed(streak.values), streak.pending, CHANGE_STEPS)
        values = list(newest)[::-1]
        since = change(values, self.low_ns) if values else None
        if since is None or (self._bias and self._shows_better(values, since)):
            return
        self._change(streak, since, [value for step, value, struck in values if step >= since and struck])

    def _look_for_outliers(self, streak: Streak) -> None:
        """If the rank is several times later again and again than it typically is, that is a streak of its own."""
        index, limit = self._positions[streak.rank], OUTLIER * streak.typical_ns
        threshold = next((at for at in reversed(THRESHOLDS) if at.at(self.scale_ns, self.step_ns) <= limit), None)
        rows = [row for row in reversed(self._rows) if row.step > self._over.get(index, -1)]
        mask = sum(1 << age for age, row in enumerate(rows) if row.late[index] > limit)
        if threshold is None or mask.bit_count() < FEWEST_LATE:
            return
        counts = alarm_counts(self._clean_rate(threshold, index), len(self.ranks))
        steps = self._alarming(mask, counts, self._lasts(threshold))
        if steps is not None:
            late = [row for row in rows[:steps] if row.late[index] > limit]
            self._change(streak, late[-1].step, [row.late[index] for row in late])

    def _change(self, streak: Streak, since: int, late: Sequence[int]) -> None:
        """Ends a streak, and starts another one that is so late, from that step on."""
        index = self._positions[streak.rank]
        before, self._over[index] = self._over.get(index, -1), since - 1
        changed = self._open(index, median(late)) if late else None
        if changed is None:
            self._over[index] = before
            return
        changed.changed = True
        streak.end_before(since)
        if not streak.dissolved:
            self._struck.append((streak.since, streak.until))
        self._changed.append(changed)

    def _shows_better(self, values: Sequence[tuple[int, int, bool]], since: int) -> bool:
        """Whether a rank's deviations grow because clocks are known better from that step on."""
        errors = {row.step: row.error_ns for row in self._rows}
        before, after = (
            [(value, errors[step]) for step, value, _ in values if (step >= since) == late] for late in (False, True)
        )
        (was, error), (became, rest) = (map(fmean, zip(*stretch, strict=True)) for stretch in (before, after))
        return became - was < 2 * (error - rest)

    def mean_in(self, streak: Streak) -> float:
        """The rank's mean deviation in the late steps of a streak, which another figure of it may show.

        At least: the clocks may be off by the same in all of them.
        """
        late = {step for step, _, struck in streak.values if struck}
        index = self._positions[streak.rank]
        found = [row.measured[index] - row.error_ns for row in self._rows if row.step in late]
        return sum(found) / len(found) if found else 0.0

    def set_aside(self, streak: Streak) -> None:
        """Drops a streak that makes nobody late, as far as is known: later steps may show that it does."""
        self._keep_late(self._positions[streak.rank], self.streaks.pop(streak.rank).until)

    def dismiss(self, streak: Streak) -> None:
        """Forgets a streak that another figure shows better."""
        self._forget(self._positions[streak.rank], self.streaks.pop(streak.rank), streak.until)

    def release(self, rank: int, until: int) -> None:
        """What comes after a step may name a rank again; what came up to it, or is a streak by then, does not."""
        if (index := self._positions.get(rank)) is None:
            return
        if (streak := self.streaks.pop(rank, None)) is not None:
            self._forget(index, streak, until)
        else:
            self._over[index] = max(until, self._over.get(index, -1))

    def _forget(self, index: int, streak: Streak, until: int) -> None:
        """What was late in a streak that is over does not name the rank again."""
        self._over[index] = until
        self._struck.append((streak.since, streak.until))
        self._keep_late(index, until)

    def _keep_late(self, index: int, until: int) -> None:
        """What was late up to a step names the rank no more."""
        since = self._steps_after(until)
        for exceeded in self._exceeded.values():
            exceeded.keep(index, self._seen, since)

    def _steps_after(self, step: int) -> int:
        """How many of its steps came after one."""
        return sum(1 for _ in takewhile(lambda row: row.step > step, reversed(self._rows)))

    def _judge(self, index: int) -> Streak | None:
        """Whether chance does not explain how often this rank was late: in the longest stretch for which that holds.

        Noise is known better with every step. What exceeded a threshold when noise seemed smaller counts only if it
        exceeds half of what the threshold is now.
        """
        fresh = self._fresh(index)
        for threshold, exceeded in self._exceeded.items():
            mask = exceeded.mask(index, self._seen) & fresh
            if not mask & 1 or mask.bit_count() < FEWEST_LATE:
                continue
            counts = alarm_counts(self._clean_rate(threshold, index), len(self.ranks))
            self._estimate_memory()
            lasts = self._lasts(threshold)
            if self._alarming(mask, counts, lasts) is None:
                continue
            steps = self._alarming(mask & self._late_by(index, threshold), counts, lasts)
            if steps is not None:
                return self._start(index, steps, threshold)
        return self._find_run(index, fresh)

    def _fresh(self, index: int) -> int:
        """The steps since the rank's streak before: bit 0 is the newest one."""
        over = self._over.get(index, -1)
        if not self._rows or over < self._rows[0].step:
            return _ALL
        return (1 << self._steps_after(over)) - 1

    def _find_run(self, index: int, fresh: int) -> Streak | None:
        """The rank's streak if it was late in each of the newest steps of a rhythm, which chance does not explain."""
        for threshold in RARE:
            mask = self._exceeded[threshold].mask(index, self._seen) & fresh
            if not mask & 1 or mask.bit_count() < FEWEST_LATE:
                continue
            least = ceil(run_length(self._clean_rate(threshold, index), len(self.ranks)) * self._lasts(threshold))
            if mask.bit_count() < least or newest_run(mask, self._numbers(), least) is None:
                continue
            if (run := newest_run(mask & self._late_by(index, threshold), self._numbers(), least)) is not None:
                (period, steps), newest = run, self._rows[-1].step
                rows = islice(reversed(self._rows), steps)
                late_ns = median(row.late[index] for row in rows if (newest - row.step) % period == 0)
                return self._open(index, late_ns, Rhythm(period, newest % period, late_ns, 0.0))
        return None

    def _numbers(self) -> Iterator[int]:
        """The numbers of its steps, newest first."""
        return (row.step for row in reversed(self._rows))

    def _lasts(self, threshold: Threshold) -> float:
        """For how many successive steps noise exceeds a threshold."""
        if threshold not in LASTING:
            return 1.0
        return lasting(self._memory, threshold.deviations) if self._calm >= CALM_STEPS else self._memory

    def _alarming(self, mask: int, counts: Sequence[int], lasts: float) -> int | None:
        """The longest stretch of newest steps of which so many were late that chance does not explain it."""
        for window, count in zip(reversed(WINDOWS), reversed(counts), strict=True):
            steps = int(window * lasts)
            if steps <= len(self._rows) and (mask & ((1 << steps) - 1)).bit_count() >= count * lasts:
                return steps
        return None

    def _late_by(self, index: int, threshold: Threshold) -> int:
        """In which steps the rank exceeds half of a threshold, as it is now: bit 0 is the newest step."""
        limit = threshold.at(self.scale_ns, self.step_ns) / 2
        return sum(1 << age for age, row in enumerate(reversed(self._rows)) if row.late[index] > limit)

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
                self._typical[threshold] = _middle(self._noisy[threshold].masks(self._seen).values(), ranks)
            return self._typical[threshold]
        masks = self._noisy[threshold].masks(self._seen)
        return _middle((mask for other, mask in masks.items() if other != index), ranks - 1)

    def _find_rhythm(self) -> Streak | None:
        """The rank that is late in a rhythm, by more than noise of any size explains."""
        best: tuple[int, Rhythm] | None = None
        due = [s for s, every in RHYTHM_LOOKS.items() if self._seen % every == 0 and 2 * len(self._rows) > s]
        for index in self._often_late() if due else ():
            for steps in due:
                found = self._rhythm(index, steps, rhythm_sure(len(self.ranks)))
                if found is not None and (best is None or found.sure > best[1].sure):
                    best = index, found
        return None if best is None else self._open(best[0], best[1].late_ns, best[1])

    def _often_late(self) -> list[int]:
        """The ranks, by position, that may have a rhythm or a shift; of many, those that are late most often."""
        counts = {index: mask.bit_count() for index, mask in self._exceeded[LOW].masks(self._seen).items()}
        free = [at for at, count in counts.items() if count >= RHYTHM_STRUCK and self.ranks[at] not in self.streaks]
        return sorted(free, key=counts.__getitem__)[-MOST_RHYTHMIC:] if len(self.ranks) > MANY_RANKS else free

    def _find_shift(self) -> Streak | None:
        """The rank that is later than the others on average, by more than noise of any size explains."""
        best: tuple[int, Rhythm] | None = None
        due = [s for s, every in SHIFT_LOOKS.items() if self._seen % every == 0 and len(self._rows) >= s]
        for index in () if self._bias else self._often_late():
            often, mask = SHIFT_OFTEN * self._clean_rate(LOW, index), self._exceeded[LOW].mask(index, self._seen)
            for steps in due:
                if (mask & ((1 << steps) - 1)).bit_count() < often * steps:
                    continue
                found = self._shift(index, steps)
                if found.sure > (shift_sure(len(self.ranks)) if best is None else best[1].sure):
                    best = index, found
        least = max(LOW.ns, LOW.share * self.step_ns)
        return None if best is None or best[1].late_ns < least else self._open(best[0], best[1].late_ns, best[1])

    def _shift(self, index: int, steps: int) -> Rhythm:
        """By how much a rank was later than the others in so many newest steps, as a rhythm of every step."""
        self._estimate_memory()
        rows = list(islice(reversed(self._rows), steps))
        if not self._calm or rows[-1].step <= self._over.get(index, -1):
            return Rhythm(1, 0, 0.0, 0.0)
        limit = max(RHYTHM_CLIP * self.scale_ns, self.low_ns)
        own = [min(max(row.late[index], -limit), limit) for row in rows]
        if len(self.ranks) == 2:
            before = [row.late[index] for row in islice(reversed(self._rows), steps, steps + SHIFT_BEFORE)]
            power = sum(min(abs(value), limit) ** 2 for value in before)
            variance = power / len(before) if len(before) >= FEWEST_BEFORE else None
        else:
            peers = [at for at in range(min(len(self.ranks), MOST_COMPARED)) if at != index]
            others = [[min(max(row.late[at], -limit), limit) for at in peers] for row in rows]
            means = list(map(fmean, others))
            power = sum((value - mean) ** 2 for values, mean in zip(others, means, strict=True) for value in values)
            variance = power / steps / len(peers) * (len(peers) + 1) / (len(peers) - 1)
            own = list(map(sub, own, means))
        mean, errors = shift(own, variance and max(variance, self.scale_ns**2))
        return Rhythm(1, 0, mean, errors / self._memory**0.5)

    def _rhythm(self, index: int, steps: int, sure: float) -> Rhythm | None:
        """A rank's rhythm in so many newest steps."""
        since = self._over.get(index, -1)
        rows = [(row.step, row.late[index]) for row in islice(reversed(self._rows), steps) if row.step > since]
        found = rhythm(rows, max(RHYTHM_CLIP * self.scale_ns, self.low_ns), sure)
        return found if found is not None and found.late_ns >= max(LOW.ns, LOW.share * self.step_ns) else None

    def _start(self, index: int, window: int, threshold: Threshold) -> Streak | None:
        """Opens a streak, with the late steps that led to it."""
        limit = threshold.at(self.scale_ns, self.step_ns)
        values = [row.late[index] for row in islice(reversed(self._rows), window)]
        typical = median(value for value in values if value > limit)
        found = self._rhythm(index, window, RHYTHM_LIKELY)
        return self._open(index, typical if found is None else found.late_ns, found)

    def _open(self, index: int, typical: float, rhythmic: Rhythm | None = None) -> Streak | None:
        """A new streak, from its first late step on; None if that is too few of them."""
        self._estimate_memory()
        low = self.low_ns
        rows = [row for row in self._rows if row.step > self._over.get(index, -1)]
        on = rows if rhythmic is None else [row for row in rows if rhythmic.strikes(row.step)]
        on = on[-self._onset(index, typical, on, always=rhythmic is not None) :]
        rank, step_ns = self.ranks[index], self.step_ns
        streak = Streak(rank, step_ns, 0, 0, typical, rhythm=rhythmic, named=self._rows[-1].step)
        limit = streak.limit(low)
        late = [row.late[index] > limit for row in on]
        if True not in late:
            return None
        first = late.index(True)
        streak.since = streak.until = on[first].step
        if rhythmic is None:
            streak.expected = likely_share(sum(late), len(late) - first)
        for row in rows:
            if row.step >= streak.since:
                streak.add(row.step, row.late[index], low)
        if streak.count < FEWEST_IN_STREAK:
            return None
        streak.open = True
        self.streaks[streak.rank] = streak
        return streak

    def _onset(self, index: int, late_ns: float, rows: Sequence[_Row], *, always: bool) -> int:
        """For how many of these rows, up to the newest one, the rank is late."""
        values = [row.late[index] for row in reversed(rows)]
        peers = [at for at in range(min(len(self.ranks), MOST_COMPARED)) if at != index]
        noise = [row.late[at] for row in rows for at in peers]
        return onset(values, late_ns, self.scale_ns, noise, always=always)


@lru_cache
def rhythm_sure(ranks: int) -> float:
    """By how many standard errors a rhythm has to show, in a group of so many ranks."""
    looks = sum(1 / every for every in RHYTHM_LOOKS.values())  # per step
    return -NormalDist().inv_cdf(FALSE_ALARMS / 2 / (FIGURES * RHYTHMS * looks * ranks))


@lru_cache
def shift_sure(ranks: int) -> float:
    """By how many standard errors a rank of so many has to be later on average."""
    looks = sum(1 / every for every in SHIFT_LOOKS.values())  # per step
    return -NormalDist().inv_cdf(FALSE_ALARMS / 2 / PINELIS / (FIGURES * looks * ranks))


@lru_cache
def run_length(rate: float, ranks: int) -> int:
    """How many steps of a rhythm in a row exceed a threshold by chance too rarely to matter, in a group of ranks.

    Args:
        rate: How often a step does.
        ranks: How many.
    """
    return ceil(log(FALSE_ALARMS / 2 / (FIGURES * ranks * len(RARE) * (MOST_RHYTHM - 1))) / log(rate))


def _kept(column: Sequence[int | None], limit: float) -> float:
    """The correlation of successive values; None is left out."""
    known = [value for value in column if value is not None]
    middle, limit = median(known), max(1.0, limit)
    noise = [at if -limit <= at <= limit else limit if at > 0 else -limit for at in [one - middle for one in known]]
    power = sum(map(mul, noise, noise))
    if len(known) == len(column):
        both = sum(map(mul, noise, islice(noise, 1, None)))
    else:
        rest = iter(noise)
        holed = [None if value is None else next(rest) for value in column]
        both = sum(one * other for one, other in pairwise(holed) if one is not None and other is not None)
    return both / power if power else 0.0


def _middle(masks: Iterable[int], count: int) -> int:
    """The median of how many steps were late; of ``count`` ranks, those without a mask never were."""
    counts = sorted(map(int.bit_count, masks))
    rank = count // 2 - (count - len(counts))
    return counts[rank] if rank >= 0 else 0
