"""Incidents and accounts as plain data: the keys of ``ddpwatch report --json`` (``docs/metrics.md``)."""

from __future__ import annotations

from typing import Any, get_args

from ddpwatch.analysis.diagnosis.incident import LOST, Incident, Kind, LostTime
from ddpwatch.analysis.diagnosis.words.sentences import LayerNames
from ddpwatch.analysis.diagnosis.words.wording import stack_lines
from ddpwatch.common.units import NS_PER_S

KINDS: tuple[Kind, ...] = get_args(Kind)


def incident_row(incident: Incident, names: LayerNames | None = None) -> dict[str, Any]:
    """Returns one of ``incidents[]``; ``param`` is a name, or None."""
    rank = incident.ranks[0] if incident.ranks else None
    param = names.layer(incident.param, rank) if names is not None and incident.param is not None else ""
    return {
        "kind": incident.kind,
        "severity": incident.severity,
        "ranks": list(incident.ranks),
        "phase": incident.phase or None,
        "param": param or None,
        "module": incident.module,
        "bucket": incident.bucket,
        "device": incident.device or None,
        "since_step": incident.since_step,
        "until_step": incident.until_step,
        "steps": incident.steps,
        "period": incident.period,
        "seconds": incident.cost_ns / NS_PER_S,
        "share": incident.share,
        "gain": incident.gain,
        "open": incident.open,
        "message": incident.message,
        "evidence": dict(incident.evidence),
    }


def lost_row(lost: LostTime) -> dict[str, Any]:
    """Returns ``lost``: rank-seconds by account. ``lost_share`` is what the accounts of lost time add up to."""
    total = lost.rank_ns
    wasted = sum(account.ns for account in lost.accounts if account.name in LOST)
    return {
        "rank_seconds": total / NS_PER_S,
        "lost_share": wasted / total if total else None,
        "watched": lost.watched,
        "accounts": [
            {
                "account": account.name,
                "rank": account.rank,
                "phase": account.phase or None,
                "seconds": account.ns / NS_PER_S,
                "share": account.ns / total if total else None,
            }
            for account in lost.accounts
        ],
    }


def row_stacks(row: dict[str, Any]) -> list[str]:
    """Returns where the ranks of a hang are, from its row (see `stack_lines`)."""
    return stack_lines(Incident(row["kind"], row["severity"], "", tuple(row["ranks"]), evidence=row["evidence"]))
