"""The incidents that a dashboard shows, where they lie among the steps, and what each rank cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpwatch.analysis.diagnosis.incident import SEVERITIES, Incident, LostTime
from ddpwatch.analysis.diagnosis.words.lost_time import waited_for
from ddpwatch.analysis.diagnosis.words.sentences import LayerNames


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """What a run's diagnosis has found.

    Attributes:
        incidents: Worst first.
        lost: Where the time went.
        slowest: The late rank that costs most at the moment.
        whole: They are those of a whole recording, not only of the run up to the position.
        progress: How much of the recording is diagnosed; None if there is nothing to wait for.
        unit: What costs are counted in.
    """

    incidents: Sequence[Incident] = ()
    lost: LostTime = field(default_factory=LostTime)
    slowest: Incident | None = None
    whole: bool = False
    progress: float | None = None
    unit: str = "process-seconds"

    @property
    def waited_for(self) -> Mapping[int, int]:
        """Rank-time (ns) that others waited for a rank, by rank."""
        return waited_for(self.lost)


def struck(incident: Incident, newest: int) -> Sequence[int]:
    """Returns the steps that an incident struck, as far as that is known.

    Args:
        incident: The incident.
        newest: The newest step: where an open one ends.
    """
    since, until = incident.since_step, incident.until_step
    if since is None:
        return range(0)
    until = max(since, newest if incident.open and not incident.resting else since if until is None else until)
    if incident.struck:
        return incident.struck
    if incident.period is not None:
        return range(since, until + 1, incident.period)
    # These strike single steps, not all between the first and the last
    if incident.kind in ("death", "not_reduced") and incident.steps <= until - since:
        return sorted({since, until})
    if incident.spells:
        spells = [*incident.spells[:-1], (incident.spells[-1][0], until)]
        return [step for first, last in spells for step in range(first, last + 1)]
    return range(since, until + 1)


def strip(incidents: Sequence[Incident], steps: Sequence[int], now_ns: int = 0) -> list[Incident | None]:
    """Returns the worst incident in each of the given steps, or between it and the one before. A rank's comes first.

    A hang or a death whose step never ended is in the last.

    Args:
        incidents: Worst first.
        steps: Some of the steps, ascending.
        now_ns: The receive time of the newest frame; 0 if older steps than the newest are looked at.
    """
    found: list[Incident | None] = [None] * len(steps)
    if not steps:
        return found
    order = sorted(incidents, key=lambda incident: (SEVERITIES.index(incident.severity), not incident.ranks))
    for incident in reversed(order):  # the worst comes last and stays
        hit = struck(incident, steps[-1])
        before = steps[0] - 1
        for column, step in enumerate(steps):
            at = bisect_right(hit, before)
            if at < len(hit) and hit[at] <= step:
                found[column] = incident
            before = step
        if incident.since_step is not None and incident.since_step > steps[-1] and _shows(incident, now_ns):
            found[-1] = incident
    return found


@dataclass(frozen=True, slots=True)
class ListedIncident:
    """An incident in the Log's list.

    Attributes:
        layer: The parameter from which on a backward is slow; empty if it is not known.
        when: ``now``, ``over``, or ``later`` than a replay's position.
    """

    incident: Incident
    layer: str
    when: str


def incident_rows(found: Diagnosed, position: int | None, names: LayerNames, now_ns: int = 0) -> list[ListedIncident]:
    """Returns the rows of the list, worst first.

    Args:
        found: The incidents.
        position: The newest step known.
        names: Of parameters.
        now_ns: The receive time of the newest frame; 0 if an older step is looked at.
    """
    return [
        ListedIncident(incident, _layer(incident, names), _when(incident, position if found.whole else None, now_ns))
        for incident in found.incidents
    ]


def _layer(incident: Incident, names: LayerNames) -> str:
    rank = incident.ranks[0] if incident.ranks else None
    return "" if incident.param is None else names.layer(incident.param, rank)


def _when(incident: Incident, position: int | None, now_ns: int) -> str:
    """Returns whether it is ongoing; at a position in a recording, whether it was then."""
    if position is None or incident.since_step is None:
        return "now" if incident.open else "over"
    first, last = _positions(incident, incident.since_step)
    if position < first and not _shows(incident, now_ns):
        return "later"
    return "now" if incident.open or position < last else "over"


def covers(incident: Incident, position: int, now_ns: int = 0) -> bool:
    """Returns whether it had started, and was not over, when ``position`` was the newest step.

    ``now_ns`` is the receive time of the newest frame then, 0 if it is not known.

    A death is never over.
    """
    if incident.since_step is None:
        return False
    first, last = _positions(incident, incident.since_step)
    has_started = first <= position or _shows(incident, now_ns)
    return has_started and (position <= last or incident.open or incident.kind == "death")


def _shows(incident: Incident, now_ns: int) -> bool:
    """Returns whether a hang or a death had been found by then: ranks may stand still some steps apart."""
    return incident.found_ns is not None and incident.found_ns <= now_ns


def _positions(incident: Incident, since: int) -> tuple[int, int]:
    """Returns the newest steps when it starts and when it is over."""
    last = since if incident.until_step is None else incident.until_step
    if incident.kind == "death":
        return since - 1, since - 1  # its step does not end
    return since - (incident.kind == "hang"), last  # its step ends with it
