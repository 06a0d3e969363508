"""Stalls that steps show as pauses, and heartbeats as hangs: each is one incident."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.common.units import NS_PER_MS


def joined(pauses: Iterable[Incident], hangs: Iterable[Incident]) -> list[Incident]:
    """Makes one incident of a stall that shows in the steps as a pause, and in heartbeats as a hang that is over.

    If it is one of several that seemed to be of all ranks, the hang, which names a rank, takes its part of their cost.
    """
    found = list(pauses)
    for incident in hangs:
        index = next((at for at, pause in enumerate(found) if _same(pause, incident)), None)
        if index is None:
            found.append(incident)
            continue
        pause = found[index]
        evidence = incident.evidence | pause.evidence
        if pause.ranks or len(incident.ranks) != 1:
            found[index] = replace(pause, evidence=evidence)
        elif _recurs(pause):
            found[index] = replace(pause, cost_ns=max(0, pause.cost_ns - incident.cost_ns))
            found.append(incident)
        else:
            ranks = pause.evidence.ranks or 1
            found[index] = replace(
                pause,
                message=incident.message,
                ranks=incident.ranks,
                phase=pause.phase or incident.phase,
                cost_ns=pause.cost_ns * (ranks - 1) // ranks,
                evidence=evidence,
            )
    return found


def _same(pause: Incident, hang: Incident) -> bool:
    if hang.kind != "hang" or hang.open or hang.since_step is None or pause.since_step is None:
        return False
    if pause.ranks and hang.ranks and pause.ranks != hang.ranks:
        return False
    first, last = hang.since_step, hang.until_step or hang.since_step
    if _recurs(pause):
        return _holds(pause, range(first, last + 1)) and hang.cost_ns <= 2 * _longest_ns(pause)
    return first <= pause.since_step <= last


def _recurs(pause: Incident) -> bool:
    return pause.period is not None or len(pause.struck) > 1


def _holds(recurring: Incident, steps: range) -> bool:
    """Returns whether one of those that recur was in these steps."""
    if recurring.period is None:
        return any(step in steps for step in recurring.struck)
    return any((step - (recurring.since_step or 0)) % recurring.period == 0 for step in steps)


def _longest_ns(pause: Incident) -> float:
    """Returns what the others waited for the longest one, at most."""
    evidence = pause.evidence
    return (evidence.longest_ms or 0.0) * NS_PER_MS * max(1, (evidence.ranks or 0) - len(pause.ranks))
