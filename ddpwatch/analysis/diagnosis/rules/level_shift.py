"""Levels of a whole run, or of a group: since when a figure is higher than usual, until when, and what that costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf

from ddpwatch.analysis.diagnosis.accounts.accounts import EXPOSED, StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCause
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, Severity
from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS, KEEP_ENDED, OVER_SHARE, WORTH_SAYING
from ddpwatch.common.statistics import RollingMedian, median

WINDOW = 16  # newest watched steps
RARELY = 0.1  # of the values before: if more were as high as new ones are, chance explains these
WORTH_A_LOOK = 0.02  # of a step: less input, or exposed transfer, is none
KEEP_STEPS = 64  # watched, that show a level, or what is usual
KEEP_SPLITS = 256  # steps that a spell may have begun before


_Value = tuple[int, float, float]  # step, value at least, at most


class LevelShift:
    """Finds since when a figure is high. It stays so until it has lost that share of what it had risen by at least.

    Args:
        factor: So many times what is usual is high: the median of the values before the newest. What they were now and
            then (`RARELY`) is not. 0: nothing is usual.
        newest: So many values show a level, by their median.
        is_each: Each of these has to show it, as they are few.

    Attributes:
        usual: What was usual before it became high.
        since: The first step in which it was high; None while it is not.
    """

    def __init__(self, factor: float = 0.0, newest: int = WINDOW, is_each: bool = False) -> None:
        self.usual = 0.0
        self.since: int | None = None
        self._factor = factor
        self._count = newest
        self._is_each = is_each
        self._over = 0.0
        self._values: deque[_Value] = deque(maxlen=KEEP_STEPS)
        self._newest = RollingMedian(newest)
        self._before = RollingMedian(KEEP_STEPS - newest)

    def add_value(self, step: int, value: float, least: float = 0.0, usual: float | None = None) -> bool:
        """Takes the next value; returns whether it has become high, or is so no longer.

        Args:
            step: Its step.
            value: At least.
            least: By how much it has to be higher than usual, if that is more than the factor asks for.
            usual: The value at most, where it is not known exactly.
        """
        if self._factor and len(self._values) >= self._count:
            self._before.add_value(self._values[-self._count][2])
        self._values.append((step, value, value if usual is None else usual))
        newest = self._newest
        newest.add_value(value)
        if self.since is not None:
            if (newest.highest if self._is_each else newest.median) >= self._over:
                return False
            self.since = None
            self._values.clear()
            newest.clear()
            return True
        if len(self._before if self._factor else newest) < ENOUGH_STEPS:
            return False
        self.usual = self._before.median if self._factor else 0.0
        limit = max(self._factor * self.usual, self.usual + least)
        level = newest.lowest if self._is_each else newest.median
        if level < limit or (self._factor and (not self.usual or self._before.share_from(level) > RARELY)):
            return False
        self._over = self.usual + OVER_SHARE * (limit - self.usual)
        window = list(islice(reversed(self._values), self._count))
        self.since = (
            self._start(window, level) if self._factor else min(at for at, known, _ in window if known >= limit)
        )
        return True

    def _start(self, window: list[_Value], level: float) -> int:
        """Returns from which step on values, the newest first, are most above what would be no longer high."""
        above, most, start = 0.0, -inf, 0
        for step, value, _ in window:
            above += min(value, level) - self._over  # one that is far above says no more than another
            if above >= most:
                most, start = above, step
        return start

    @property
    def level(self) -> float:
        """The median since it is high."""
        return median(value for step, value, _ in self._values if step >= (self.since or 0))


@dataclass(slots=True)
class Spell:
    """Steps in which a figure is high.

    Attributes:
        usual: What the figure was before.
        unknown_ns: Exposed communication that may be waiting or transfer.
        start_ns, end_ns: From when to when they lasted, on the time line.
        cause: What was found outside the job when it was looked up last, at ``looked_ns``.
        shortage: What was short then, but may have been before.
        phase: In which the figure has grown most, if that is known.
        is_normal: It has been high for so long without a cause that this is usual from now on.
    """

    since: int
    usual: float = 0.0
    until: int = 0
    count: int = 0
    cost_ns: int = 0
    span_ns: int = 0
    unknown_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0
    cause: DeviceCause | None = None
    looked_ns: int = 0
    shortage: DeviceCause | None = None
    phase: str = ""
    is_normal: bool = False

    def cause_by(self, look: Callable[[int, int], DeviceCause | None], every_ns: int = 1) -> DeviceCause | None:
        """Returns what that finds of the steps' time, looked up again only if they have gone on for so long."""
        if self.end_ns - self.looked_ns >= every_ns:
            self.cause, self.looked_ns = look(self.start_ns, self.end_ns), self.end_ns
        return self.cause

    @property
    def share(self) -> float:
        """The account's share of a step."""
        return self.cost_ns / self.span_ns if self.span_ns else 0.0

    @property
    def longer(self) -> float:
        """The share by which a step is longer than usual, where the account has what is longer."""
        return self.cost_ns / self.count / self.usual if self.count and self.usual else 0.0

    @property
    def gain(self) -> float:
        """The share by which a step would be shorter."""
        return 1 - 1 / (1 + self.longer)

    def add_split(self, split: StepSplit, ns: int) -> None:
        """Counts a step, and what the account has of it."""
        self.count += 1
        self.cost_ns += ns
        self.span_ns += split.total
        self.unknown_ns += split.accounts.get(EXPOSED, 0)
        self.until = split.step
        self.start_ns, self.end_ns = self.start_ns or split.start_ns, split.end_ns

    def incident(
        self, kind: Kind, severity: Severity, sentence: Callable[[bool], str], phase: str, is_open: bool
    ) -> Incident:
        """Returns these steps as an incident of all ranks; ``sentence`` says it, of whether it lasts."""
        return Incident(
            kind=kind,
            severity=severity,
            message=sentence(is_open),
            lasting=sentence(True),
            phase=phase,
            since_step=self.since,
            until_step=self.until,
            steps=self.count,
            cost_ns=self.cost_ns,
            gain=self.share,
            open=is_open,
            evidence=Evidence(share_of_step=self.share),
        )


class Spells:
    """Counts what spells cost, also in the steps before they showed.

    Args:
        account: What counts of a step.

    Attributes:
        lasting: The spell that lasts, if one does.
        recent: The newest steps.
    """

    def __init__(self, account: Callable[[StepSplit], int]) -> None:
        self.lasting: Spell | None = None
        self.recent: deque[StepSplit] = deque(maxlen=KEEP_SPLITS)
        self._account = account
        self._over: deque[Spell] = deque(maxlen=KEEP_ENDED)

    def count(self, split: StepSplit) -> None:
        """Takes the next step."""
        if self.lasting is not None:
            self.lasting.add_split(split, self._account(split))
        self.recent.append(split)

    def start(self, since: int, usual: float = 0.0) -> None:
        """Starts a spell, whose first steps may be over."""
        self.lasting = spell = Spell(since, usual)
        for before in self.recent:
            if since <= before.step:
                spell.add_split(before, self._account(before))

    def follow(self, level: LevelShift) -> None:
        """Starts a spell with a level that has become high, or ends the one that lasts."""
        if level.since is None:
            self.end()
        else:
            self.start(level.since, level.usual)

    def end(self) -> None:
        """Ends the spell that lasts."""
        if self.lasting is not None:
            self._over.append(self.lasting)
        self.lasting = None

    def spells(self, is_explained: Callable[[int, bool], bool] | None = None) -> Iterator[tuple[Spell, bool]]:
        """Yields spells that take something of their steps, and whether they last.

        Args:
            is_explained: Says of a spell, by its first step and whether it lasts, that something else is why.
        """
        for spell in (*self._over, *([] if self.lasting is None else [self.lasting])):
            if spell.share < WORTH_SAYING:  # a long pause may lie among its steps
                continue
            if is_explained is None or not is_explained(spell.since, spell is self.lasting):
                yield spell, spell is self.lasting


class HighShare(Spells):
    """Finds spells as steps come, in which an account's share of a step is high.

    Args:
        least: A share that is high.
        account: What the account has of a step.
    """

    def __init__(self, least: float, account: Callable[[StepSplit], int]) -> None:
        super().__init__(account)
        self._least = least
        self._level = LevelShift()

    def add_split(self, split: StepSplit, judged_ns: int | None) -> None:
        """Takes the next step, and what counts of the account in it; None if it is not to be judged."""
        if judged_ns is not None and self._level.add_value(split.step, judged_ns / split.total, self._least):
            self.follow(self._level)
        self.count(split)

    def incidents(
        self, kind: Kind, phase: str, warning_share: float, sentence: Callable[[float, bool], str]
    ) -> list[Incident]:
        """Returns what lasts, and what is over.

        Args:
            kind: Of all of them.
            phase: Theirs.
            warning_share: From which share of a step on one is a warning.
            sentence: Says it, of a share of a step, and of whether it lasts.
        """
        found = []
        for spell, is_open in self.spells():
            severity: Severity = "warning" if spell.share >= warning_share else "info"
            found.append(spell.incident(kind, severity, partial(sentence, spell.share), phase, is_open))
        return found
