"""What the verdict's sentence leaves out: since when, at what cost, on which host, and where in the code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.state import RunState


@dataclass(frozen=True, slots=True)
class VerdictFacts:
    """More on the incident that the verdict is about.

    Attributes:
        incident: That one.
        lasts_ns: From its first step to the newest; None if that step is not kept, or clocks cannot be compared.
        host, pid: Of the rank to blame, if it is one.
        site: Where in the user's code a rank stands that holds up the others; empty if that is not known.
    """

    incident: Incident
    lasts_ns: int | None = None
    host: str = ""
    pid: int | None = None
    site: str = ""


def verdict_facts(text: str, incidents: Iterable[Incident], state: RunState) -> VerdictFacts | None:
    """Facts on the incident whose message the verdict's text has; None if it is about none."""
    incident = next((one for one in incidents if one.message and one.message in text), None)
    if incident is None:
        return None
    rank = state.ranks.get(incident.ranks[0]) if len(incident.ranks) == 1 else None
    hello = None if rank is None else rank.hello
    sites = incident.evidence.get("call_sites", {})
    return VerdictFacts(
        incident,
        _lasts_ns(incident, state) if incident.open else None,
        host="" if hello is None else hello.host,
        pid=None if hello is None else hello.pid,
        site=next((site for at, site in sites.items() if at in incident.ranks), ""),
    )


def _lasts_ns(incident: Incident, state: RunState) -> int | None:
    first = None if incident.since_step is None else state.steps.get(incident.since_step)
    newest = state.newest_step()
    if first is None or newest is None or not (first.comparable and newest.comparable):
        return None
    return newest.end_ns - first.start_ns


def standstill_ns(incidents: Iterable[Incident], state: RunState) -> int | None:
    """In a hang, for how long no rank has finished a step; None if there is no hang."""
    if not any(incident.kind == "hang" and incident.open for incident in incidents):
        return None
    alive = [(rank.beat, rank.last_step) for rank in state.ranks.values() if rank.bye is None]
    known = [(beat, step) for beat, step in alive if beat is not None and step is not None]
    return max((beat.at_ns - step.start_ns - step.duration_ns for beat, step in known), default=None)


def stuck_ranks(incidents: Iterable[Incident]) -> frozenset[int]:
    """The ranks that hold up others at the moment."""
    hangs = (incident for incident in incidents if incident.kind == "hang" and incident.open)
    return frozenset(rank for incident in hangs for rank in incident.ranks)
