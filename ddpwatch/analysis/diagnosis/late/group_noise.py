"""What noise is in one group, by one figure: how large, how long it lasts, and how often alike ranks go beyond it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise, takewhile
from operator import mul, sub
from statistics import median
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.late.noise import (
    CLEAN_WEIGHT,
    KEEP_STEPS,
    LASTING,
    LOW,
    THRESHOLDS,
    Threshold,
    alarm_counts,
    correlation_time,
    deviations,
    lasting,
    scale,
    without_growth,
)
from ddpwatch.analysis.diagnosis.late.streak import RHYTHM_STRUCK, Streak

POOLED = 128  # newest deviations, over all ranks: what the scale of noise is estimated from
SETTLE = 64  # newest steps: what the duration of a step is estimated from
SCALE_EVERY = 8  # steps
FEWEST = 5  # steps, before anything is judged
CORRELATION_AFTER = 16  # newest steps that do not count for how long noise lasts: a fault may have started in them
UNDISTURBED_STEPS = 64  # the same, of half as many steps at most; and steps that show well how long noise lasts
CORRELATION_STEPS = 128
CORRELATION_EVERY = 16  # steps
ASSUMED_CORRELATION_TIME = 6.0  # before it is known
KEEP_STRUCK = 32
MOST_COMPARED = 16  # ranks whose noise shows how long it lasts, or what is alike
MANY_RANKS = 16  # among so many, one more or less does not change a median
MOST_OFTEN_LATE = 4  # of many ranks, those in which a rhythm or a shift is looked for
CLIP = 3.0  # standard deviations: no step counts for more, so that the mean of a few is nearly normal
BIAS_STEPS = 32  # newest steps: what clocks of several hosts seem to be off by
ALL_STEPS = (1 << KEEP_STEPS) - 1  # a bit for each step that is kept
_NO_END = 1 << 62
_UNKNOWN = (None,) * MOST_COMPARED


class WatchedStep(NamedTuple):
    """A watched step: by how much each rank (by position) is late beyond the clocks' error, and as clocks show it."""

    step: int
    late: array[int]
    measured: array[int]
    error_ns: int


class StepBits:
    """A bit for each of the newest steps, of each rank (by position): bit 0 is the newest step."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}  # bits, and as of which step: shifted only when they are read

    def mask(self, index: int, now: int) -> int:
        """Returns the bits of one rank."""
        bits, noted = self._known.get(index, (0, now))
        return bits << min(now - noted, KEEP_STEPS) & ALL_STEPS

    def masks(self, now: int) -> dict[int, int]:
        """Returns the bits of all ranks that have any."""
        found = {index: self.mask(index, now) for index in self._known}
        self._known = {index: (bits, now) for index, bits in found.items() if bits}
        return {index: bits for index, bits in found.items() if bits}

    def set(self, index: int, now: int, bits: int = 1) -> None:
        """Sets some of a rank's; by default the newest step's."""
        self._known[index] = self.mask(index, now) | bits, now

    def clear(self, index: int, now: int, bits: int) -> None:
        """Clears some of a rank's."""
        self._known[index] = self.mask(index, now) & ~bits, now


class GroupNoise:
    """Keeps one group's newest steps, by one figure, and estimates from them what noise is.

    How large noise is, how long it lasts, and what a typical step is, is estimated now and then, and worked out only if
    a deviation is large enough to matter: mostly none is.

    Attributes:
        ranks: The group's members, in ascending order.
        streaks: Those that are open, by rank: what they show is more than noise.
        rows: The newest watched steps, oldest first.
        seen: How many there were: those that are kept do not grow for ever.
        bias: By position, what clocks seem to add; empty without an error.
        exceeded: Who was late by which threshold, ascending.
        correlation_time: How many steps noise lasts, and
        correlation_rows: Of how many steps that is known; both as of the last `estimate_correlation`.
    """

    def __init__(self, ranks: tuple[int, ...], streaks: Mapping[int, Streak]) -> None:
        self.ranks = ranks
        self.streaks = streaks  # of whoever names the late ones
        self.rows: deque[WatchedStep] = deque(maxlen=KEEP_STEPS)
        self.seen = 0
        self.bias: Sequence[float] = ()
        self.exceeded = {threshold: StepBits() for threshold in THRESHOLDS}
        self.correlation_time = ASSUMED_CORRELATION_TIME
        self.correlation_rows = 0
        self._struck: deque[tuple[int, int]] = deque(maxlen=KEEP_STRUCK)  # first and last steps of newest streaks
        self._sized = 0  # when the size of noise and the typical step were estimated last
        self._scale_ns: float | None = None  # once it was needed
        self._step_ns: float | None = None  # once it was needed
        self._limits: list[tuple[float, StepBits]] = []  # of the thresholds, ascending; once they were needed
        self._noisy = self.exceeded  # the same of what is known of noise: without the bias, but with the error
        self._durations: deque[int] = deque(maxlen=SETTLE + SCALE_EVERY)
        self._typical: dict[Threshold, int] = {}  # of many ranks, in how many steps the median one exceeded it
        self._forgotten = StepBits()  # which steps of a rank show more than noise
        self._correlation_due = 0  # when that was to be estimated, if it has not been

    def add_step(self, step: int, launches: Sequence[int], step_ns: int, error_ns: int) -> array[int]:
        """Takes the next step; returns by how much each rank is late in it, beyond the clocks' error."""
        late = measured = array("q", deviations(launches))
        if error_ns:  # what clocks of several hosts leave open is nobody's lateness
            late = array("q", [max(0, value - error_ns) + min(0, value + error_ns) for value in measured])
        self._durations.append(step_ns)
        self.rows.append(WatchedStep(step, late, measured, error_ns))
        if error_ns and not self.bias:
            self._noisy = {threshold: StepBits() for threshold in THRESHOLDS}
            self.bias = [0.0] * len(self.ranks)
        seen = self.seen = self.seen + 1
        if seen % SCALE_EVERY == 0 or seen <= 2 * FEWEST:
            self._estimate_size()
        if seen % CORRELATION_EVERY == 0:
            self._correlation_due = seen
            if self.streaks or self._struck:  # which rows are undisturbed changes with them
                self.estimate_correlation()
        if self.bias:
            self._note_noise(measured)
        return late

    def note(self, late: Sequence[int]) -> list[int]:
        """Notes who exceeded which threshold in the newest step; returns who exceeded any, by position."""
        self._typical.clear()
        if not self.matters(max(late)):
            return []
        limits = self._known_limits()
        found = [at for at, value in enumerate(late) if value > limits[0][0]]
        for limit, exceeded in limits:
            for index in found:
                if late[index] > limit:
                    exceeded.set(index, self.seen)
        return found

    def _note_noise(self, measured: Sequence[int]) -> None:
        """Notes who exceeded which threshold by noise: clocks hide that of some ranks, and not that of others."""
        noise = list(map(sub, measured, self.bias))
        if self.matters(max(noise)):
            for (limit, _), exceeded in zip(self._known_limits(), self._noisy.values(), strict=True):
                for index, value in enumerate(noise):
                    if value > limit:
                        exceeded.set(index, self.seen)

    def set_apart(self, streak: Streak) -> None:
        """Keeps what a streak showed that is over out of the noise."""
        self._struck.append((streak.since, streak.until))

    def forget(self, index: int, since: int, until: int) -> None:
        """Keeps what a rank exceeded in the steps from one to another out of the noise; it does not count again."""
        bits = self.after(since - 1) & ~self.after(until)
        self._forgotten.set(index, self.seen, bits)
        for exceeded in self.exceeded.values():
            exceeded.clear(index, self.seen, bits)

    def after(self, step: int) -> int:
        """Returns the bits of its steps that came after one."""
        return (1 << sum(1 for _ in takewhile(lambda row: row.step > step, reversed(self.rows)))) - 1

    def peers(self, index: int) -> list[int]:
        """Returns other ranks, by position, whose noise shows what a rank's is like."""
        return [at for at in range(min(len(self.ranks), MOST_COMPARED)) if at != index]

    def matters(self, late_ns: float) -> bool:
        """Returns whether a deviation may be above a limit, however small noise is."""
        return late_ns > LOW.ns and late_ns > LOW.at(0.0, self.step_ns)

    @property
    def step_ns(self) -> float:
        """A typical step."""
        if self._step_ns is None:
            ago = self.seen - self._sized
            self._step_ns = median(islice(reversed(self._durations), ago, ago + SETTLE))
        return self._step_ns

    @property
    def scale_ns(self) -> float:
        """The standard deviation of noise."""
        if self._scale_ns is None:
            self.estimate_correlation()
            ago = self.seen - self._sized
            self._scale_ns = self._scale(ago)
            if self.correlation_rows and self.correlation_time > 1:  # of noise that lasts, these rows show a part
                self._scale_ns = max(self._scale_ns, self._changes(ago) * (self.correlation_time + 1) ** 0.5 / 2)
        return self._scale_ns

    @property
    def kept(self) -> float:
        """The correlation of successive steps, as of the last `estimate_correlation`."""
        return (self.correlation_time - 1) / (self.correlation_time + 1)

    @property
    def fresh_ns(self) -> float:
        """The standard deviation of what is new in a step, and not left of the one before."""
        fresh: float = (1 - self.kept**2) ** 0.5
        return self.scale_ns * fresh

    @property
    def low_ns(self) -> float:
        """Deviations above this are late, as far as noise goes."""
        return LOW.at(self.scale_ns, self.step_ns)

    @property
    def most_ns(self) -> float:
        """No deviation counts for more, where a mean is judged: some steps are outliers."""
        return max(CLIP * self.scale_ns, self.low_ns)

    def late_by(self, index: int, threshold: Threshold) -> int:
        """Returns in which steps a rank exceeds half of a threshold, as it is now: bit 0 is the newest step."""
        limit = threshold.at(self.scale_ns, self.step_ns) / 2
        return sum(1 << age for age, row in enumerate(reversed(self.rows)) if row.late[index] > limit)

    def lasts(self, threshold: Threshold) -> float:
        """Returns for how many successive steps noise exceeds a threshold."""
        if threshold not in LASTING:
            return 1.0
        self.estimate_correlation()
        is_known = self.correlation_rows >= UNDISTURBED_STEPS
        return lasting(self.correlation_time, threshold.deviations) if is_known else self.correlation_time

    def often_late(self) -> list[int]:
        """Returns the ranks, by position, that may have a rhythm or a shift.

        Of many, those that are late most often.
        """
        counts = {index: mask.bit_count() for index, mask in self.exceeded[LOW].masks(self.seen).items()}
        free = [at for at, count in counts.items() if count >= RHYTHM_STRUCK and self.ranks[at] not in self.streaks]
        return sorted(free, key=counts.__getitem__)[-MOST_OFTEN_LATE:] if len(self.ranks) > MANY_RANKS else free

    def clean_rate(self, threshold: Threshold, index: int) -> float:
        """Returns how often a rank like the others exceeds a threshold: as often as the median of them has."""
        return self._clean_rate(threshold, index)[0]

    def alarm_counts(self, threshold: Threshold, index: int) -> tuple[int, ...]:
        """Returns for each window how many of its steps have to exceed a threshold to name a rank."""
        rate, steps = self._clean_rate(threshold, index)
        return alarm_counts(rate, len(self.ranks), steps / (steps + CLEAN_WEIGHT) ** 2)

    def _clean_rate(self, threshold: Threshold, index: int) -> tuple[float, int]:
        """Returns the same, and of how many steps it is known."""
        share, steps = self._median_share(threshold, index)
        rate = (share * steps + threshold.clean * CLEAN_WEIGHT) / (steps + CLEAN_WEIGHT)
        return max(threshold.floor, rate), steps

    def _median_share(self, threshold: Threshold, index: int) -> tuple[float, int]:
        """Returns in what share of its steps the other ranks' median exceeded a threshold, and how many all have.

        The steps of a rank that are forgotten show neither that it did nor that it did not.
        """
        ranks, seen = len(self.ranks), len(self.rows)
        if ranks > MANY_RANKS:
            if threshold not in self._typical:
                self._typical[threshold] = _middle(self._noisy[threshold].masks(self.seen).values(), ranks)
            return self._typical[threshold] / seen, (ranks - 1) * seen
        masks = self._noisy[threshold].masks(self.seen)
        known = {other: self._known_steps(other) for other in range(ranks) if other != index}
        shares = sorted(masks.get(other, 0).bit_count() / steps for other, steps in known.items() if steps)
        return (shares[len(shares) // 2], sum(known.values())) if shares else (0.0, 0)

    def _known_steps(self, index: int) -> int:
        """Returns of how many of the newest steps it is known whether a rank exceeded a threshold by noise."""
        forgotten = 0 if self.bias else self._forgotten.mask(index, self.seen).bit_count()
        return len(self.rows) - forgotten

    def _known_limits(self) -> list[tuple[float, StepBits]]:
        if not self._limits:
            scale_ns, step_ns = self.scale_ns, self.step_ns
            self._limits = [(at.at(scale_ns, step_ns), exceeded) for at, exceeded in self.exceeded.items()]
        return self._limits

    def _estimate_size(self) -> None:
        """Estimates noise from the newest rows: these, and not those that come until it is worked out."""
        self._sized, self._scale_ns, self._step_ns = self.seen, None, None
        self._limits = []
        if self.bias:
            self.bias = self._estimate_bias(self.rows[-1].error_ns)

    def _estimate_bias(self, error_ns: int) -> list[float]:
        """Returns by how much each rank always differs from the others, as far as the clocks' error explains it."""
        rows = [row.measured for row in islice(reversed(self.rows), BIAS_STEPS)]
        usual = list(map(median, zip(*rows, strict=True)))
        middle = median(usual)
        return [max(-error_ns, min(error_ns, value - middle)) for value in usual]

    def _scale(self, ago: int) -> float:
        """Returns the standard deviation of noise, from the rows that were the newest so many steps ago."""
        rows = list(islice(reversed(self.rows), ago, ago + max(1, POOLED // len(self.ranks))))
        if len(self.ranks) == 2:
            return scale(without_growth([row.measured[0] for row in rows]))
        if self.bias:
            return scale([int(value) for row in rows for value in map(sub, row.measured, self.bias)])
        values = [value for row in rows for value in row.measured if value]
        alike = len(rows) * (len(self.ranks) - 1) - len(values)  # with the median rank, which shows no noise
        return scale(values + [0] * alike)

    def _changes(self, ago: int) -> float:
        """Returns the standard deviation of what changes from a row to the next."""
        rows = list(islice(reversed(self.rows), ago, ago + 1 + max(1, POOLED // len(self.ranks))))
        pairs = pairwise(row.measured[:1] if len(self.ranks) == 2 else row.measured for row in rows)
        return scale([change for one, other in pairs for change in map(sub, one, other)])

    def estimate_correlation(self) -> None:
        """Estimates how many successive steps noise makes alike: 1 if each is independent of the one before."""
        if not self._correlation_due:
            return
        ago = self.seen - self._correlation_due
        rows = self._undisturbed_rows(ago)
        count = sum(row is not None for row in rows)
        if count >= CORRELATION_AFTER:
            limit = 4 * self._scale(ago)
            ranks = 1 if len(self.ranks) == 2 else min(len(self.ranks), MOST_COMPARED)
            columns = zip(*[_UNKNOWN[:ranks] if row is None else row[:ranks] for row in rows], strict=True)
            self.correlation_time = correlation_time(median(_kept(column, limit) for column in columns), count)
            self.correlation_rows = count
        self._correlation_due = 0

    def _undisturbed_rows(self, ago: int) -> list[array[int] | None]:
        """Returns the rows before those newest then, newest first.

        None for a step of a streak, which shows more than noise.
        """
        newest = max(CORRELATION_AFTER, min(UNDISTURBED_STEPS, (self.seen - ago) // 2))
        rows = list(islice(reversed(self.rows), ago + newest, ago + newest + CORRELATION_STEPS))
        first = rows[-1].step if rows else 0
        struck = [(since, until) for since, until in self._struck if until >= first]
        struck += [(streak.since, _NO_END) for streak in self.streaks.values()]
        if not struck:
            return [row.measured for row in rows]
        return [None if any(since <= row.step <= until for since, until in struck) else row.measured for row in rows]


def _kept(column: Sequence[int | None], limit: float) -> float:
    """Returns the correlation of successive values; None is left out."""
    known = without_growth([value for value in column if value is not None])
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
    """Returns the median of how many steps were late; of ``count`` ranks, those without a mask never were."""
    counts = sorted(map(int.bit_count, masks))
    rank = count // 2 - (count - len(counts))
    return counts[rank] if rank >= 0 else 0
