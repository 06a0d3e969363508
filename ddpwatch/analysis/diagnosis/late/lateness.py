"""Which ranks of one group are late beyond noise, in which steps: streaks, found as they happen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import ceil, log
from statistics import fmean, median

from ddpwatch.analysis.diagnosis.late.change import CHANGE_EVERY, CHANGE_STEPS, change
from ddpwatch.analysis.diagnosis.late.group_noise import ALL_STEPS, FEWEST, GroupNoise, WatchedStep
from ddpwatch.analysis.diagnosis.late.noise import (
    FALSE_ALARMS,
    FIGURES,
    KEEP_STEPS,
    RARE,
    THRESHOLDS,
    WINDOWS,
    Threshold,
    at_least,
)
from ddpwatch.analysis.diagnosis.late.onset import onset
from ddpwatch.analysis.diagnosis.late.rhythms import LOOK_EVERY, find_rhythm, rhythm_of
from ddpwatch.analysis.diagnosis.late.shift import find_shift
from ddpwatch.analysis.diagnosis.late.streak import (
    MOST_RHYTHM,
    OFTEN,
    RHYTHM_LIKELY,
    RUN_CHANCE,
    Rhythm,
    Streak,
    likely_share,
    newest_run,
)

FEWEST_LATE = 4  # late steps, to name a rank
FEWEST_IN_STREAK = 3  # of them, that are about as late as is typical: a single one is no streak
LOOK_BACK = (6, 8, 12, 16, 24, 32, 48, 64)  # late steps of a streak: since when they come is then known better


class GroupLateness:
    """Follows one group's ranks, by one figure of each step.

    Attributes:
        ranks: Its members, in ascending order.
        streaks: The open ones, by rank.
        noise: The newest steps, and what noise is in them.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.streaks: dict[int, Streak] = {}
        self.noise = GroupNoise(ranks, self.streaks)
        self._positions = {rank: index for index, rank in enumerate(ranks)}
        self._over: dict[int, int] = {}  # by position, the end of the rank's streak before
        self._changed: list[Streak] = []  # in the newest step, what streaks became

    def add_step(self, step: int, launches: Sequence[int], step_ns: int, error_ns: int = 0) -> list[Streak]:
        """Takes when each rank launched the step's last bucket, within an error, and how long the step was.

        Returns:
            The streaks that start to show with this step.
        """
        noise = self.noise
        late = noise.add_step(step, launches, step_ns, error_ns)
        look = noise.seen % LOOK_EVERY == 0 or noise.matters(max(late))
        if not look and not self.streaks:
            return []
        self._changed.clear()
        candidates = noise.note(late)
        if self.streaks:
            self._follow(step, late)
            candidates = [index for index in candidates if self.ranks[index] not in self.streaks]
        if len(noise.rows) < FEWEST:
            return []
        found = self._changed + [streak for index in candidates if (streak := self._judge(index)) is not None]
        if look and (streak := self._find_rhythm()) is not None:
            found.append(streak)
        return found

    def _follow(self, step: int, late: Sequence[int]) -> None:
        """Lets the open streaks take the step: they go on, end, turn out to have begun earlier, or become others."""
        low = self.noise.low_ns
        for rank, streak in list(self.streaks.items()):
            late_ns, before = late[self._positions[rank]], streak.as_late
            struck = streak.add_step(step, late_ns, low)
            if not streak.open:
                del self.streaks[rank]
                if not streak.shifted or not self._goes_on(streak):
                    self._forget(self._positions[rank], streak, streak.until)
                continue
            if struck and streak.count in LOOK_BACK and streak.count < OFTEN * streak.watched:
                self._look_back(streak)
            if streak.as_late > before and streak.as_late % CHANGE_EVERY == 0 and self.streaks[rank] is streak:
                self._look_for_a_change(streak)
            if late_ns > streak.outlier_ns and self.streaks[rank] is streak:
                self._look_for_outliers(streak)

    def _look_back(self, streak: Streak) -> None:
        """Looks whether more late steps of a rank that is late now and then show that it was late before, too."""
        again = self._open(self._positions[streak.rank], streak.typical_ns, streak.rhythm)
        if again is None or not again.lasts or again.since >= streak.since:
            self.streaks[streak.rank] = streak
        else:
            again.named, again.changed = streak.named, streak.changed

    def _goes_on(self, streak: Streak) -> bool:
        """Returns whether a rank that is no longer late in every step still is now and then: that is one streak.

        If it was late in nearly all steps, and chance does not explain that, it is not.
        """
        index, low = self._positions[streak.rank], self.noise.low_ns
        values = [row.late[index] for row in self.noise.rows if row.step >= streak.since and row.late[index] > low]
        again = self._open(index, median(values), self._rhythm(index, KEEP_STEPS)) if values else None
        if again is not None and again.lasts and again.since <= streak.until < again.until:
            often = streak.count >= OFTEN * streak.watched
            if not often or at_least(streak.count, streak.watched, again.expected) * again.watched > RUN_CHANCE:
                again.named, again.changed = streak.named, streak.changed
                return True
        self.streaks.pop(streak.rank, None)
        return False

    def _look_for_a_change(self, streak: Streak) -> None:
        """Makes a streak of its own of what began when a rank became far later, or far more often late."""
        low = self.noise.low_ns
        limit = streak.limit(low)
        newest = islice(reversed(streak.values), CHANGE_STEPS)
        values = [(step, value, value > limit) for step, value, _ in newest][::-1]
        since = change(values, low)
        if since is None or (self.noise.bias and self._shows_better(values, since)):
            return
        self._change(streak, since, [value for step, value, late in values if step >= since and late])

    def _look_for_outliers(self, streak: Streak) -> None:
        """Makes a streak of its own of a rank that is several times later again and again than it typically is."""
        noise, index, limit = self.noise, self._positions[streak.rank], streak.outlier_ns
        threshold = next((at for at in reversed(THRESHOLDS) if at.at(noise.scale_ns, noise.step_ns) <= limit), None)
        rows = [row for row in reversed(noise.rows) if row.step > self._over.get(index, -1)]
        mask = sum(1 << age for age, row in enumerate(rows) if row.late[index] > limit)
        if threshold is None or mask.bit_count() < FEWEST_LATE:
            return
        counts = noise.alarm_counts(threshold, index)
        steps = self._alarming(mask, counts, noise.lasts(threshold))
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
            self.noise.set_apart(streak)
        self._changed.append(changed)

    def _shows_better(self, values: Sequence[tuple[int, int, bool]], since: int) -> bool:
        """Returns whether a rank's deviations grow because clocks are known better from that step on."""
        errors = {row.step: row.error_ns for row in self.noise.rows}
        before, after = (
            [(value, errors[step]) for step, value, _ in values if (step >= since) == late] for late in (False, True)
        )
        (was, error), (became, rest) = (map(fmean, zip(*stretch, strict=True)) for stretch in (before, after))
        return became - was < 2 * (error - rest)

    def mean_in(self, streak: Streak) -> float:
        """Returns the rank's mean deviation in the late steps of a streak, which another figure of it may show.

        At least: the clocks may be off by the same in all of them.
        """
        late = {step for step, _, struck in streak.values if struck}
        index = self._positions[streak.rank]
        found = [row.measured[index] - row.error_ns for row in self.noise.rows if row.step in late]
        return sum(found) / len(found) if found else 0.0

    def median_in(self, streak: Streak) -> float:
        """Returns by how much the rank is late in the steps of a streak that another figure of it shows."""
        late = None if streak.constant else set(streak.struck)
        index = self._positions[streak.rank]
        steps = (row for row in self.noise.rows if streak.since <= row.step <= streak.until)
        found = [row.late[index] for row in steps if late is None or row.step in late]
        return median(found) if found else 0.0

    def set_aside(self, streak: Streak) -> None:
        """Drops a streak that makes nobody late, as far as is known: later steps may show that it does."""
        self.noise.forget(self._positions[streak.rank], 0, self.streaks.pop(streak.rank).until)

    def dismiss(self, streak: Streak) -> None:
        """Forgets a streak that another figure shows better."""
        self._forget(self._positions[streak.rank], self.streaks.pop(streak.rank), streak.until)

    def release(self, rank: int, until: int) -> None:
        """Lets what comes after a step name a rank again; what came up to it, or is a streak by then, does not."""
        if (index := self._positions.get(rank)) is None:
            return
        if (streak := self.streaks.pop(rank, None)) is not None:
            self._forget(index, streak, until)
        else:
            self._over[index] = max(until, self._over.get(index, -1))

    def _forget(self, index: int, streak: Streak, until: int) -> None:
        """Keeps what was late in a streak that is over from naming the rank again."""
        self._over[index] = until
        self.noise.set_apart(streak)
        self.noise.forget(index, streak.since, until)

    def _judge(self, index: int) -> Streak | None:
        """Returns the longest streak for which chance does not explain how often this rank was late.

        Noise is known better with every step. What exceeded a threshold when noise seemed smaller counts only if it
        exceeds half of what the threshold is now.
        """
        noise, fresh = self.noise, self._fresh(index)
        for threshold, exceeded in noise.exceeded.items():
            mask = exceeded.mask(index, noise.seen) & fresh
            if not mask & 1 or mask.bit_count() < FEWEST_LATE:
                continue
            counts = noise.alarm_counts(threshold, index)
            lasts = noise.lasts(threshold)
            if self._alarming(mask, counts, lasts) is None:
                continue
            steps = self._alarming(mask & noise.late_by(index, threshold), counts, lasts)
            if steps is not None:
                return self._start(index, steps, threshold)
        return self._find_run(index, fresh)

    def _fresh(self, index: int) -> int:
        """Returns the steps since the rank's streak before: bit 0 is the newest one."""
        over = self._over.get(index, -1)
        if not self.noise.rows or over < self.noise.rows[0].step:
            return ALL_STEPS
        return self.noise.after(over)

    def _find_run(self, index: int, fresh: int) -> Streak | None:
        """Returns the rank's streak if each of the newest steps of a rhythm was late, which chance does not explain."""
        noise = self.noise
        for threshold in RARE:
            mask = noise.exceeded[threshold].mask(index, noise.seen) & fresh
            if not mask & 1 or mask.bit_count() < FEWEST_LATE:
                continue
            least = ceil(run_length(noise.clean_rate(threshold, index), len(self.ranks)) * noise.lasts(threshold))
            if mask.bit_count() < least or newest_run(mask, self._numbers(), least) is None:
                continue
            if (run := newest_run(mask & noise.late_by(index, threshold), self._numbers(), least)) is not None:
                (period, steps), newest = run, noise.rows[-1].step
                rows = islice(reversed(noise.rows), steps)
                late_ns = median(row.late[index] for row in rows if (newest - row.step) % period == 0)
                return self._open(index, late_ns, Rhythm(period, newest % period, late_ns, 0.0))
        return None

    def _numbers(self) -> Iterator[int]:
        """Yields the numbers of its steps, newest first."""
        return (row.step for row in reversed(self.noise.rows))

    def _alarming(self, mask: int, counts: Sequence[int], lasts: float) -> int | None:
        """Returns the longest stretch of newest steps of which so many were late that chance does not explain it."""
        for window, count in zip(reversed(WINDOWS), reversed(counts), strict=True):
            steps = int(window * lasts)
            if steps <= len(self.noise.rows) and (mask & ((1 << steps) - 1)).bit_count() >= count * lasts:
                return steps
        return None

    def _find_rhythm(self) -> Streak | None:
        """Returns the streak of a rank late in a rhythm, or else of one that is later than the others on average."""
        for find in (find_rhythm, find_shift):
            best = find(self.noise, self._over)
            if best is not None and (streak := self._open(best[0], best[1].late_ns, best[1])) is not None:
                return streak
        return None

    def _rhythm(self, index: int, steps: int) -> Rhythm | None:
        """Returns the rhythm, in so many newest steps, of a rank that is known to be late."""
        return rhythm_of(self.noise, index, steps, self._over.get(index, -1), RHYTHM_LIKELY)

    def _start(self, index: int, window: int, threshold: Threshold) -> Streak | None:
        """Opens a streak, with the late steps that led to it."""
        limit = threshold.at(self.noise.scale_ns, self.noise.step_ns)
        values = [row.late[index] for row in islice(reversed(self.noise.rows), window)]
        typical = median(value for value in values if value > limit)
        found = self._rhythm(index, window)
        return self._open(index, typical if found is None else found.late_ns, found)

    def _open(self, index: int, typical: float, rhythmic: Rhythm | None = None) -> Streak | None:
        """Returns a new streak, from its first late step on; None if that is too few of them."""
        self.noise.estimate_correlation()
        low = self.noise.low_ns
        rows = [row for row in self.noise.rows if row.step > self._over.get(index, -1)]
        on = rows if rhythmic is None else [row for row in rows if rhythmic.strikes(row.step)]
        on = on[-self._onset(index, typical, on, always=rhythmic is not None) :]
        rank, step_ns = self.ranks[index], self.noise.step_ns
        noise_ns, named = self.noise.scale_ns * self.noise.correlation_time**0.5, self.noise.rows[-1].step
        streak = Streak(rank, step_ns, 0, 0, typical, rhythm=rhythmic, noise_ns=noise_ns, named=named)
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
                streak.add_step(row.step, row.late[index], low)
        if streak.count < FEWEST_IN_STREAK:
            return None
        streak.open = True
        self.streaks[streak.rank] = streak
        return streak

    def _onset(self, index: int, late_ns: float, rows: Sequence[WatchedStep], *, always: bool) -> int:
        """Returns for how many of these rows, up to the newest one, the rank is late."""
        values = [row.late[index] for row in reversed(rows)]
        peers = self.noise.peers(index)
        noise = [row.late[at] for row in rows for at in peers]
        return onset(values, late_ns, self.noise.scale_ns, noise, always=always)


@lru_cache
def run_length(rate: float, ranks: int) -> int:
    """Returns how many steps of a rhythm in a row exceed a threshold by chance too rarely to matter, in a group.

    Args:
        rate: How often a step does.
        ranks: How many.
    """
    return ceil(log(FALSE_ALARMS / 2 / (FIGURES * ranks * len(RARE) * (MOST_RHYTHM - 1))) / log(rate))
