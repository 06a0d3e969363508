"""Goodput: the share of a job's rank-time that steps took, over all its runs. Pauses, hangs and restarts are the rest.

A step counts unless it is a warm-up, profiled or aborted one, without what ranks pause in it, or hang, and what others
wait for that meanwhile: as the accounts say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from ddpwatch.analysis.diagnosis.accounts.accounts import PAUSED, STUCK_IN
from ddpwatch.analysis.diagnosis.incident import LOST, Account, LostTime
from ddpwatch.analysis.figures import GoodputFigures, RunTime
from ddpwatch.common.units import NS_PER_S, S_PER_HOUR
from ddpwatch.wire.messages import PAUSE_PHASES, Message, Step

PARTS = ("steps", "pauses", "hangs", "startup", "between_runs", "other")
_PAUSES = frozenset((*PAUSE_PHASES.values(), PAUSED[1]))


class RunSpan:
    """Notes from when to when frames of a run came (ns since the Unix epoch), and when its first step started."""

    def __init__(self) -> None:
        self._since_ns = self._until_ns = self._stepped_ns = 0

    def apply_message(self, message: Message, received_ns: int) -> None:
        """Takes a message, and when it was received; 0 if that is not known."""
        if not received_ns:
            return
        if received_ns > self._until_ns:
            self._until_ns = received_ns
        if received_ns < self._since_ns or not self._since_ns:
            self._since_ns = received_ns
        if not self._stepped_ns and isinstance(message, Step):
            self._stepped_ns = received_ns - message.duration_ns
            if message.step > 1:  # whoever records came later
                self._since_ns = self._stepped_ns

    def time(self, lost: LostTime, ranks: int) -> RunTime | None:
        """Returns where the rank-time went; None before the first step."""
        if not self._stepped_ns:
            return None
        parts = Counter[str]()
        for account in lost.accounts:
            parts[_part(account)] += account.ns
        parts["steps"] -= lost.between_steps_ns
        parts["startup"] += ranks * max(0, self._stepped_ns - self._since_ns)
        parts["other"] += max(0, ranks * (self._until_ns - self._since_ns) - parts.total())
        return RunTime(
            since=self._since_ns / NS_PER_S,
            until=self._until_ns / NS_PER_S,
            ranks=ranks,
            seconds={part: max(parts[part], 0) / NS_PER_S for part in PARTS if part != "between_runs"},
            lost_seconds=sum(account.ns for account in lost.accounts if account.name in LOST) / NS_PER_S,
        )


def _part(account: Account) -> str:
    if account.phase in _PAUSES:
        return "pauses"
    if account.phase in STUCK_IN:
        return "hangs"
    if account.name == "other" and account.phase in ("unseen", "aborted", "profiled"):
        return "other"
    return "startup" if account.name == "startup" else "steps"


def goodput(
    runs: Sequence[tuple[str, RunTime]], missing: str | None = None, price: float | None = None
) -> GoodputFigures | None:
    """Returns that of a job; None without a run.

    Args:
        runs: Its runs by their ids, oldest first.
        missing: The run before these, of which nothing is known.
        price: What a rank costs in an hour.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    for _, run in runs:
        for part, value in run.seconds.items():
            seconds[part] += value
    for (_, before), (_, after) in pairwise(runs):
        seconds["between_runs"] += before.ranks * max(0.0, after.since - before.until)
    total, lost = sum(seconds.values()), sum(run.lost_seconds for _, run in runs)
    if not total:
        return None
    return GoodputFigures(
        ratio=seconds["steps"] / total,
        runs=[name for name, _ in runs],
        missing=missing,
        rank_seconds=total,
        seconds=seconds,
        lost_hours=lost / S_PER_HOUR,
        cost=None if price is None else price * total / S_PER_HOUR,
        lost_cost=None if price is None else price * lost / S_PER_HOUR,
    )
