"""What is exported of a run: names, units, labels, and values. They are those of the dashboard's header and views.

Names follow Prometheus: base units, the unit at the end. The number of series is bounded: of ranks and buckets, only
the first `TOP` by size have their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import asdict

from ddpwatch.analysis.buckets import BucketSummary, BucketTable
from ddpwatch.analysis.diagnosis.incident_json import lost_row
from ddpwatch.analysis.figures import ThroughputFigures
from ddpwatch.analysis.window import Summariser, Summary
from ddpwatch.common.text import clean
from ddpwatch.common.units import NS_PER_S
from ddpwatch.viewer.state import RankStatus, RunState
from ddpwatch.wire.messages import ALL_REDUCE

TOP = 16
OTHERS = "others"
INSTALL = "pip install 'ddpwatch[metrics]'"
MOST_LABEL = 80  # characters


@dataclass(frozen=True)
class Metric:
    """What is exported under one name.

    Attributes:
        name: Without ``ddpwatch`` and the unit.
        unit: ``seconds``, ``ratio``, ``bytes_per_second``, or none.
        help: What it is.
        labels: Their names.
        counter: Whether it only grows.
    """

    name: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    counter: bool = False

    @property
    def sample_name(self) -> str:
        """What Prometheus calls its samples."""
        unit = f"_{self.unit}" if self.unit else ""
        return f"ddpwatch_{self.name}{unit}{'_total' if self.counter else ''}"


METRICS = (
    Metric("run_details", "", "Always 1; the labels say which run it is", ("run_id", "module", "backend", "torch")),
    Metric("live", "", "Whether the run is live: 1 or 0"),
    Metric("world_size", "", "Ranks of the job"),
    Metric("ranks", "", "Ranks, by status", ("status",)),
    Metric("steps", "", "Steps taken by the rank that is furthest ahead", counter=True),
    Metric("step", "seconds", "Mean step, over the newest full steps"),
    Metric("samples", "per_second", "Samples that all ranks train on, as they or their DataLoaders count"),
    Metric("tokens", "per_second", "Tokens that all ranks train on, as they count"),
    Metric("model_flops", "per_second", "FLOPs of the model, as ranks count or 6 × parameters × tokens"),
    Metric("mfu", "ratio", "Model FLOPs utilisation: their share of what all devices can do at best"),
    Metric("phase", "seconds", "What a mean step spends in each phase", ("phase",)),
    Metric("communication", "seconds", "Communication of a mean step"),
    Metric("exposed_communication", "seconds", "Communication of a mean step that no compute hides"),
    Metric("overlap", "ratio", "Share of communication that compute hides"),
    Metric("rank_time", "seconds", "Where the rank-time of the run went so far (GPU-seconds)", ("account",)),
    Metric("lost_time", "ratio", "Share of the rank-time that was lost"),
    Metric("goodput", "ratio", "Share of the rank-time that steps took: without start-up, pauses, hangs"),
    Metric("late", "seconds", f"How late a rank is (p50): the {TOP} latest, and the sum of all others", ("rank",)),
    Metric("memory", "bytes", f"What a rank uses: the {TOP} with most, and the sum of all others", ("rank", "of")),
    Metric("memory_peak", "bytes", "The most of it that was seen of any rank", ("of",)),
    Metric(
        "bus_bandwidth",
        "bytes_per_second",
        f"Bus bandwidth (busbw, p50) of the {TOP} largest buckets",
        ("module", "bucket", "group", "op"),
    ),
    Metric("collective_wait", "seconds", "Wait for the last rank in a step (p50)", ("group", "op")),
    Metric("collective_exposed", "seconds", "Exposed collectives in a step (p50)", ("group", "op")),
    Metric("cost", "ratio", "The overhead: what watching adds to a step, as a share of it"),
    Metric("cost_low", "ratio", "Lower end of its 95 % interval"),
    Metric("cost_high", "ratio", "Upper end of its 95 % interval"),
    Metric("dropped_frames", "", "Frames that ranks and agents dropped", counter=True),
    Metric("frames", "", "Frames that the collector received", counter=True),
    Metric("refused_frames", "", "Frames that the collector refused", counter=True),
    Metric("missing_steps", "", "Steps of single ranks that never came", counter=True),
    Metric("open_incidents", "", "Incidents that are open", ("kind",)),
)


class Sample(NamedTuple):
    """One value, and the values of its metric's labels."""

    labels: tuple[str, ...]
    value: float


Values = Mapping[str, Sequence[Sample]]  # by the metric's name; what is not known is not in it
NO_RUN: Values = {"live": (Sample((), 0.0),)}


@dataclass
class Board:
    """The newest reading. Other threads may read it at any time: its values are replaced as a whole."""

    run_id: str = ""
    values: Values = field(default_factory=lambda: NO_RUN)


class Row(NamedTuple):
    """A value before it is known whether there is one."""

    name: str
    value: float | None
    labels: tuple[str | int, ...] = ()


class Meter:
    """Reads the values off a run's state. It keeps what it has worked out, so use one per run."""

    def __init__(self) -> None:
        self._summariser = Summariser()
        self._buckets = BucketTable()

    def read(self, state: RunState) -> Values:
        """Returns the values now."""
        found: dict[str, list[Sample]] = {}
        for name, value, labels in self._all(state):
            if value is not None:
                found.setdefault(name, []).append(Sample(tuple(map(str, labels)), float(value)))
        return found

    def _all(self, state: RunState) -> Iterator[Row]:
        yield from _identity(state)
        recent = state.recent()
        summary = self._summariser.summarise(state.window())
        yield from _times(summary)
        yield from _throughput(state.throughput(summary.step_ns))
        yield from _late(summary)
        yield from _memory(state)
        while not self._buckets.update(recent):
            pass
        yield from _collectives(self._buckets.rows(state.layouts))
        yield from _lost(state)
        cost = state.cost.cost()
        if cost is not None:
            yield from (Row("cost", cost.ratio), Row("cost_low", cost.low), Row("cost_high", cost.high))
        yield from _frames(state)


def _identity(state: RunState) -> Iterator[Row]:
    hello = next((rank.hello for rank in state.ranks.values() if rank.hello is not None), None)
    if hello is not None:
        names = (state.run_id, hello.module, hello.backend, hello.torch)
        yield Row("run_details", 1, tuple(clean(name)[:MOST_LABEL] for name in names))
    yield Row("live", float(state.end is None and bool(state.frames)))
    yield Row("world_size", state.world_size or None)
    statuses = Counter(state.status_of(rank) for rank in state.ranks)
    yield from (Row("ranks", statuses[status], (status.value,)) for status in RankStatus if state.ranks)
    yield Row("steps", state.finished_steps if state.ranks else None)


def _times(summary: Summary) -> Iterator[Row]:
    yield Row("step", _scaled(summary.step_ns, 1 / NS_PER_S))
    yield from (Row("phase", ns / NS_PER_S, (phase,)) for phase, ns in summary.estimate.phases_ns.items())
    yield Row("communication", _scaled(summary.estimate.comm_ns, 1 / NS_PER_S))
    yield Row("exposed_communication", _scaled(summary.exposed_ns, 1 / NS_PER_S))
    yield Row("overlap", summary.estimate.overlap)


def _throughput(found: ThroughputFigures | None) -> Iterator[Row]:
    if found is not None:
        yield Row("samples", found.samples_s)
        yield Row("tokens", found.tokens_s)
        yield Row("model_flops", found.flops_s)
        yield Row("mfu", found.mfu)


def _collectives(rows: Sequence[BucketSummary]) -> Iterator[Row]:
    """Yields the largest one by one; all of them by the role of their groups and operation, where all are known."""
    for row in sorted(rows, key=lambda row: row.nbytes or 0, reverse=True)[:TOP]:
        yield Row("bus_bandwidth", row.busbw, (row.module, clean(_named(row))[:MOST_LABEL], *_kind(row)))
    kinds = dict.fromkeys(map(_kind, rows))
    for kind in list(kinds)[:TOP]:
        found = [row for row in rows if _kind(row) == kind]
        for name, values in (("wait", [row.wait for row in found]), ("exposed", [row.exposed for row in found])):
            known = [value for value in values if value is not None]
            total = sum(known) / NS_PER_S if len(known) == len(values) else None
            yield Row(f"collective_{name}", total, kind)


def _named(row: BucketSummary) -> str:
    return row.name if row.kind == "call" else str(row.index)


def _kind(row: BucketSummary) -> tuple[str, str]:
    return clean(str(row.role))[:MOST_LABEL], row.use or ALL_REDUCE


def _late(summary: Summary) -> Iterator[Row]:
    yield from _largest("late", {rank: _scaled(row.late_ns, 1 / NS_PER_S) for rank, row in summary.ranks.items()})


def _largest(name: str, values: Mapping[int, float | None], *labels: str) -> Iterator[Row]:
    """Yields the largest values by rank, and the sum of the others."""
    known = [(value, rank) for rank, value in values.items() if value is not None]
    known.sort(key=lambda one: (-one[0], one[1]))
    yield from (Row(name, value, (rank, *labels)) for value, rank in known[:TOP])
    if len(known) > TOP:
        yield Row(name, sum(value for value, _ in known[TOP:]), (OTHERS, *labels))


def _memory(state: RunState) -> Iterator[Row]:
    used = {rank: asdict(state.memory.of_rank(rank)) for rank in state.ranks}
    for of in ("host", "gpu", "gpu_allocated"):
        yield from _largest("memory", {rank: one[f"{of}_bytes"] for rank, one in used.items()}, of)
        peaks = [peak for one in used.values() if (peak := one[f"{of}_peak_bytes"]) is not None]
        yield Row("memory_peak", max(peaks, default=None), (of,))


def _lost(state: RunState) -> Iterator[Row]:
    lost = lost_row(state.diagnosis.lost())
    accounts: defaultdict[str, float] = defaultdict(float)
    for account in lost.accounts:
        accounts[account.account] += account.seconds
    yield from (Row("rank_time", seconds, (name,)) for name, seconds in accounts.items())
    yield Row("lost_time", lost.lost_share)
    found = state.goodput()
    yield Row("goodput", None if found is None else found.ratio)
    kinds = Counter(incident.kind for incident in state.diagnosis.incidents() if incident.open)
    yield from (Row("open_incidents", count, (kind,)) for kind, count in kinds.items())


def _frames(state: RunState) -> Iterator[Row]:
    status = state.status
    yield Row("dropped_frames", state.dropped if state.ranks else None)
    yield Row("frames", None if status is None else status.frames)
    yield Row("refused_frames", None if status is None else sum(status.refused.values()))
    yield Row("missing_steps", state.missing_steps if state.ranks else None)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
