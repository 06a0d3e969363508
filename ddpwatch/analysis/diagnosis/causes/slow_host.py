"""Joins the late ranks of one host: if half of a host's ranks are late, the host is named instead."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.wording import ms_named, phase_named, ranks_named
from ddpwatch.analysis.placement import Host


def by_host(incidents: Iterable[Incident], hosts: Mapping[int, Host]) -> list[Incident]:
    """Returns the incidents, with those of a host's late ranks joined into one.

    They are joined if at least two ranks, and half of the host's, are late in overlapping stretches of steps, and if
    the run has other hosts.

    Args:
        incidents: In any order.
        hosts: The host of each rank.
    """
    ranks: defaultdict[Host, list[int]] = defaultdict(list)
    for rank, host in sorted(hosts.items()):
        ranks[host].append(rank)
    if len(ranks) < 2:
        return list(incidents)
    found: list[Incident] = []
    names = Counter(host.name for host in ranks)
    late: defaultdict[Host, list[Incident]] = defaultdict(list)
    for incident in incidents:
        if KINDS[incident.kind].of_host and len(incident.ranks) == 1 and incident.ranks[0] in hosts:
            late[hosts[incident.ranks[0]]].append(incident)
        else:
            found.append(incident)
    for host, own in late.items():
        for together in _together(own):
            several = _is_slow(len({incident.ranks for incident in together}), len(ranks[host]))
            called = host.name if names[host.name] == 1 else f"{host.name} ({ranks_named(ranks[host])})"
            found += [_joined(host.name, called, ranks[host], together)] if several else together
    return found


def late_together(rank: int, late: Iterable[int], hosts: Mapping[int, Host]) -> set[int]:
    """Returns the rank, and those late ones that are a slow host with it."""
    host = hosts.get(rank)
    of_host = {other for other in late if hosts.get(other) == host} | {rank}
    if host is None or len(of_host) < 2 or len(set(hosts.values())) < 2:
        return {rank}
    return of_host if _is_slow(len(of_host), sum(other == host for other in hosts.values())) else {rank}


def _is_slow(late: int, ranks: int) -> bool:
    return late >= max(2, ranks / 2)


def _together(incidents: Sequence[Incident]) -> Iterator[list[Incident]]:
    """Yields those whose steps overlap."""
    found: list[Incident] = []
    until = -1
    for incident in sorted(incidents, key=lambda incident: incident.since_step or 0):
        if found and (incident.since_step or 0) > until:
            yield found
            found, until = [], -1
        found.append(incident)
        until = max(until, incident.until_step or 0)
    if found:
        yield found


def _joined(host: str, called: str, ranks: Sequence[int], late: Sequence[Incident]) -> Incident:
    worst = max(late, key=lambda incident: incident.cost_ns)
    phase = Counter(incident.phase for incident in late).most_common(1)[0][0]
    late_ms = max((ms for incident in late if (ms := incident.evidence.late_ms) is not None), default=None)
    since = min((incident.since_step for incident in late if incident.since_step is not None), default=None)
    until = max((incident.until_step for incident in late if incident.until_step is not None), default=None)
    named = sorted({rank for incident in late for rank in incident.ranks})
    is_open = any(incident.open for incident in late)
    who = "all of its ranks" if len(named) == len(ranks) else f"{len(named)} of its {len(ranks)} ranks"
    sentence = partial(_sentence, called, who, late_ms, phase)
    return Incident(
        kind="slow_host",
        severity="warning",
        message=sentence(is_open),
        lasting=sentence(True),
        ranks=tuple(ranks),
        phase=phase,
        module=worst.module,
        bucket=worst.bucket,
        device=worst.device,
        since_step=since,
        until_step=until,
        steps=max(incident.steps for incident in late),
        cost_ns=sum(incident.cost_ns for incident in late),
        gain=_gain(late),
        open=is_open,
        evidence=Evidence(
            host=host,
            late_ranks=named,
            late_ms=late_ms,
            step_ms=worst.evidence.step_ms,
            device=worst.evidence.device,
        ),
    )


def _sentence(called: str, who: str, late_ms: float | None, phase: str, is_open: bool) -> str:
    is_slow, are, takes = ("is", "are", "takes") if is_open else ("was", "were", "took")
    text = f"host {called} {is_slow} slow: {who} {are} late, by up to {ms_named(late_ms)} in each step"
    return text + (f": {phase_named(phase).replace('its ', 'their ', 1)} {takes} longer" if phase else "")


def _gain(late: Sequence[Incident]) -> float | None:
    """Returns the sum of the ranks' gains: a step waits for one of them only, so they add up."""
    gains = [incident.gain for incident in late if incident.gain is not None]
    return min(sum(gains), 1.0) if gains else None
