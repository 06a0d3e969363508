"""The figures of a run, as reports, exports, metrics and the library get them: what the JSON is made of.

Names, and their order, are those of ``ddpwatch report --json`` (``docs/metrics.md``): plain names are means, ``_p50``
and ``_p90`` percentiles. Times are in ms, sizes in bytes; None is what was not measured. What has a default is left out
of the JSON where it has that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpwatch.analysis.diagnosis.incident import End, Severity
from ddpwatch.analysis.diagnosis.incident_json import Figures, IncidentFigures, LostFigures
from ddpwatch.analysis.estimate import Estimate
from ddpwatch.analysis.explain.explanation import Explanation
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.units import to_ms
from ddpwatch.wire.messages import LayoutKind


class RunFigures(Figures, frozen=True):
    """What the run is; None while no rank has introduced itself."""

    id: str | None
    previous: str | None
    world_size: int | None
    parallelism: str | None
    backend: str | None
    hosts: Sequence[str]
    model: str | None
    torch: str | None
    timing_source: str | None


class StepCounts(Figures, frozen=True, kw_only=True):
    """How many steps there are of each kind, and how long they take (`ddpwatch.analysis.estimate`).

    Means are of ``averaged`` steps; phases are known of ``watched``, communication of ``full`` ones of them.
    """

    count: int
    warmup: int
    aborted: int
    shadow: int
    unwatched: int
    unresolved: int = 0
    profiled: int = 0
    unreduced: int
    averaged: int
    watched: int
    full: int
    step_ms: float | None
    step_ms_p50: float | None
    step_ms_p90: float | None


class CostFigures(Figures, frozen=True):
    """What watching costs (`ddpwatch.sampling.cost.Cost`), and what it was allowed to: shares of the step."""

    ratio: float | None
    low: float | None
    high: float | None
    pairs: int
    collector: float | None
    budget: float | None


class OverlapFigures(Figures, frozen=True):
    """How much of the communication compute hides; what is exposed consists of waiting, transfer and what is unsplit.

    ``_reach`` is half the width of a 95 % interval.
    """

    ratio: float | None
    ratio_reach: float | None
    comm_ms: float | None
    exposed_ms: float | None
    exposed_reach_ms: float | None
    waiting_ms: float | None
    transfer_ms: float | None
    unsplit_ms: float | None


def overlap_figures(found: Estimate) -> OverlapFigures:
    """Returns what is estimated of communication, with the JSON's names."""
    return OverlapFigures(
        ratio=found.overlap,
        ratio_reach=found.overlap_reach,
        comm_ms=to_ms(found.comm_ns),
        exposed_ms=to_ms(found.exposed_ns),
        exposed_reach_ms=to_ms(found.exposed_reach_ns),
        waiting_ms=to_ms(found.waiting_ns),
        transfer_ms=to_ms(found.transfer_ns),
        unsplit_ms=to_ms(found.unsplit_ns),
    )


def phases_figures(found: Estimate) -> dict[str, float | None]:
    """Returns the mean phases; None if not known."""
    return {phase: to_ms(found.phases_ns.get(phase)) for phase in PHASES}


class ThroughputFigures(Figures, frozen=True, kw_only=True):
    """What all ranks get done together (`ddpwatch.analysis.throughput`): in a mean step, and in a second.

    ``ranks`` have counted. FLOPs are the model's, as ``flops_by`` says. MFU is their share of ``peak_flops_s``, which
    all devices together can do at best.
    """

    ranks: int
    samples_per_step: float | None
    tokens_per_step: float | None
    flops_per_step: float | None
    flops_by: str
    samples_s: float | None
    tokens_s: float | None
    flops_s: float | None
    peak_flops_s: float | None
    mfu: float | None


class RunTime(Figures, frozen=True, kw_only=True):
    """The rank-time of a run by what it went into (`ddpwatch.analysis.goodput`), in seconds.

    Its frames came from ``since`` until ``until`` (s since the Unix epoch). ``lost_seconds`` are in accounts of lost
    time.
    """

    since: float
    until: float
    ranks: int
    seconds: Mapping[str, float]
    lost_seconds: float


class GoodputFigures(Figures, frozen=True, kw_only=True):
    """Rank-time of all runs of a job, of which the oldest may be ``missing``, and its cost at the given price."""

    ratio: float
    runs: Sequence[str]
    missing: str | None
    rank_seconds: float
    seconds: Mapping[str, float]
    lost_hours: float
    cost: float | None
    lost_cost: float | None


class GroupFigures(Figures, frozen=True):
    """A process group."""

    id: int
    ranks: Sequence[int]
    kind: str
    role: str
    backend: str
    other_collectives_per_step: float | None


class RankMemory(Figures, frozen=True):
    """Memory that a rank uses (`ddpwatch.analysis.memory`), and its peaks.

    ``host_bytes`` are without files' pages. Of its GPU, torch's allocator has ``gpu_bytes`` reserved, of which tensors
    use ``gpu_allocated_bytes``.
    """

    host_bytes: int | None
    host_peak_bytes: int | None
    gpu_bytes: int | None
    gpu_peak_bytes: int | None
    gpu_allocated_bytes: int | None
    gpu_allocated_peak_bytes: int | None


class RankFigures(Figures, frozen=True):
    """A rank; ``end`` is None as long as it trains."""

    rank: int
    host: str | None
    groups: Sequence[int]
    steps: int
    step_ms: float | None
    step_ms_p50: float | None
    late_ms_p50: float | None
    wait_ms_p50: float | None
    overlap: float | None
    overlap_p50: float | None
    exposed_ms: float | None
    exposed_ms_p50: float | None
    clock_error_ms: float | None
    dropped: int
    own_cost_ratio: float | None
    memory: RankMemory
    end: End | None


class CollectiveFigures(Figures, frozen=True):
    """A bucket, what FSDP2 communicates of a parameter group in one way, or a place that issues collectives.

    Figures are of all in a step that has any; ``steps`` is how many steps have, of those timed in full.
    """

    kind: LayoutKind
    module: int
    index: int
    use: str
    name: str
    role: str
    group_size: int | None
    steps: int
    per_step: float | None
    nbytes: int | None
    params: Sequence[str]
    ready_ms_p50: float | None
    launch_ms_p50: float | None
    done_ms_p50: float | None
    transfer_ms_p50: float | None
    wait_ms_p50: float | None
    exposed_ms_p50: float | None
    busbw_gbps_p50: float | None
    last_rank: int | None
    last_ranks: Sequence[int]
    last_share: float | None


class VerdictFigures(Figures, frozen=True):
    """The verdict (`ddpwatch.analysis.diagnosis.words.verdict.Verdict`)."""

    kind: str
    severity: str
    text: str
    next_step: str = ""


class OffFigures(Figures, frozen=True):
    """What ddpwatch has stopped seeing (`ddpwatch.analysis.diagnosis.words.turned_off.Off`)."""

    feature: str
    ranks: Sequence[int]
    step: int | None
    reason: str
    message: str


class RecordingFigures(Figures, frozen=True):
    """The recording that the report is of; ``missing_steps`` only if its collector was started again."""

    frames: int
    bytes: int
    seconds: float
    cut_tail: bool
    skipped: int
    parts: int
    dropped_parts: int
    missing_parts: int
    lost: int
    rank_files: Sequence[int] | None
    notes: Sequence[str]
    collector_restarts: int = 0
    missing_steps: int | None = None


class Finding(Figures, frozen=True):
    """Something that stands out: an incident, or a note. Nothing but JSON reads its evidence."""

    kind: str
    severity: Severity
    rank: int | None
    bucket: int | None
    message: str
    evidence: Mapping[str, object]


class Report(Figures, frozen=True):
    """All of a run; what a recording adds to it is None in the report of a live one."""

    run: RunFigures
    steps: StepCounts
    phases_ms: Mapping[str, float | None]
    cost: CostFigures
    overlap: OverlapFigures
    groups: Sequence[GroupFigures]
    ranks: Sequence[RankFigures]
    collectives: Sequence[CollectiveFigures]
    off: Sequence[OffFigures]
    lost: LostFigures
    incidents: Sequence[IncidentFigures]
    verdict: VerdictFigures
    throughput: ThroughputFigures | None
    goodput: GoodputFigures | None = None
    recording: RecordingFigures | None = None
    notes: Sequence[Finding] | None = None
    findings: Sequence[Finding] | None = None
    explained: Sequence[Explanation] = ()
    rest_after: Mapping[str, float] = {}
