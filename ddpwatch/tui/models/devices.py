"""The device panel's and the Devices view's model: the newest sample of each device, its histories, its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ddpwatch.analysis.window import RankSummary
from ddpwatch.common.statistics import mean
from ddpwatch.tui.models.host_names import HostNames
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Device, DeviceKey

HISTORY_S = 120

WORST_FIRST = "first the lowest clock, then the least busy"

History = tuple[tuple[int, float], ...]
_Place = tuple[str, str, str]  # host, its boot, and a GPU


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """The newest sample of one device.

    Attributes:
        host: What its host is called.
        history: Its mean utilisation in each of the last `HISTORY_S` whole seconds, as (age in s, %), oldest first.
        memory: The same for memory, in percent of the total.
        power: The same for power, in percent of the limit.
        clock_mhz: Its mean SM clock in the newest `HISTORY_S` samples.
        ranks: The ranks that run on it.
    """

    device: Device
    host: str
    history: History = ()
    memory: History = ()
    power: History = ()
    clock_mhz: float | None = None
    ranks: frozenset[int] = frozenset()

    @property
    def key(self) -> DeviceKey:
        """What identifies the device."""
        return self.device.key


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of a step, from 0 to 1: computing, exposed communication, and the rest."""

    compute: float
    exposed: float
    rest: float


class DeviceLines:
    """Makes a line per device. Keeps it until the device's next sample, as many hosts have many devices."""

    def __init__(self) -> None:
        self._made: dict[DeviceKey, DeviceLine] = {}

    def build(self, state: RunState, hosts: HostNames) -> tuple[DeviceLine, ...]:
        """Returns the lines, GPUs before hosts."""
        ranks = _ranks_by_device(state)
        made = {key: self._line(key, samples, ranks, hosts) for key, samples in state.devices.items() if samples}
        self._made = made
        lines = made.values()
        return tuple(sorted(lines, key=lambda line: (line.device.kind != "cuda", line.key)))

    def _line(
        self, key: DeviceKey, samples: Sequence[Device], ranks: Mapping[_Place, set[int]], hosts: HostNames
    ) -> DeviceLine:
        known, newest = self._made.get(key), samples[-1]
        own, host = _ranks_on(newest, ranks), hosts.of_device(newest)
        if known is not None and known.device is newest and known.host == host and known.ranks == own:
            return known
        return DeviceLine(
            newest,
            host,
            _by_age(samples, lambda sample: sample.utilization),
            _by_age(samples, lambda sample: _percent(sample.memory_used, sample.memory_total)),
            _by_age(samples, lambda sample: _percent(sample.power_w, sample.power_limit_w)),
            mean(sample.sm_clock_mhz for sample in islice(reversed(samples), HISTORY_S)),
            frozenset(own),
        )


def _ranks_by_device(state: RunState) -> dict[_Place, set[int]]:
    ranks: dict[_Place, set[int]] = {}  # by host and GPU, and by host alone
    for rank in state.ranks.values():
        if (hello := rank.hello) is not None:
            ranks.setdefault((hello.host, hello.boot_id, hello.device_uuid), set()).add(rank.rank)
            ranks.setdefault((hello.host, hello.boot_id, ""), set()).add(rank.rank)
    return ranks


def _ranks_on(device: Device, ranks: Mapping[_Place, set[int]]) -> set[int]:
    if device.kind == "cuda" and not device.uuid:
        return set()
    return ranks.get((device.host, device.boot_id, device.uuid if device.kind == "cuda" else ""), set())


def worst_first(devices: Sequence[DeviceLine]) -> tuple[DeviceLine, ...]:
    """Returns GPUs in the order of `WORST_FIRST`, then hosts, the busiest first.

    Utilisation and clock are means over a minute or two, so that the order seldom changes. Of clocks, tenths below
    the fastest count. A GPU whose utilisation is not known is the least busy.
    """
    fastest = max((line.clock_mhz for line in devices if line.clock_mhz is not None), default=0.0)

    def badness(line: DeviceLine) -> tuple[bool, int, float]:
        busy = mean([value for _, value in line.history] or [line.device.utilization])
        if line.device.kind != "cuda":
            return True, 0, -(busy or 0.0)
        speed = 10 if line.clock_mhz is None or not fastest else round(10 * line.clock_mhz / fastest)
        return False, speed, -1.0 if busy is None else busy

    return tuple(sorted(devices, key=badness))


def _percent(part: float | None, total: float | None) -> float | None:
    return 100 * part / total if part is not None and total else None


def _by_age(samples: Sequence[Device], read: Callable[[Device], float | None]) -> History:
    """Groups by whole seconds, so that it changes once a second however often samples come."""
    newest = samples[-1].at_ns // 1_000_000_000
    by_age: dict[int, list[float]] = {}
    for sample in reversed(samples):
        age, value = newest - sample.at_ns // 1_000_000_000, read(sample)
        if age > HISTORY_S:
            break
        if value is not None and age > 0:
            by_age.setdefault(age, []).append(value)
    return _means(by_age)


def _means(by_age: Mapping[int, Sequence[float]]) -> History:
    return tuple((age, sum(values) / len(values)) for age, values in sorted(by_age.items(), reverse=True))


def mean_history(devices: Sequence[DeviceLine]) -> History:
    """Returns the mean utilisation of several devices by age, oldest first, as (age in s, %)."""
    by_age: dict[int, list[float]] = {}
    for line in devices:
        for age, utilisation in line.history:
            by_age.setdefault(age, []).append(utilisation)
    return _means(by_age)


def step_shares(ranks: Sequence[RankSummary]) -> StepShares | None:
    """Returns where the step of a device's ranks goes.

    Returns None where completions are not measured, because then exposed communication looks like compute.
    """
    known = [rank for rank in ranks if rank.step_ns and rank.exposed_ns is not None]
    if not known:
        return None
    compute, exposed = _share(known, "forward", "backward", "optimizer"), _share(known, "exposed_comm")
    return StepShares(compute, exposed, max(1 - compute - exposed, 0.0))


def _share(ranks: Sequence[RankSummary], *phases: str) -> float:
    spent = sum(rank.phases_ns.get(phase, 0.0) for rank in ranks for phase in phases)
    return spent / sum(rank.step_ns or 0.0 for rank in ranks)
