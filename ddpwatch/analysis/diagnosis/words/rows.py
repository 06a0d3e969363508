"""Incidents and accounts as figures: in the units of the JSON, and with names for numbers (``docs/metrics.md``)."""

from __future__ import annotations

from typing import get_args

from ddpwatch.analysis.diagnosis.figures import AccountFigures, IncidentFigures, LostFigures
from ddpwatch.analysis.diagnosis.incident import LOST, Incident, Kind, LostTime
from ddpwatch.analysis.diagnosis.words.sentences import LayerNames
from ddpwatch.common.units import NS_PER_S

KINDS: tuple[Kind, ...] = get_args(Kind)


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
        period=incident.period,
        seconds=incident.cost_ns / NS_PER_S,
        share=incident.share,
        gain=incident.gain,
        open=incident.open,
        message=incident.message,
        evidence=incident.evidence,
    )


def lost_row(lost: LostTime) -> LostFigures:
    """Returns ``lost``: rank-seconds by account. ``lost_share`` is what the accounts of lost time add up to."""
    total = lost.rank_ns
    wasted = sum(account.ns for account in lost.accounts if account.name in LOST)
    return LostFigures(
        rank_seconds=total / NS_PER_S,
        lost_share=wasted / total if total else None,
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
