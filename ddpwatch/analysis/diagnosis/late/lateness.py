"""Which ranks of one group are late beyond noise, in which steps: streaks, found as they happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ddpwatch.analysis.diagnosis.late.bets import Bets, onset, threshold
from ddpwatch.analysis.diagnosis.late.residuals import NOISE_EVERY, Residuals, WatchedStep
from ddpwatch.analysis.diagnosis.late.streak import FEWEST_LATE, Streak

CAUTION = 2.0  # powers: until it is known how long noise lasts, two steps may say what one does


class GroupLateness:
    """Follows one group's ranks, by one figure of each step.

    Attributes:
        ranks: Its members, in ascending order.
        streaks: The open ones, by rank.
        residuals: The newest steps, and what noise is in them.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.streaks: dict[int, Streak] = {}
        self.residuals = Residuals(len(ranks))
        self._positions = {rank: index for index, rank in enumerate(ranks)}
        self._threshold = threshold(len(ranks))
        self._bets: dict[int, Bets] = {}  # by position
        self._over: dict[int, int] = {}  # by position, the end of the rank's streak before

    def add_step(self, step: int, launches: Sequence[int], step_ns: int, error_ns: int = 0) -> list[Streak]:
        """Takes when each rank launched the step's last bucket, within an error, and how long the step was.

        Returns:
            The streaks that start to show with this step.
        """
        noise = self.residuals
        row = noise.add_step(step, launches, step_ns, error_ns)
        new, least = noise.new, noise.least_ns(error_ns)
        found: list[Streak] = []
        if self._bets or self.streaks or max(new) > least:
            opened = [streak.since for streak in self.streaks.values()]
            if noise.estimate(min(opened, default=None)):
                self._bets.clear()
            asked = {index for index, value in enumerate(new) if value > least} | self._bets.keys()
            for index in sorted(asked):
                if self.ranks[index] not in self.streaks and (streak := self._judge(index, row)) is not None:
                    found.append(streak)
            for rank, streak in list(self.streaks.items()):
                if streak.named < step:
                    found += self._follow(rank, streak, row)
        noise.keep_noise(
            {
                self._positions[rank]: streak.typical_ns * streak.values[-1].is_late
                for rank, streak in self.streaks.items()
            }
        )
        return found

    def _judge(self, index: int, row: WatchedStep) -> Streak | None:
        """Returns the rank's streak if chance does not explain how late it was."""
        noise, bets = self.residuals, self._bets.setdefault(index, Bets())
        if not bets.add_step(row.step, noise.p_value(index, row.error_ns)):
            del self._bets[index]
            return None
        if noise.new[index] <= noise.least_ns(row.error_ns):
            return None
        capital, rhythm = bets.won()
        if capital < (self._threshold if noise.is_known else self._threshold**CAUTION):
            return None
        chances = noise.p_values(index, self._over.get(index, -1))
        newest = list(reversed(chances))
        since = newest[onset(newest, list(map(chances.__getitem__, newest)), rhythm) - 1]
        return self._start(index, {step: p for step, p in chances.items() if step >= since}, rhythm)

    def _start(
        self,
        index: int,
        chances: Mapping[int, float],
        rhythm: tuple[int, int] | None = None,
        least_ns: float = 0.0,
    ) -> Streak | None:
        """Returns a new streak in these steps, whose p-values are given; None if too few of them are late."""
        rows = [row for row in self.residuals.rows if row.step in chances and row.step > self._over.get(index, -1)]
        if rhythm is not None:
            late = [row for row in rows if row.step % rhythm[0] == rhythm[1]]
        else:
            late = [row for row in rows if row.late[index] > least_ns] or rows
        typical = median(row.late[index] for row in late)
        low, now = self.residuals.late_ns, rows[-1].step
        streak = Streak(self.ranks[index], self.residuals.step_ns, 0, 0, typical, found_in=rhythm, named=now)
        streak.noise_ns = self.residuals.noise_ns(index)
        limit = streak.limit(low)
        since = next((row.step for row in rows if row.late[index] > limit), None)
        if since is None:
            return None
        streak.since = streak.until = since
        for row in rows:
            if row.step >= since:
                streak.add_step(row.step, row.late[index], low, chances[row.step])
        if streak.count < FEWEST_LATE:
            return None
        streak.open = True
        self.streaks[streak.rank] = streak
        self.residuals.hide(index, since)
        self._bets.pop(index, None)
        return streak

    def _follow(self, rank: int, streak: Streak, row: WatchedStep) -> list[Streak]:
        """Lets an open streak take the step: it goes on, ends, or becomes another."""
        index = self._positions[rank]
        p = self.residuals.p_value(index, row.error_ns)
        if self.residuals.seen % NOISE_EVERY == 0:
            streak.noise_ns = self.residuals.noise_ns(index)
        streak.add_step(row.step, row.late[index], self.residuals.late_ns, p)
        if not streak.open:
            self.dismiss(streak)
            return []
        return [] if (later := streak.far_later_since()) is None else self._change(streak, *later)

    def _change(self, streak: Streak, since: int, least_ns: float) -> list[Streak]:
        """Ends a streak, and starts another one of a rank that is late, by so much at least, from that step on."""
        index = self._positions[streak.rank]
        since_then = {seen.step: seen.p for seen in streak.values if seen.step >= since}
        before, self._over[index] = self._over.get(index, -1), since - 1
        changed = self._start(index, since_then, least_ns=least_ns)
        if changed is None:
            self._over[index], self.streaks[streak.rank] = before, streak
            return []
        changed.changed = True
        streak.end_before(since)
        if not streak.dissolved:
            self.residuals.set_apart(streak.since, streak.until)
        return [changed]

    def dismiss(self, streak: Streak, until: int | None = None) -> None:
        """Drops a streak that is over, that another figure shows better, or that makes nobody late, so far."""
        until = streak.until if until is None else until
        index = self._positions[streak.rank]
        self.streaks.pop(streak.rank, None)
        self._over[index] = until
        self._bets.pop(index, None)
        self.residuals.set_apart(streak.since, until)

    def mean_in(self, streak: Streak) -> float:
        """Returns the rank's mean deviation in the late steps of a streak, which another figure of it may show.

        At least: the clocks may be off by the same in all of them.
        """
        late = {seen.step for seen in streak.values if seen.is_late}
        index = self._positions[streak.rank]
        found = [row.measured[index] - row.error_ns for row in self.residuals.rows if row.step in late]
        return sum(found) / len(found) if found else 0.0

    def median_in(self, streak: Streak) -> float:
        """Returns by how much the rank is late in the steps of a streak that another figure of it shows."""
        late = None if streak.constant else set(streak.struck)
        index = self._positions[streak.rank]
        steps = (row for row in self.residuals.rows if streak.since <= row.step <= streak.until)
        found = [row.late[index] for row in steps if late is None or row.step in late]
        return median(found) if found else 0.0

    def release(self, rank: int, until: int) -> None:
        """Lets what comes after a step name a rank again; what came up to it, or is a streak by then, does not."""
        if (index := self._positions.get(rank)) is None:
            return
        if (streak := self.streaks.get(rank)) is not None:
            self.dismiss(streak, until)
        else:
            self._over[index] = max(until, self._over.get(index, -1))
            self._bets.pop(index, None)
