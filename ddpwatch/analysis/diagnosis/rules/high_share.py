"""An account whose share of a step may be high, as the median of the newest watched steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ddpwatch.analysis.diagnosis.accounts.accounts import EXPOSED, StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCause
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, Severity
from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS, KEEP_ENDED, OVER_SHARE
from ddpwatch.common.statistics import RollingMedian

WINDOW = 16  # newest watched steps
WORTH_A_LOOK = 0.02  # of a step: less input, or exposed transfer, is none


@dataclass(slots=True)
class Spell:
    """Steps in which the share is high.

    Attributes:
        unknown_ns: Exposed communication that may be waiting or transfer.
        start_ns, end_ns: From when to when they lasted, on the time line.
        cause: What was found outside the job when it was looked up last, at ``looked_ns``.
    """

    since: int
    until: int = 0
    count: int = 0
    cost_ns: int = 0
    span_ns: int = 0
    unknown_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0
    cause: DeviceCause | None = None
    looked_ns: int = 0

    def cause_by(self, look: Callable[[int, int], DeviceCause | None]) -> DeviceCause | None:
        """Returns what that finds of the steps' time, looked up again only if they have gone on."""
        if self.looked_ns != self.end_ns:
            self.cause, self.looked_ns = look(self.start_ns, self.end_ns), self.end_ns
        return self.cause

    @property
    def share(self) -> float:
        """What the account has of a step."""
        return self.cost_ns / self.span_ns if self.span_ns else 0.0

    def add_split(self, split: StepSplit, ns: int) -> None:
        """Counts a step, and what the account has of it."""
        self.count += 1
        self.cost_ns += ns
        self.span_ns += split.total
        self.unknown_ns += split.accounts.get(EXPOSED, 0)
        self.until = split.step
        self.start_ns, self.end_ns = self.start_ns or split.start_ns, split.end_ns

    def incident(self, kind: Kind, severity: Severity, message: str, phase: str, is_open: bool) -> Incident:
        """Returns these steps as an incident of all ranks."""
        return Incident(
            kind=kind,
            severity=severity,
            message=message,
            phase=phase,
            since_step=self.since,
            until_step=self.until,
            steps=self.count,
            cost_ns=self.cost_ns,
            gain=self.share,
            open=is_open,
            evidence=Evidence(share_of_step=self.share),
        )


class HighShare:
    """Finds spells as steps come.

    Args:
        least: A share that is high.
        account: What the account has of a step.
    """

    def __init__(self, least: float, account: Callable[[StepSplit], int]) -> None:
        self._least = least
        self._account = account
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._steps: deque[int] = deque(maxlen=WINDOW)
        self._middle = RollingMedian(WINDOW)
        self._splits: deque[StepSplit] = deque(maxlen=4 * WINDOW)
        self._spell: Spell | None = None  # while it lasts
        self._over: deque[Spell] = deque(maxlen=KEEP_ENDED)

    def add_split(self, split: StepSplit, judged_ns: int | None) -> None:
        """Takes the next step, and what counts of the account in it; None if it is not to be judged."""
        if judged_ns is not None and (started := self._add_value(split.step, judged_ns / split.total)) is not None:
            for before in self._splits:
                if started.since <= before.step:
                    started.add_split(before, self._account(before))
        if self._spell is not None:
            self._spell.add_split(split, self._account(split))
        self._splits.append(split)

    def _add_value(self, step: int, value: float) -> Spell | None:
        """Takes a watched step; returns the spell that starts to show with it."""
        self._values.append(value)
        self._steps.append(step)
        self._middle.add_value(value)
        if len(self._values) < ENOUGH_STEPS:
            return None
        newest = self._middle.median
        if self._spell is None and newest >= self._least:
            high = (at for at, found in zip(self._steps, self._values, strict=True) if found >= self._least)
            self._spell = Spell(next(high))
            return self._spell
        if self._spell is not None and newest < OVER_SHARE * self._least:
            self._over.append(self._spell)
            self._spell = None
            for kept in (self._values, self._steps, self._middle):
                kept.clear()
        return None

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
            found.append(spell.incident(kind, severity, sentence(spell.share, is_open), phase, is_open))
        return found

    def spells(self, is_explained: Callable[[int, bool], bool] | None = None) -> Iterator[tuple[Spell, bool]]:
        """Yields spells, and whether they last.

        Args:
            is_explained: Says of a spell, by its first step and whether it lasts, that something else is why.
        """
        for spell in (*self._over, *([] if self._spell is None else [self._spell])):
            if is_explained is None or not is_explained(spell.since, spell is self._spell):
                yield spell, spell is self._spell
