"""A recording as tables: typed rows, and columns for pandas, polars, numpy and pyarrow.

Times are in ms, sizes in bytes, ratios from 0 to 1, ``*_ns`` are raw stamps. None is what was not measured or cannot be
compared. The figures are those of ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from ddpwatch.analysis.assembly import StepAssembler, StepGroup
from ddpwatch.analysis.intervals import intersect, total
from ddpwatch.analysis.ranks import lateness, waiting
from ddpwatch.analysis.step import NS_PER_MS, PHASES
from ddpwatch.messages import Bye, Device, Hello, Mark, Step
from ddpwatch.transport import Frame

Frames = Iterable[Frame]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of one rank. ``start_ns`` is on the rank's clock; the six phases add up to ``step_ms``, if known."""

    step: int
    rank: int
    status: str
    synced: bool | None
    micro_steps: int | None
    start_ns: int
    step_ms: float
    input_ms: float | None
    forward_ms: float | None
    backward_ms: float | None
    exposed_comm_ms: float | None
    optimizer_ms: float | None
    other_ms: float | None
    comm_ms: float | None
    exposed_ms: float | None
    overlap: float | None
    late_ms: float | None
    wait_ms: float | None
    comm_bytes: int | None
    buckets: int | None
    own_ms: float
    dropped: int


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket of one step of one rank. ``ready``, ``launch`` and ``done`` count from the step's start.

    ``turn`` is which of the step's backwards it belongs to, from 0.
    """

    step: int
    rank: int
    module: int
    bucket: int
    turn: int
    nbytes: int
    ready_ms: float | None
    launch_ms: float
    done_ms: float | None
    late_ms: float | None
    wait_ms: float | None
    transfer_ms: float | None
    exposed_ms: float | None
    busbw_gbps: float | None


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank. ``end`` and what follows is None where no end was recorded."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    pid: int
    device_kind: str
    device_name: str
    backend: str
    torch: str
    model: str
    parameters: int
    timing_source: str
    steps: int
    dropped: int
    end: str | None
    end_detail: str | None
    end_step: int | None
    end_phase: str | None


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One sample of a GPU or a host. ``received_ns`` counts from the Unix epoch."""

    received_ns: int
    host: str
    kind: str
    index: int
    uuid: str
    name: str
    utilization: float | None
    memory_used: int | None
    memory_total: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    pcie_tx_bytes_s: float | None
    pcie_rx_bytes_s: float | None
    nvlink_tx_bytes_s: float | None
    nvlink_rx_bytes_s: float | None
    net_tx_bytes_s: float | None
    net_rx_bytes_s: float | None


@dataclass(frozen=True, slots=True)
class MarkRow:
    """One mark. ``end_ns`` is None for a moment; both stamps are on the rank's clock."""

    rank: int
    kind: str
    name: str
    start_ns: int
    end_ns: int | None


TableRow = StepRow | BucketRow | RankRow | DeviceRow | MarkRow
TABLES: dict[str, type[TableRow]] = {
    "steps": StepRow, "buckets": BucketRow, "ranks": RankRow, "devices": DeviceRow, "marks": MarkRow,
}  # fmt: skip


def groups(frames: Frames, ranks: int | None = None) -> Iterator[StepGroup]:
    """The steps, over their ranks. ``ranks`` as for `StepAssembler`."""
    collected = StepAssembler(ranks)
    for message, _ in frames:
        group = collected.apply(message)
        if group is not None:
            yield group
    yield from collected.rest()


def step_rows(group: StepGroup) -> Iterator[StepRow]:
    """The rows of one step, by rank."""
    for rank, step in sorted(group.steps.items()):
        figure = group.figures[rank]
        phases = {f"{name}_ms": _ms(figure.phases_ns.get(name)) for name in PHASES}
        known = step.status != "unwatched"
        yield StepRow(
            step=step.step,
            rank=rank,
            status=step.status,
            synced=step.synced if known else None,
            micro_steps=step.micro_steps if known else None,
            start_ns=step.start_ns,
            step_ms=figure.step_ns / NS_PER_MS,
            comm_ms=_ms(figure.comm_ns),
            exposed_ms=_ms(figure.exposed_ns),
            overlap=figure.overlap,
            late_ms=_ms(lateness(group.buckets, rank)),
            wait_ms=_ms(waiting(group.buckets, rank)),
            comm_bytes=sum(step.bucket_bytes) if known else None,
            buckets=len(step.bucket_index) if known else None,
            own_ms=(step.own_ns + step.sender_ns) / NS_PER_MS,
            dropped=step.dropped,
            **phases,
        )


def bucket_rows(group: StepGroup) -> Iterator[BucketRow]:
    """The rows of one step's buckets, by rank and in launch order."""
    compared = {bucket.key: bucket for bucket in group.buckets}
    for rank, step in sorted(group.steps.items()):
        turns: dict[tuple[int, int], int] = {}
        for place, index in enumerate(step.bucket_index):
            module, launch, done = step.bucket_module[place], step.bucket_launch[place], step.bucket_done[place]
            turn = turns[module, index] = turns.get((module, index), -1) + 1
            across = compared.get((module, index, turn))
            exposed = None if done is None else total(intersect(group.figures[rank].exposed, [(launch, done)]))
            yield BucketRow(
                step=step.step,
                rank=rank,
                module=module,
                bucket=index,
                turn=turn,
                nbytes=step.bucket_bytes[place],
                ready_ms=_ms(step.bucket_ready[place]),
                launch_ms=launch / NS_PER_MS,
                done_ms=_ms(done),
                late_ms=_ms(across.late(rank)) if across else None,
                wait_ms=_ms(across.wait(rank)) if across else None,
                transfer_ms=_ms(across.transfer) if across else None,
                exposed_ms=_ms(exposed),
                busbw_gbps=across.busbw / 1e9 if across and across.busbw is not None else None,
            )


def rank_rows(frames: Frames) -> list[RankRow]:
    """One row per rank that introduced itself."""
    hellos: dict[int, Hello] = {}
    ends: dict[int, Bye] = {}
    counts: dict[int, int] = {}
    dropped: dict[int, int] = {}
    for message, _ in frames:
        if isinstance(message, Step):
            counts[message.rank] = counts.get(message.rank, 0) + 1
            dropped[message.rank] = max(dropped.get(message.rank, 0), message.dropped)
        elif isinstance(message, Hello):
            hellos[message.rank] = message
        elif isinstance(message, Bye) and message.rank is not None:
            ends[message.rank] = message
    return [_rank_row(hello, counts.get(r, 0), dropped.get(r, 0), ends.get(r)) for r, hello in sorted(hellos.items())]


def _rank_row(hello: Hello, steps: int, dropped: int, end: Bye | None) -> RankRow:
    return RankRow(
        rank=hello.rank, local_rank=hello.local_rank, world_size=hello.world_size, host=hello.host, pid=hello.pid,
        device_kind=hello.device_kind, device_name=hello.device_name, backend=hello.backend, torch=hello.torch,
        model=hello.module, parameters=hello.parameters, timing_source=hello.timing_source, steps=steps,
        dropped=dropped, end=end.reason if end else None, end_detail=end.detail if end else None,
        end_step=end.step if end else None, end_phase=end.phase if end else None,
    )  # fmt: skip


def device_rows(frames: Frames) -> Iterator[DeviceRow]:
    """One row per sample."""
    names = [field.name for field in fields(DeviceRow) if field.name != "received_ns"]
    for message, envelope in frames:
        if isinstance(message, Device):
            yield DeviceRow(received_ns=envelope.received_ns, **{name: getattr(message, name) for name in names})


def mark_rows(frames: Frames) -> Iterator[MarkRow]:
    """One row per mark."""
    for message, _ in frames:
        if isinstance(message, Mark):
            yield MarkRow(message.rank, message.kind, message.name, message.start_ns, message.end_ns)


def rows(frames: Frames, table: str, ranks: int | None = None) -> Iterator[TableRow]:
    """The rows of a table (a key of `TABLES`)."""
    if table == "steps":
        return (row for group in groups(frames, ranks) for row in step_rows(group))
    if table == "buckets":
        return (row for group in groups(frames, ranks) for row in bucket_rows(group))
    if table == "ranks":
        return iter(rank_rows(frames))
    return device_rows(frames) if table == "devices" else mark_rows(frames)


def columns(found: Iterable[TableRow], kind: type[TableRow]) -> dict[str, list[object]]:
    """Rows as columns: what ``pandas.DataFrame``, ``polars.DataFrame`` and ``pyarrow.table`` take."""
    names = [field.name for field in fields(kind)]
    result: dict[str, list[object]] = {name: [] for name in names}
    for row in found:
        for name in names:
            result[name].append(getattr(row, name))
    return result


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / NS_PER_MS
