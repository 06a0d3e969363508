"""Residuals of alike ranks: how much later than the median each is, and how unlikely that is of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from math import atan, pi, sqrt
from operator import mul, sub
from statistics import NormalDist, median
from typing import NamedTuple

KEEP_STEPS = 512  # newest watched steps that may turn out to be somebody's doing
MANY_RANKS = 16  # of which that is known: one more or less does not change a median
KNOWN_AS = 48.0  # how many residuals an assumed distribution counts for: so a clear fault is named within some steps
LATE_NS, LATE_SHARE = 1e6, 0.015  # what a rank must be late by, and of a step, to matter: ranks are never quite alike
NOISE_EVERY = 8  # steps
CORRELATION_STEPS = 128  # that show how long noise lasts; not the newest 64 (or half of all): a fault may be in them
CORRELATION_NOTICED = 0.3  # less may be chance in a few steps, and costs few false alarms
FEWEST = 16  # steps, to know how long noise lasts; residuals that a rank late from the first step on is compared with
NORMAL_THIRD = NormalDist().inv_cdf(2 / 3)  # half of the stretch that holds a third of a normal distribution
FAR, FAR_DEVIATIONS = 0.98, 3.5  # that share of Student's t with three degrees of freedom is below
FURTHEST_NS = 1 << 61  # 73 years


class WatchedStep(NamedTuple):
    """A watched step: by how much each rank (by position) is late beyond the clocks' error, and as clocks show it."""

    step: int
    late: Sequence[int]
    measured: Sequence[int]
    error_ns: int


def deviations(launches: Sequence[int]) -> list[int]:
    """Returns how much later than the median rank each rank launched (ns); of two ranks, than the other.

    No more than `FURTHEST_NS`: launches that a file makes up may be further apart than 64 bits reach.
    """
    ordered = sorted(launches)
    if ordered[-1] - ordered[0] > FURTHEST_NS:
        return deviations([min(launch, ordered[0] + FURTHEST_NS) for launch in launches])
    if len(launches) == 2:
        first, second = launches
        return [first - second, second - first]
    middle = ordered[(len(launches) - 1) // 2]
    return [launch - middle for launch in launches]


def tail(z: float) -> float:
    """Returns the chance of so many standard deviations or more: Student's t with three degrees of freedom."""
    y = z / sqrt(3)
    return max(1e-12, 0.5 - (atan(y) + y / (1 + y * y)) / pi)


def spread(ordered: Sequence[float], least: float) -> float:
    """Returns the standard deviation of noise, whatever some of the ascending values are.

    It is that of the shortest stretch that holds a third of them, or more where many lie far above that.
    """
    third = (len(ordered) + 2) // 3
    if third < 2:
        return least * 8
    width, at = min(zip(map(sub, ordered[third - 1 :], ordered), range(len(ordered)), strict=False))
    middle = ordered[at] + width / 2
    far = ordered[int(FAR * (len(ordered) - 1))] - middle
    scale: float = max(least, width / 2 / NORMAL_THIRD, far / FAR_DEVIATIONS)
    return scale * (1 + 8 / len(ordered))


class Residuals:
    """Keeps one group's newest steps, by one figure, and what noise is in them.

    Attributes:
        rows: The newest watched steps, oldest first.
        seen: How many there were.
        late_ns: What a rank must be late by to matter.
        kept: The correlation of successive residuals: what is left of one is not new in the next.
    """

    def __init__(self, count: int) -> None:
        self._compared = min(count, MANY_RANKS)
        self._count = count
        self.rows: deque[WatchedStep] = deque(maxlen=KEEP_STEPS)
        self.seen = 0
        self.late_ns = LATE_NS
        self.step_ns = 0.0
        self.kept = 0.0
        self.is_known = False  # how long noise lasts
        self._before: Sequence[float] = [0.0] * count
        self.new: Sequence[float] = ()
        keep = 2 * KEEP_STEPS // max(1, self._compared - 1)  # so many of all other ranks are compared with
        self._noise = [deque[float](maxlen=keep) for _ in range(self._compared)]
        self._noise_steps = [deque[int](maxlen=keep) for _ in range(self._compared)]  # in which these came
        self._durations: deque[int] = deque(maxlen=64)
        self._sorted: list[list[float]] = [[] for _ in range(self._compared)]
        self._scales: list[float] = []  # of what is new in a step, without a rank's own; the last one is that of all
        self._due = self._correlation_due = 0
        self._struck: deque[tuple[int, int]] = deque(maxlen=32)

    def add_step(self, step: int, values: Sequence[int], step_ns: int, error_ns: int) -> WatchedStep:
        """Takes the next step."""
        late = measured = array("q", deviations(values))
        if error_ns:  # what clocks of several hosts leave open is nobody's lateness
            late = array("q", [max(0, value - error_ns) + min(0, value + error_ns) for value in measured])
        row = WatchedStep(step, late, measured, error_ns)
        self.rows.append(row)
        self.seen += 1
        self._durations.append(step_ns)
        if self.seen % NOISE_EVERY == 0 or self.seen < 2 * NOISE_EVERY:
            self.step_ns = median(self._durations)
            self.late_ns = max(LATE_NS, LATE_SHARE * self.step_ns)
        kept = self.kept
        self.new = _whitened(measured, self._before, kept) if kept else measured
        self._before = measured
        return row

    def least_ns(self, error_ns: int) -> float:
        """Returns what is new in a step of a rank that is late by half of what matters: less counts as on time."""
        return (self.late_ns / 2 + error_ns) * (1 - self.kept)

    def keep_noise(self, late: Mapping[int, float]) -> None:
        """Keeps what is new in the step as noise, but for that of ranks (by position) that are late, by so much."""
        if self.kept and any(late.values()):  # what lateness leaves is no noise
            self._before = before = list(self._before)
            for at, ns in late.items():
                before[at] -= ns
                if self._count == 2:
                    before[1 - at] += ns
        if late and self._count == 2:
            return
        step, new = self.rows[-1].step, self.new
        for at, (noise, steps) in enumerate(zip(self._noise, self._noise_steps, strict=True)):
            if at not in late:
                noise.append(new[at])
                steps.append(step)

    def hide(self, index: int, since: int) -> None:
        """Keeps what a rank has shown since a step out of the noise."""
        for at in range(self._compared) if self._count == 2 else (index,) if index < self._compared else ():
            steps, least = self._noise_steps[at], 0 if at == index else FEWEST
            while len(steps) > least and steps[-1] >= since:
                steps.pop()
                self._noise[at].pop()
        self._due = 0

    def set_apart(self, since: int, until: int) -> None:
        """Keeps steps out of what shows how long noise lasts."""
        self._struck.append((since, until))

    def p_values(self, index: int, after: int) -> dict[int, float]:
        """Returns how often an alike rank is as late as a rank (by position) is in each step after one."""
        found, old = dict[int, float](), 0
        for row in self.rows:
            if row.step > after:
                found[row.step] = self._p_value(index, row.measured[index] - self.kept * old, row.error_ns)
            old = row.measured[index]
        return found

    def p_value(self, index: int, error_ns: int) -> float:
        """Returns the same of the newest step."""
        return self._p_value(index, self.new[index], error_ns)

    def _p_value(self, index: int, new: float, error_ns: int) -> float:
        value = new - self.least_ns(error_ns)
        count, size, most = 0.0, 0, 0.0
        for at, known in enumerate(self._sorted):
            above = len(known) - bisect_left(known, value)
            if at == index or (above > len(known) / 2 and value > 0 and self._count > 2):
                continue  # who is as late in most steps is late, too, and shows no noise
            size += len(known)
            count += above
            most = max(most, known[-1] if known else 0.0)
        scale = self._scale(index)
        if value > 0:  # more of them may be as late than were seen: beyond the latest, their tail is as heavy as 1 / x
            count += sqrt(count) + min(1.0, most / value)
        return min(1.0, (count + KNOWN_AS * tail(value / scale)) / (size + KNOWN_AS))

    def _scale(self, index: int) -> float:
        """Returns the standard deviation of what is new in a step of ranks like this one."""
        return self._scales[min(index, self._compared)]

    def noise_ns(self, index: int) -> float:
        """Returns the standard deviation of what a rank is late by chance: that of two others' difference, if any."""
        if self._count == 2:
            return self._scale(index) / sqrt(1 - self.kept**2)
        one, other = (at for at in range(3) if at != index) if index < 3 else (0, 1)
        return spread(sorted(row.measured[one] - row.measured[other] for row in self.rows), self.late_ns / 2)

    def estimate(self, open_since: int | None) -> bool:
        """Works out what noise is, now and then; returns whether residuals are others now, as noise lasts."""
        if self.seen < self._due:
            return False
        kept = self.kept
        if self.seen >= self._correlation_due:
            self._correlation_due = self.seen + 2 * NOISE_EVERY
            self._estimate_correlation(open_since)
        self._due = self.seen + (NOISE_EVERY if self.seen > 2 * NOISE_EVERY else 1)
        self._sorted = list(map(sorted, self._noise))
        least = self.late_ns * (1 - self.kept) / 2
        scales = [spread(known, least) for known in self._sorted]
        self._scales = [
            median([scale for at, scale in enumerate(scales) if at != index]) for index in range(len(scales) + 1)
        ]
        return self.kept > kept + CORRELATION_NOTICED

    def _estimate_correlation(self, open_since: int | None) -> None:
        newest = min(CORRELATION_STEPS, self.seen) // 2
        rows = list(islice(reversed(self.rows), newest, newest + CORRELATION_STEPS))
        struck = [*self._struck, *([] if open_since is None else [(open_since, 1 << 62)])]
        rows = [row for row in rows if not any(since <= row.step <= until for since, until in struck)]
        if len(rows) < FEWEST:
            return
        self.is_known = True
        columns = list(zip(*[row.measured[: 1 if self._count == 2 else self._compared] for row in rows], strict=True))
        count = len(rows)
        kept = median([correlation(column) for column in columns])
        noticed = kept > CORRELATION_NOTICED
        error = sqrt(max(0.0, 1 - kept**2) / count / len(columns))
        kept += (1 + 3 * kept) / count + error  # and Kendall's bias
        was, self.kept = self.kept, min(kept, 0.95) if noticed else 0.0
        if was != self.kept:
            self._whiten()

    def _whiten(self) -> None:
        """Works out again what was new in the steps that show noise."""
        new: dict[int, Sequence[float]] = {}
        for before, row in pairwise(self.rows):
            measured, old = row.measured[: self._compared], before.measured[: self._compared]
            new[row.step] = _whitened(measured, old, self.kept)
        for at, (noise, steps) in enumerate(zip(self._noise, self._noise_steps, strict=True)):
            kept = [step for step in steps if step in new]
            steps.clear()
            steps.extend(kept)
            noise.clear()
            noise.extend([new[step][at] for step in kept])


def _whitened(measured: Sequence[int], before: Sequence[float], kept: float) -> list[float]:
    """Returns what is new in a step, of which noise keeps a share of the step before."""
    return [value - kept * old for value, old in zip(measured, before, strict=True)]


def correlation(values: Sequence[float]) -> float:
    """Returns that of successive values; none counts for more than four times what is usual."""
    middle = median(values)
    limit = 6 * median([abs(value - middle) for value in values]) or 1.0
    noise = [min(max(value - middle, -limit), limit) for value in values]
    power = sum(map(mul, noise, noise))
    return sum(map(mul, noise, islice(noise, 1, None))) / power if power else 0.0
