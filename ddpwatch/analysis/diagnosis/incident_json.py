"""What the JSON says of incidents and accounts: their figures in its units, with its names (``docs/metrics.md``)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpwatch.analysis.diagnosis.incident import AccountName, Evidence, Incident, LostTime, Severity
from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.analysis.diagnosis.words.sentences import LayerNames
from ddpwatch.common.units import NS_PER_S


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
    occurrences: int
    period: int | None
    seconds: float
    share: float | None
    gain: float | None
    open: bool
    message: str
    next_step: str
    evidence: Evidence


def incident_row(incident: Incident, names: LayerNames | None = None) -> IncidentFigures:
    """Returns one of ``incidents[]``; ``param`` is a name, or None."""
    rank = incident.ranks[0] if incident.ranks else None
    param = names.layer(incident.param, rank) if names is not None and incident.param is not None else ""
    return IncidentFigures(
        kind=incident.kind,
        severity=incident.severity,
        ranks=list(incident.ranks),
        phase=incident.phase or None,
        param=param or None,
        module=incident.module,
        bucket=incident.bucket,
        device=incident.device or None,
        since_step=incident.since_step,
        until_step=incident.until_step,
        steps=incident.steps,
        occurrences=incident.occurrences,
        period=incident.period,
        seconds=incident.cost_ns / NS_PER_S,
        share=incident.share,
        gain=incident.gain,
        open=incident.open,
        message=incident.message,
        next_step=incident.next_step,
        evidence=incident.evidence,
    )


def lost_row(lost: LostTime) -> LostFigures:
    """Returns ``lost``: seconds of rank-time by account. ``lost_share`` is what the accounts of lost time add up to."""
    total = lost.rank_ns
    return LostFigures(
        rank_seconds=total / NS_PER_S,
        lost_share=lost.share,
        watched=lost.watched,
        accounts=[
            AccountFigures(
                account=account.name,
                rank=account.rank,
                phase=account.phase or None,
                seconds=account.ns / NS_PER_S,
                share=account.ns / total if total else None,
            )
            for account in lost.accounts
        ],
    )
