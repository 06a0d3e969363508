"""The device panel's and the Devices view's model: the newest sample of each device, its histories, its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddpwatch.analysis.window import RankSummary
from ddpwatch.messages import Device
from ddpwatch.state import RunState

HISTORY_S = 120

History = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """The newest sample of one device.

    Attributes:
        history: Its mean utilisation in each of the last `HISTORY_S` whole seconds, as (age in s, %), oldest first.
        memory: The same for memory, in percent of the total.
        power: The same for power, in percent of the limit.
        ranks: The ranks that run on it.
    """

    device: Device
    history: History = ()
    memory: History = ()
    power: History = ()
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of a step, from 0 to 1: computing, waiting in a collective, and the rest."""

    compute: float
    waiting: float
    rest: float


def device_lines(state: RunState) -> tuple[DeviceLine, ...]:
    """A line per device, GPUs before hosts."""
    ranks: dict[tuple[str, str], set[int]] = {}  # by host and GPU, and by host alone
    for rank in state.ranks.values():
        if rank.hello is not None:
            ranks.setdefault((rank.hello.host, rank.hello.device_uuid), set()).add(rank.rank)
            ranks.setdefault((rank.hello.host, ""), set()).add(rank.rank)
    lines = [_device_line(samples, ranks) for samples in state.devices.values() if samples]
    return tuple(sorted(lines, key=lambda line: (line.device.kind != "cuda", line.device.host, line.device.index)))


def _device_line(samples: Sequence[Device], ranks: Mapping[tuple[str, str], set[int]]) -> DeviceLine:
    newest = samples[-1]
    known = newest.kind != "cuda" or bool(newest.uuid)
    own = ranks.get((newest.host, newest.uuid if newest.kind == "cuda" else ""), set()) if known else set()
    return DeviceLine(
        newest,
        _by_age(samples, lambda sample: sample.utilization),
        _by_age(samples, lambda sample: _percent(sample.memory_used, sample.memory_total)),
        _by_age(samples, lambda sample: _percent(sample.power_w, sample.power_limit_w)),
        frozenset(own),
    )


def _percent(part: float | None, total: float | None) -> float | None:
    return 100 * part / total if part is not None and total else None


def _by_age(samples: Sequence[Device], read: Callable[[Device], float | None]) -> History:
    """By whole seconds, so that it changes once a second however often samples come."""
    newest = samples[-1].at_ns // 1_000_000_000
    by_age: dict[int, list[float]] = {}
    for sample in samples:
        age, value = newest - sample.at_ns // 1_000_000_000, read(sample)
        if value is not None and 0 < age <= HISTORY_S:
            by_age.setdefault(age, []).append(value)
    return _means(by_age)


def _means(by_age: Mapping[int, Sequence[float]]) -> History:
    return tuple((age, sum(values) / len(values)) for age, values in sorted(by_age.items(), reverse=True))


def mean_history(devices: Sequence[DeviceLine]) -> History:
    """The mean utilisation of several devices by age, oldest first, as (age in s, %)."""
    by_age: dict[int, list[float]] = {}
    for line in devices:
        for age, utilisation in line.history:
            by_age.setdefault(age, []).append(utilisation)
    return _means(by_age)


def step_shares(ranks: Sequence[RankSummary]) -> StepShares | None:
    """Where the step of a device's ranks goes.

    Returns None where completions are not measured, because then waiting looks like computing.
    """
    known = [rank for rank in ranks if rank.step_ns and rank.exposed_ns is not None]
    if not known:
        return None
    compute, waiting = _share(known, "forward", "backward", "optimizer"), _share(known, "exposed_comm")
    return StepShares(compute, waiting, max(1 - compute - waiting, 0.0))


def _share(ranks: Sequence[RankSummary], *phases: str) -> float:
    spent = sum(rank.phases_ns.get(phase, 0.0) for rank in ranks for phase in phases)
    return spent / sum(rank.step_ns or 0.0 for rank in ranks)
