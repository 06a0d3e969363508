"""What the verdict's sentence leaves out: since when, at what cost, and on which host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.sampling.stillness import STILL_NS
from ddpwatch.tui.models.host_names import HostNames
from ddpwatch.tui.models.incidents import Diagnosed, covers
from ddpwatch.viewer.state import RankState, RunState


@dataclass(frozen=True, slots=True)
class VerdictFacts:
    """More on the incident that the verdict is about.

    Attributes:
        incident: That one; None in a replay as long as only a part of it may be known.
        lasts_ns: From its first step to the newest; None if that step is not kept, or clocks cannot be compared.
        host, pid: Of the rank to blame, if it is one.
    """

    incident: Incident | None
    lasts_ns: int | None = None
    host: str = ""
    pid: int | None = None


def verdict_facts(incident: Incident | None, state: RunState, hosts: HostNames) -> VerdictFacts | None:
    """Returns facts on the verdict's incident; None if it is about none."""
    if incident is None:
        return None
    rank = state.ranks.get(incident.ranks[0]) if len(incident.ranks) == 1 else None
    hello = None if rank is None else rank.hello
    return VerdictFacts(
        incident,
        _lasts_ns(incident, state),
        host="" if hello is None else hosts.of_rank.get(hello.rank, ""),
        pid=None if hello is None else hello.pid,
    )


def of_whole(facts: VerdictFacts, found: Diagnosed, newest: int | None, state: RunState) -> VerdictFacts:
    """Returns the facts with what a whole recording has of the incident.

    After a jump, the state has only a part of it.
    """
    incident = None
    if facts.incident is not None and found.whole and newest is not None:
        key = facts.incident.kind, facts.incident.ranks
        same = (one for one in found.incidents if (one.kind, one.ranks) == key)
        incident = next((one for one in same if covers(one, newest, state.now_ns)), None)
    return replace(facts, incident=incident, lasts_ns=None if incident is None else _lasts_ns(incident, state))


def _lasts_ns(incident: Incident, state: RunState) -> int | None:
    first = None if incident.since_step is None else state.steps.get(incident.since_step)
    newest = state.newest_step()
    if first is None or newest is None or not (first.comparable and newest.comparable):
        return None
    return newest.end_ns - first.start_ns


def standstill_ns(incidents: Iterable[Incident], state: RunState) -> int | None:
    """Returns for how long no rank has finished a step in a hang; None without one, or if other groups go on."""
    if not any(incident.kind == "hang" and incident.open for incident in incidents):
        return None
    each_ns = (_without_step_ns(rank, state.now_ns) for rank in state.ranks.values() if rank.bye is None)
    since_ns = min((ns for ns in each_ns if ns is not None), default=0)
    return since_ns if since_ns > STILL_NS else None


def _without_step_ns(rank: RankState, now_ns: int) -> int | None:
    """Returns how long ago a rank finished its newest step, by its own clock up to its newest frame.

    None if not known.
    """
    beat, step = rank.beat, rank.last_step
    if beat is None or step is None:
        return None
    return max(beat.at_ns - step.start_ns - step.duration_ns, 0) + now_ns - rank.seen_ns


def stuck_ranks(incidents: Iterable[Incident]) -> frozenset[int]:
    """Returns the ranks that hold up others at the moment."""
    hangs = (incident for incident in incidents if incident.kind == "hang" and incident.open)
    return frozenset(rank for incident in hangs for rank in incident.ranks)
