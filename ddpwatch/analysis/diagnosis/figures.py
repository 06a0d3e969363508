"""Incidents and accounts with the names and in the units of the JSON (``docs/metrics.md``)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpwatch.analysis.diagnosis.incident import AccountName, Evidence, Kind, Severity


class Figures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some of a run's figures, by name."""

    def as_json(self) -> dict[str, object]:
        """Returns them as what ``json.dumps`` takes."""
        found: dict[str, object] = msgspec.to_builtins(self)
        return found


class AccountFigures(Figures, frozen=True):
    """One of the accounts into which the rank-time goes (`ddpwatch.analysis.diagnosis.incident.Account`)."""

    account: AccountName
    rank: int | None
    phase: str | None
    seconds: float
    share: float | None


class LostFigures(Figures, frozen=True):
    """Where the rank-time went; ``lost_share`` is what the accounts of lost time add up to."""

    rank_seconds: float
    lost_share: float | None
    watched: float | None
    accounts: Sequence[AccountFigures]


class IncidentFigures(Figures, frozen=True):
    """An incident (`ddpwatch.analysis.diagnosis.incident.Incident`); ``param`` is the parameter's name."""

    kind: Kind
    severity: Severity
    ranks: Sequence[int]
    phase: str | None
    param: str | None
    module: int | None
    bucket: int | None
    device: str | None
    since_step: int | None
    until_step: int | None
    steps: int
    period: int | None
    seconds: float
    share: float | None
    gain: float | None
    open: bool
    message: str
    evidence: Evidence
