"""The Devices view's model of hosts: the ranks of each, what they cost, and its CPU, network and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ddpwatch.tui.models.host_names import by_host
from ddpwatch.tui.models.overview import Overview
from ddpwatch.wire.messages import Device


@dataclass(frozen=True, slots=True)
class HostLine:
    """One host.

    Attributes:
        host: What it is called.
        cost_ns: Rank-time that others waited for its ranks.
        share: That, of the run's rank-time; None before anything is known.
        unseen: Its agent is not connected.
        machine: Its newest sample; None if there is none, or it is unseen: the sample is then old.
        gpus_busy: The mean utilisation (%) of its GPUs; None if there are none, it is not known, or the host is unseen.
    """

    host: str
    ranks: Sequence[int]
    cost_ns: int
    share: float | None
    unseen: bool
    machine: Device | None
    gpus_busy: float | None


def host_lines(model: Overview) -> list[HostLine]:
    """Returns the hosts: costliest first, then those that are unseen, then by their lowest ranks."""
    machines = {line.host: line.device for line in model.devices if line.device.kind == "cpu"}
    busy: dict[str, list[float]] = {}
    for line in model.devices:
        if line.device.kind == "cuda" and line.device.utilization is not None:
            busy.setdefault(line.host, []).append(line.device.utilization)
    cost, total = model.diagnosed.waited_for, model.diagnosed.lost.rank_ns
    lines = []
    for host, own in by_host(sorted(model.hosts), model.hosts).items():
        spent = sum(cost.get(rank, 0) for rank in own)
        share, unseen = spent / total if total else None, not model.unseen.isdisjoint(own)
        machine, used = (None, None) if unseen else (machines.get(host), busy.get(host))
        lines.append(HostLine(host, own, spent, share, unseen, machine, fmean(used) if used else None))
    return sorted(lines, key=lambda line: (-line.cost_ns, not line.unseen))
