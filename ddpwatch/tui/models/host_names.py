"""What to call hosts: by their names, and by their ranks, too, where several have the same name, as containers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddpwatch.analysis.placement import Host
from ddpwatch.common.text import spans
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Device

_MOST_SPANS = 2


@dataclass(frozen=True, slots=True)
class HostNames:
    """No two hosts of a run have the same.

    Attributes:
        of_rank: What the host of each rank is called.
        several: Whether there is more than one.
    """

    of_rank: Mapping[int, str]
    several: bool
    _called: Mapping[Host, str]

    def of_device(self, device: Device) -> str:
        """Returns what a device's host is called: by its name alone if no rank is known there."""
        return self._called.get(Host(device.host, device.boot_id), device.host)


def host_names(state: RunState) -> HostNames:
    """Returns what to call the hosts of a run's ranks."""
    ranks: dict[Host, list[int]] = {}
    for rank, known in state.ranks.items():
        if known.hello is not None:
            ranks.setdefault(Host(known.hello.host, known.hello.boot_id), []).append(rank)
    same = Counter(host.name for host in ranks)
    called = {
        host: host.name if same[host.name] == 1 else f"{host.name} ({spans(own, _MOST_SPANS)})"
        for host, own in ranks.items()
    }
    return HostNames({rank: called[host] for host, own in ranks.items() for rank in own}, len(ranks) > 1, called)


def by_host(ranks: Iterable[int], hosts: Mapping[int, str]) -> dict[str, list[int]]:
    """Returns the ranks of each host, in the order of their lowest ranks, by what the host is called."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(hosts.get(rank, ""), []).append(rank)
    return found
