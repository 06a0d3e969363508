"""What is new about incidents: which ones have started and ended since the last look, and what they cost in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddpwatch.analysis.diagnosis.incident import LEAST_SHOWN, LOST, Account, Incident, LostTime
from ddpwatch.analysis.diagnosis.kinds import KINDS, Kind
from ddpwatch.analysis.diagnosis.words.account_names import account_in_phase
from ddpwatch.common.text import percent
from ddpwatch.common.units import NS_PER_S

ABSENT_NS = 3_000_000_000  # what is absent for less has not ended: its figure wavers around a threshold
Key = tuple[str, tuple[int, ...], str, int | None]


@dataclass(frozen=True, slots=True)
class News:
    """An incident that started, that ended, or that was over when it was found."""

    incident: Incident
    what: Literal["started", "ended", "over"]

    def text(self, unit: str) -> str:
        """Returns one line; with the cost, in that unit, once it is known for good."""
        message = message_text(self.incident)
        if self.what == "started":
            return message
        return f"{'ended: ' if self.what == 'ended' else ''}{message}; cost {cost_text(self.incident, unit)}"


class IncidentNews:
    """Compares the incidents of one look with those of the look before."""

    def __init__(self) -> None:
        self._known: set[Key] = set()
        self._open: dict[Key, Incident] = {}
        self._absent_ns: dict[Key, int] = {}

    def take_incidents(self, incidents: Sequence[Incident], at_ns: int) -> list[News]:
        """Returns what is new. ``at_ns`` is the time of the look."""
        found = {_key(incident): incident for incident in incidents}
        news = [item for key, incident in found.items() for item in self._one(key, incident, found)]
        for key in [key for key in self._open if key not in found]:
            since_ns = self._absent_ns.setdefault(key, at_ns)
            if at_ns - since_ns >= ABSENT_NS:
                news.append(News(replace(self._open.pop(key), open=False), "ended"))
        self._absent_ns = {key: at for key, at in self._absent_ns.items() if key in self._open and key not in found}
        self._known = {*found, *self._open}
        return news

    def _one(self, key: Key, incident: Incident, found: dict[Key, Incident]) -> list[News]:
        before = key if key in self._open else None
        if key not in self._known:
            gone = (other for other in self._open if other not in found)
            before = next((other for other in gone if _same(self._open[other], incident)), None)
        elif before is None:
            return []
        was = None if before is None else self._open.pop(before)
        if not incident.open:
            return [News(incident, "over" if was is None else "ended")]
        if was is not None and incident.severity == "info":  # what was a warning stays one
            self._open[key] = replace(incident, severity=was.severity)
            return []
        self._open[key] = incident
        return [] if was is not None and was.severity != "info" else [News(incident, "started")]


def _family(kind: Kind) -> str:
    return "late" if KINDS[kind].late else kind


def _key(incident: Incident) -> Key:
    family = _family(incident.kind)
    return family, incident.ranks, "" if family == "late" else incident.phase, incident.since_step


def _same(before: Incident, now: Incident) -> bool:
    """Returns whether an incident goes on under another key: its start was seen later, or a hang has become a pause."""
    if _family(before.kind) == _family(now.kind):
        return before.ranks == now.ranks or "hang" in (before.kind, now.kind)
    return before.kind == "hang" and now.kind == "pause" and (before.ranks == now.ranks or not now.ranks)


# -- texts ---------------------------------------------------------------------------------------------------


def message_text(incident: Incident) -> str:
    """Returns what happened, and the cause outside the job."""
    return incident.message + (f" ({incident.device})" if incident.device else "")


def seconds_text(ns: float) -> str:
    """Returns rank-time in seconds, with three digits."""
    value = ns / NS_PER_S
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def share_text(share: float | None) -> str:
    """Returns a share in percent, with one decimal. An ongoing hang may have cost more than all steps before it."""
    return ">100 %" if share is not None and share > 1 else percent(share, 1)


def cost_text(incident: Incident, unit: str) -> str:
    """Returns ``41 GPU-seconds, 0.8 % of the run``."""
    return f"{seconds_text(incident.cost_ns)} {unit}, {share_text(incident.share)} of the run"


def steps_text(incident: Incident) -> str:
    """Returns ``12–40``; ``12–`` while it is ongoing; a death has one step."""
    since, until = incident.since_step, incident.until_step
    if since is None:
        return "–"
    if incident.open and incident.kind != "death":
        return f"{since}–"
    return f"{since}" if until in (None, since) else f"{since}–{until}"


def account_text(account: Account) -> str:
    """Returns what the time of an account went into."""
    return account_in_phase(account.name, account.rank, account.phase)


def lost_accounts(lost: LostTime) -> list[Account]:
    """Returns the accounts of lost time, largest first."""
    return [account for account in lost.accounts if account.name in LOST]


def lost_text(lost: LostTime, most: int = 3, of: str = "") -> str:
    """Returns ``14.2 % lost: 7.9 % waiting for rank 5 (backward), 2.2 % input``; empty before anything is known.

    Args:
        lost: Where the time went.
        most: How many accounts it names.
        of: Of what the first figure is a share, if that is to be said.
    """
    if not lost.rank_ns:
        return ""
    accounts = lost_accounts(lost)
    total = sum(account.ns for account in accounts)
    parts = [f"{share_text(account.ns / lost.rank_ns)} {account_text(account)}" for account in accounts[:most]]
    named = [part for part, account in zip(parts, accounts, strict=False) if account.ns / lost.rank_ns >= LEAST_SHOWN]
    whole = f"{share_text(total / lost.rank_ns)}{f' of {of}' if of else ''}"
    return f"{whole} lost" + (f": {', '.join(named)}" if named else "")


def waited_for(lost: LostTime) -> dict[int, int]:
    """Returns the rank-time (ns) that all others waited for a rank, by rank."""
    cost: dict[int, int] = {}
    for account in lost.accounts:
        if account.name == "waiting" and account.rank is not None:
            cost[account.rank] = cost.get(account.rank, 0) + account.ns
    return cost
