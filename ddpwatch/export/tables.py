"""A recording as tables: typed rows, and columns for pandas, polars, numpy and pyarrow.

Times are in ms, sizes in bytes, ratios from 0 to 1; ``*_ns`` are raw stamps. None means not measured or not comparable.
``docs/metrics.md`` defines the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import msgspec

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.buckets import bus_bandwidths
from ddpwatch.analysis.run import diagnosed, steps_across_ranks
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.units import NS_PER_MS, NS_PER_S, to_ms
from ddpwatch.sampling.levels import UNRESOLVED, is_watched
from ddpwatch.wire.messages import Beat, Bye, Device, Hello, Mark, Step, Trained
from ddpwatch.wire.transport import Frame

Frames = Iterable[Frame]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of one rank. ``start_ns`` is on the rank's clock. The phases that are known add up to ``step_ms``."""

    step: int
    rank: int
    status: str
    synced: bool | None
    micro_steps: int | None
    start_ns: int
    step_ms: float | None
    data_ms: float | None
    between_ms: float | None
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
    collectives: int | None
    own_ms: float
    dropped: int


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective of one step of one rank. ``ready``, ``launch`` and ``done`` count from the step's start.

    ``turn`` is the number of the step's backward that it belongs to, from 0. With FSDP2, ``bucket`` is a parameter
    group, and ``use`` what is done with it. Of the job's own, ``bucket`` is a place that issues them, ``turn`` counts
    those of the place, and ``use`` is the operation. ``group`` is the group's id, ``role`` what it is for.
    """

    step: int
    rank: int
    module: int
    bucket: int
    turn: int
    use: str
    group: int
    role: str
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
    """One rank. The ``end*`` fields are None where no end was recorded."""

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
    max_sm_clock_mhz: float | None
    throttle_reasons: int | None
    ecc_errors: int | None
    pcie_width: int | None
    pcie_max_width: int | None
    pcie_generation: int | None
    pcie_max_generation: int | None
    link_errors: int | None
    nvlinks_down: int | None
    xid: int | None
    xids: int | None
    steal: float | None
    iowait: float | None
    run_queue: int | None
    cpu_pressure: float | None
    memory_pressure: float | None
    io_pressure: float | None
    oom_kills_s: float | None
    swap_in_bytes_s: float | None
    swap_out_bytes_s: float | None
    cgroup_throttled: float | None
    net_tx_errors_s: float | None
    net_rx_errors_s: float | None
    net_tx_drops_s: float | None
    net_rx_drops_s: float | None
    link_downs_s: float | None
    retransmits_s: float | None
    congestion_s: float | None
    net_faulty: str


@dataclass(frozen=True, slots=True)
class MarkRow:
    """One mark; ``end_ns`` is None for a moment. Both stamps are on the rank's clock."""

    rank: int
    kind: str
    name: str
    start_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """One incident, as in ``ddpwatch report --json``; ``ranks`` with spaces between, ``evidence`` as JSON."""

    kind: str
    severity: str
    ranks: str
    phase: str | None
    param: str | None
    module: int | None
    bucket: int | None
    device: str | None
    since_step: int | None
    until_step: int | None
    steps: int
    occurrences: int
    period: int | None
    seconds: float
    share: float | None
    gain: float | None
    open: bool
    message: str
    next_step: str
    evidence: str


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """Samples and tokens of a rank from ``since_step`` until before ``until_step``, which took ``seconds``."""

    rank: int
    since_step: int
    until_step: int
    seconds: float | None
    samples: int | None
    tokens: int | None
    flops: float | None
    samples_s: float | None
    tokens_s: float | None


TableRow = StepRow | CollectiveRow | RankRow | DeviceRow | MarkRow | IncidentRow | ThroughputRow
TABLES: dict[str, type[TableRow]] = {
    "steps": StepRow, "collectives": CollectiveRow, "ranks": RankRow, "devices": DeviceRow, "marks": MarkRow,
    "incidents": IncidentRow, "throughput": ThroughputRow,
}  # fmt: skip


def steps_of(frames: Frames, ranks: int | None = None) -> Iterator[StepAcrossRanks]:
    """Yields the steps in the frames. ``ranks`` is `Run`'s ``expected``."""
    return steps_across_ranks((message for message, _ in frames), ranks)


def step_rows(across: StepAcrossRanks) -> Iterator[StepRow]:
    """Yields the rows of one step, by rank."""
    for rank, step in sorted(across.ranks.items()):
        figure = across.facts_of(rank).figures
        phases = {f"{name}_ms": to_ms(figure.phases_ns.get(name)) for name in PHASES}
        known = is_watched(step.status)
        yield StepRow(
            step=step.step,
            rank=rank,
            status=step.status,
            synced=step.synced if known else None,
            micro_steps=step.micro_steps if known else None,
            start_ns=step.start_ns,
            step_ms=None if step.status == UNRESOLVED else figure.step_ns / NS_PER_MS,
            comm_ms=to_ms(figure.comm_ns),
            exposed_ms=to_ms(figure.exposed_ns),
            overlap=figure.overlap,
            late_ms=to_ms(across.late_ns(rank)),
            wait_ms=to_ms(across.wait_ns(rank)),
            comm_bytes=sum(step.comm_bytes) if known else None,
            collectives=len(step.comm_label) if known else None,
            own_ms=(step.own_ns + step.sender_ns) / NS_PER_MS,
            dropped=step.dropped,
            **phases,
        )


def collective_rows(across: StepAcrossRanks) -> Iterator[CollectiveRow]:
    """Yields the rows of one step's collectives, by rank and in launch order."""
    bandwidths = bus_bandwidths(across)
    for rank, step in sorted(across.ranks.items()):
        facts = across.facts_of(rank)
        for position, (key, launch) in enumerate(zip(facts.keys, facts.launch, strict=True)):
            skew = across.skew.buckets.get(key)
            yield CollectiveRow(
                step=step.step,
                rank=rank,
                module=key[0],
                bucket=key[1],
                turn=key[2],
                use=key[4],
                group=key[3],
                role=across.role_of(key[3]).name,
                nbytes=step.comm_bytes[position],
                ready_ms=to_ms(step.comm_ready[position]),
                launch_ms=step.comm_launch[position] / NS_PER_MS,
                done_ms=to_ms(step.comm_done[position]),
                late_ms=to_ms(launch - skew.first) if skew else None,
                wait_ms=to_ms(skew.last - launch) if skew else None,
                transfer_ms=to_ms(skew.transfer) if skew else None,
                exposed_ms=to_ms(facts.exposed[position]),
                busbw_gbps=None if (bandwidth := bandwidths.get(key)) is None else bandwidth / 1e9,
            )


def rank_rows(frames: Frames) -> list[RankRow]:
    """Returns one row per rank that introduced itself."""
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
    """Yields one row per sample."""
    names = [field.name for field in fields(DeviceRow) if field.name != "received_ns"]
    for message, envelope in frames:
        if isinstance(message, Device):
            yield DeviceRow(received_ns=envelope.received_ns, **{name: getattr(message, name) for name in names})


def mark_rows(frames: Frames) -> Iterator[MarkRow]:
    """Yields one row per mark."""
    for message, _ in frames:
        if isinstance(message, Mark):
            yield MarkRow(message.rank, message.kind, message.name, message.start_ns, message.end_ns)


def incident_rows(frames: Frames, ranks: int | None = None) -> Iterator[IncidentRow]:
    """Yields one row per incident, worst first. ``ranks`` as for `steps_of`."""
    for row in diagnosed(frames, ranks).incidents():
        texts = {"ranks": " ".join(map(str, row.ranks)), "evidence": msgspec.json.encode(row.evidence).decode()}
        yield IncidentRow(**{**msgspec.structs.asdict(row), **texts})


def throughput_rows(frames: Frames) -> Iterator[ThroughputRow]:
    """Yields what each rank trained on between two counts of it, once the steps between them have come."""
    counts: dict[int, list[Trained]] = {}
    durations: dict[int, dict[int, int]] = {}
    for message, _ in frames:
        if isinstance(message, Step) and message.rank in counts and message.status != UNRESOLVED:
            durations[message.rank][message.step] = message.duration_ns
        elif isinstance(message, Beat) and message.trained is not None:
            known = counts.setdefault(message.rank, [])
            if known and message.trained.step <= known[-1].step:
                continue
            known.append(message.trained)
            taken = durations.setdefault(message.rank, {})
            if len(known) > 2:
                yield _throughput_row(message.rank, known.pop(0), known[0], taken)
    for rank, known in sorted(counts.items()):
        if len(known) == 2:
            yield _throughput_row(rank, known[0], known[1], durations[rank])


def _throughput_row(rank: int, since: Trained, until: Trained, durations: dict[int, int]) -> ThroughputRow:
    """Returns what lies between two counts; takes the durations of its steps, of which all have to be known."""
    taken = {step: durations.pop(step) for step in sorted(durations) if step < until.step}
    known = [taken[step] for step in range(since.step, until.step) if step in taken]
    seconds = sum(known) / NS_PER_S if len(known) == until.step - since.step else None
    samples, tokens = _more(since.samples, until.samples), _more(since.tokens, until.tokens)
    return ThroughputRow(
        rank=rank, since_step=since.step, until_step=until.step, seconds=seconds, samples=samples, tokens=tokens,
        flops=None if since.flops is None or until.flops is None else until.flops - since.flops,
        samples_s=samples / seconds if samples is not None and seconds else None,
        tokens_s=tokens / seconds if tokens is not None and seconds else None,
    )  # fmt: skip


def _more(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before


def rows(frames: Frames, table: str, ranks: int | None = None) -> Iterator[TableRow]:
    """Yields the rows of a table (a key of `TABLES`)."""
    if table == "steps":
        return (row for across in steps_of(frames, ranks) for row in step_rows(across))
    if table == "collectives":
        return (row for across in steps_of(frames, ranks) for row in collective_rows(across))
    if table == "ranks":
        return iter(rank_rows(frames))
    if table == "incidents":
        return incident_rows(frames, ranks)
    if table == "throughput":
        return throughput_rows(frames)
    return device_rows(frames) if table == "devices" else mark_rows(frames)


def columns(found: Iterable[TableRow], kind: type[TableRow]) -> dict[str, list[object]]:
    """Returns rows as columns, the input of ``pandas.DataFrame``, ``polars.DataFrame`` and ``pyarrow.table``."""
    names = [field.name for field in fields(kind)]
    result: dict[str, list[object]] = {name: [] for name in names}
    for row in found:
        for name in names:
            result[name].append(getattr(row, name))
    return result
