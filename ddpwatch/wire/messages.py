"""The messages between ranks, collector, viewers and files: structs and their codec.

Every frame is one msgpack map with a ``type`` field. A field that has its default is left out, so no default may ever
change. Evolution is additive: a reader ignores unknown fields, and a field added later has a default.
``SCHEMA_VERSION`` grows only when an old reader would misread a new frame.

Times are integer nanoseconds of ``time.monotonic_ns()`` on the sender's host. Inside a :class:`Step` they are
offsets from ``start_ns``, which keeps frames small and makes clock alignment one addition.

What was not measured is ``None``, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from ddpwatch.errors import DdpwatchError

SCHEMA_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
MAX_NODE_RANKS: Final = 4096
MAX_TRACE_BYTES: Final = 1024 * 1024

Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Ns = Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]
Name = Annotated[str, Meta(max_length=1024)]
Column = Annotated[list[Ns], Meta(max_length=65536)]
SparseColumn = Annotated[list[Ns | None], Meta(max_length=65536)]
DeviceKey = tuple[str, str, str, int]  # host, its boot, kind, index

MOST_BUSY = 3  # processes of a host
PhaseName = Literal["forward", "backward", "sync", "optimizer"]
# What they mean: `ddpwatch.sampling.levels`.
StepStatus = Literal["ok", "warmup", "aborted", "shadow", "unwatched", "unresolved", "profiled"]
LayoutKind = Literal["bucket", "group", "call"]
EndReason = Literal["finished", "exception", "killed", "lost"]
CollectiveOp = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
]  # fmt: skip
ALL_REDUCE: Final[CollectiveOp] = "all_reduce"
TO_ONE: Final = frozenset({"send", "recv"})  # of two ranks, which alone give them a sequence number
SAME_SAMPLES: Final = ("tp", "pp", "cp", "sp")  # kinds of groups whose ranks train on the same samples
DEFAULT_GROUP: Final = 0  # id of the group of all ranks
OWN_COLLECTIVES: Final = 1 << 20  # in place of a module: collectives that the job's own code issues
NO_LONGER_WATCHED: Final = "unwatched"  # activity of a rank that trains on after an error of ddpwatch's
# What an error of ddpwatch's may turn off in a rank. WATCHING is all of it.
Feature = Literal[
    "watching", "bucket layouts", "ready times", "process groups", "collectives", "own collectives", "buffer waits",
    "validations", "data waits", "saves", "compilations", "garbage collections", "marks", "stacks", "heartbeats",
    "closing", "stack samples", "counts", "memory", "profiles",
]  # fmt: skip
FEATURES: Final[tuple[str, ...]] = get_args(Feature)
WATCHING: Final = "watching"
STACK_SAMPLES: Final = "stack samples"
PROFILES: Final = "profiles"
GPU: Final = "GPU"  # in place of a phase: what a GPU has done
OUTSIDE: Final = "outside of operators"  # in place of one


class FrameError(DdpwatchError):
    """A frame that ddpwatch cannot read.

    Attributes:
        reason: A short, countable word.
        unpacked_bytes: What was unpacked of its columns to find that.
    """

    def __init__(self, reason: str, detail: str = "", unpacked_bytes: int = 0) -> None:
        super().__init__(f"frame refused: {reason}", detail)
        self.reason = reason
        self.unpacked_bytes = unpacked_bytes


class Hello(msgspec.Struct, tag="hello", tag_field="type", kw_only=True, omit_defaults=True):
    """Who a rank is. Sent after attaching, before its first step.

    ``boot_id`` and ``time_ns`` (the Linux time namespace) together name the clock the rank stamps with. ``boot_id``,
    ``pid_ns`` (the Linux pid namespace), ``pid`` and ``start_ticks`` (its start, in clock ticks since boot) name its
    process. Sent again to a collector that was started again. ``previous`` is the run that the job was before torchrun
    started this host's ranks again: after a failure, or when a node left or joined. ``threads`` are those of torch's
    operations on a CPU, ``cores`` how many the rank may use; 0 if that is not known. ``peak_flops`` is what its device
    does at best in a second (FLOP/s), where the job's environment says that.
    """

    run_id: Name
    attempt: Count = 0
    rank: Rank
    local_rank: Rank = 0
    world_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    host: Name
    pid: Count
    boot_id: Name = ""
    time_ns: Name = ""
    pid_ns: Name = ""
    start_ticks: Count = 0
    device_kind: Name = "cpu"
    device_name: Name = ""
    device_uuid: Name = ""
    backend: Name = ""
    torch: Name = ""
    module: Name = ""
    parameters: Count = 0
    timing_source: Name = "host"
    script: Name = ""
    ddp: dict[Name, bool | int | float | Name | None] = {}
    previous: Name = ""
    threads: Count = 0
    cores: Count = 0
    peak_flops: float = 0.0


class Group(msgspec.Struct, tag="group", tag_field="type", kw_only=True, omit_defaults=True):
    """A process group whose collectives a rank reports. Sent before its first collective.

    ``id`` is the same on all members, and in no two groups of a job: `DEFAULT_GROUP` for the group of all ranks,
    otherwise a hash of torch's name for the group and of its members. ``ranks`` are global ranks, in ascending order.
    ``kind`` is "data parallel", and with FSDP2 "sharding" or "replication".
    """

    rank: Rank
    id: Count
    name: Name = ""
    ranks: Annotated[list[Rank], Meta(max_length=1 << 20)]
    kind: Name = "data parallel"
    backend: Name = ""


class BucketLayout(msgspec.Struct, array_like=True):
    """One gradient bucket: index, size on the wire in bytes, and which parameters (positions in ``params``).

    With FSDP2, a parameter group: ``name`` is that of its module. In a loop without a wrapper, a place that issues
    collectives.
    """

    index: Count
    nbytes: Count
    params: Annotated[list[Count], Meta(max_length=65536)]
    name: Name = ""


class Layout(msgspec.Struct, tag="layout", tag_field="type", kw_only=True, omit_defaults=True):
    """How one module's parameters are grouped into buckets, which ``group`` reduces.

    ``epoch`` counts the layouts of a module: 1 is the warm-up bucket, the first rebuild makes 2. Parameter ids in a
    :class:`Step` are ``param_base`` + position in ``params``, so that several modules share one numbering.

    Of each parameter, ``param_bytes`` is the size of its gradient, ``param_rows`` its first dimension (0 for vectors
    and scalars) and ``param_kind`` its type and device, e.g. ``float32 cpu``, with ``sparse`` behind them where the
    gradient is.

    ``kind`` is ``group`` if the buckets are the parameter groups of FSDP2, which its collectives carry whole, and
    ``call`` if they are the places that issue collectives of any size, in any group: of `OWN_COLLECTIVES`. A place's
    index follows from its name, and each rank says those that it has come by.
    ``comm_hook`` is DDP's name of the module's comm hook, empty without one.
    """

    rank: Rank
    module: Count = 0
    module_name: Name = ""
    kind: LayoutKind = "bucket"
    group: Count = DEFAULT_GROUP
    epoch: Count = 1
    comm_hook: Name = ""
    param_base: Count = 0
    params: Annotated[list[Name], Meta(max_length=65536)]
    param_bytes: Annotated[list[Count], Meta(max_length=65536)] = []
    param_rows: Annotated[list[Count], Meta(max_length=65536)] = []
    param_kind: Annotated[list[Name], Meta(max_length=65536)] = []
    buckets: Annotated[list[BucketLayout], Meta(max_length=65536)]

    def __post_init__(self) -> None:
        columns: tuple[Sequence[object], ...] = (self.param_bytes, self.param_rows, self.param_kind)
        if any(column and len(column) != len(self.params) for column in columns):
            raise ValueError("parameter columns differ in length")


class Span(msgspec.Struct, array_like=True, gc=False):
    """One phase of a step: [start, end) in ns from the step's start."""

    phase: PhaseName
    start: Ns
    end: Ns


class Step(msgspec.Struct, tag="step", tag_field="type", kw_only=True, omit_defaults=True, gc=False):
    """One optimizer step of one rank, sent after the step.

    ``spans`` come from the hooks: ``forward``, ``backward`` (first gradient to the end of the graph), ``sync`` (from
    there until DDP has waited for the buckets), ``optimizer``. The hook columns hold when each parameter's gradient was
    accumulated, in order.

    The ``comm_…`` columns are the step's collectives in launch order. ``comm_label`` is the bucket's index, which
    occurs once per synced backward. ``comm_group`` is empty if all are in `DEFAULT_GROUP`, ``comm_op`` if all are
    all-reduces of buckets, ``comm_seq`` if the group does not count. Otherwise ``comm_first_seq`` is the sequence
    number of the first collective in its group, and ``comm_seq`` are the differences to it: all members give a
    collective the same number. ``comm_start`` is when the wire was free for it, empty where that is not known.
    ``comm_wait_begin`` and ``comm_wait_end`` are when the training thread (or the GPU's compute stream) started and
    stopped to wait for it: with FSDP2, where every wait is explicit, and empty elsewhere. Its ``comm_label`` is the
    index of a parameter group.

    ``data`` are the stretches that the training loop waited inside a DataLoader's ``next``. It is None in an
    ``unwatched`` step, and if the loop uses no DataLoader as far as the rank can see.

    ``reduced`` is False if a comm hook handed every bucket back at once, with nothing communicated. A ``shadow`` step
    has no ``comm_done``, and one in eight has hook columns; its launches are derived from DDP's own ready times, or
    stamped on a GPU. An ``unwatched`` step has its start, its end, its CPU time if a watched step is near, and nothing
    else. An ``unresolved`` step has no duration either, which is then 0, and its start is the time at which the host
    enqueued it.

    ``clock_error_ns`` bounds how far the step's start may lie from the truth, where a GPU stamped it: its clock is
    mapped to the host's.

    ``own_ns`` is the time that ddpwatch's hooks measure of themselves, ``sender_ns`` the CPU time of its sender thread
    since the previous frame, and ``cpu_ns`` the CPU time of the rank's process without that thread since the end of the
    previous step.
    """

    rank: Rank
    step: Count
    status: StepStatus = "ok"
    synced: bool = True
    micro_steps: Count = 1
    epoch: Count = 1
    start_ns: Ns
    duration_ns: Annotated[int, Meta(ge=0, lt=1 << 62)]
    spans: Annotated[list[Span], Meta(max_length=65536)] = []
    hook_param: Column = []
    hook_ns: Column = []
    comm_first_seq: Count | None = None
    comm_group: Column = []
    comm_seq: Column = []
    comm_op: Annotated[list[CollectiveOp], Meta(max_length=65536)] = []
    comm_module: Column = []
    comm_label: Column = []
    comm_bytes: Column = []
    comm_ready: SparseColumn = []
    comm_launch: Column = []
    comm_start: SparseColumn = []
    comm_done: SparseColumn = []
    comm_wait_begin: SparseColumn = []
    comm_wait_end: SparseColumn = []
    data: Annotated[list[tuple[Ns, Ns]], Meta(max_length=65536)] | None = None
    reduced: bool = True
    clock_error_ns: Count | None = None
    own_ns: Count = 0
    sender_ns: Count = 0
    cpu_ns: Count | None = None
    dropped: Count = 0

    def __post_init__(self) -> None:
        if len(self.hook_param) != len(self.hook_ns):
            raise ValueError("hook columns differ in length")
        size = len(self.comm_label)
        # No loop: every frame comes along here
        same = size == len(self.comm_module) == len(self.comm_bytes) == len(self.comm_ready)
        if not (same and size == len(self.comm_launch) == len(self.comm_done)):
            raise ValueError("bucket columns differ in length")
        waits = (self.comm_wait_begin, self.comm_wait_end)
        optional: tuple[Sequence[object], ...] = (self.comm_group, self.comm_seq, self.comm_op, self.comm_start, *waits)
        for given in optional:
            if given and len(given) != size:
                raise ValueError("bucket columns differ in length")


class Trained(msgspec.Struct, array_like=True, gc=False):
    """What a rank has trained on before its step ``step``; None of what it does not count. FLOPs are the model's."""

    step: Count
    samples: Count | None = None
    tokens: Count | None = None
    flops: Annotated[float, Meta(ge=0)] | None = None


class Beat(msgspec.Struct, tag="beat", tag_field="type", kw_only=True, omit_defaults=True):
    """A rank's sign of life, about twice a second: where it is now, and which buckets it waits for.

    ``step`` is the one that it is in: an optimizer's end begins the next.

    ``issued`` is how many collectives it has issued, where its process groups count them, and ``issued_in`` how many in
    which group: pairs of a group's id and a count. The phase is empty in a bare step; there, these show which
    rank the others wait for.

    ``activity`` is what the rank does besides, since ``activity_since_ns``, and what may last: ``data`` (a wait for the
    DataLoader), ``save`` (``torch.save`` and others), ``compile``, ``validation``, ``graph`` (CUDA graphs, in which no
    hook runs), and `NO_LONGER_WATCHED`.

    ``trained`` is None until it counts something. Of its GPU's memory, torch's allocator has ``memory_reserved`` bytes.
    Tensors use ``memory_allocated`` of them, and once used ``memory_peak``.
    """

    rank: Rank
    at_ns: Ns
    step: Count
    phase: Name
    since_ns: Ns
    last_hook: Count | None = None
    in_flight: Annotated[list[Count], Meta(max_length=65536)] = []
    issued: Count | None = None
    issued_in: Annotated[list[tuple[Count, Count]], Meta(max_length=65536)] = []
    activity: Name = ""
    activity_since_ns: Ns = 0
    dropped: Count = 0
    trained: Trained | None = None
    memory_allocated: Count | None = None
    memory_reserved: Count | None = None
    memory_peak: Count | None = None


class Mark(msgspec.Struct, tag="mark", tag_field="type", kw_only=True, omit_defaults=True):
    """A named moment (``end_ns`` None) or stretch on a rank's clock.

    ``kind`` is ``user`` for `ddpwatch.mark`, and where an error of ddpwatch's turns something off. The others are
    automatic: a garbage collection, a wait for the DataLoader, a save, a compilation, a validation.

    ``off`` is the feature that went off, `WATCHING` for all of them, in the rank's step ``step``; the reason is in
    ``name``, after a colon.

    ``workers`` is how many the DataLoader has that a rank waits for, ``persistent`` whether they stay, and ``ready``
    whether they had made all that they were asked for when it began to wait.
    """

    rank: Rank
    kind: Literal["user", "gc", "data", "save", "compile", "validation"] = "user"
    name: Name
    start_ns: Ns
    end_ns: Ns | None = None
    off: Name = ""
    step: Count | None = None
    workers: Count | None = None
    persistent: bool = False
    ready: bool = False


BATCH_WAIT: Final = "waiting for data"  # names of marks of kind ``data``
WORKERS_START: Final = "starting workers"
PAUSE_PHASES: Final = {  # what a rank pauses for, by a mark's kind
    "gc": "gc",
    "save": "checkpoint",
    "compile": "compilation",
    "validation": "validation",
}


class BusyProcess(msgspec.Struct):
    """A process of a host that uses much CPU time: ``cpu`` is in percent of a core."""

    pid: Count
    name: Name
    cpu: float


class Device(msgspec.Struct, tag="device", tag_field="type", kw_only=True, omit_defaults=True):
    """One sample of a GPU (NVML) or of a host (psutil, /proc). Utilisation is in percent, memory in bytes.

    ``throttle_reasons`` are NVML's bits for what limits a GPU's clocks, ``ecc_errors`` its uncorrected memory errors
    since the driver was loaded. Of a host's CPU time, ``steal`` percent went to other guests of its hypervisor, and
    ``iowait`` percent was idle for want of a disk. ``run_queue`` threads run or wait for a core. Some thread waited
    for a core ``cpu_pressure`` percent of the time, for memory ``memory_pressure`` percent, for a disk ``io_pressure``
    percent. The kernel killed ``oom_kills_s`` processes for want of memory. In ``cgroup_throttled``
    percent of its periods, the collector's cgroup, which is rank 0's, had used up its CPU quota. ``net_faulty`` is the
    interface with most faults: an InfiniBand port is an interface, too. ``retransmits_s`` packets were sent again (TCP
    and RDMA), ``congestion_s`` congestion notifications made RDMA slower, ``link_downs_s`` links went down.
    ``link_errors`` are a GPU's since the driver was loaded: PCIe replays, and NVLink's replays, recoveries and CRC
    errors. ``xid`` is the newest critical XID event that came while it was watched, ``xids`` how many did.
    ``busy`` are the processes that used most CPU time in the last seconds, looked for now and then while threads wait
    for cores. ``boot_id`` distinguishes hosts of one name.
    """

    host: Name
    boot_id: Name = ""
    kind: Literal["cpu", "cuda"]
    at_ns: Ns
    index: Count = 0
    uuid: Name = ""
    name: Name = ""
    utilization: float | None = None
    memory_used: Count | None = None
    memory_total: Count | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pcie_tx_bytes_s: float | None = None
    pcie_rx_bytes_s: float | None = None
    nvlink_tx_bytes_s: float | None = None
    nvlink_rx_bytes_s: float | None = None
    net_tx_bytes_s: float | None = None
    net_rx_bytes_s: float | None = None
    max_sm_clock_mhz: float | None = None
    throttle_reasons: Count | None = None
    ecc_errors: Count | None = None
    pcie_width: Count | None = None
    pcie_max_width: Count | None = None
    pcie_generation: Count | None = None
    pcie_max_generation: Count | None = None
    link_errors: Count | None = None
    nvlinks_down: Count | None = None
    xid: Count | None = None
    xids: Count | None = None
    steal: float | None = None
    iowait: float | None = None
    run_queue: Count | None = None
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    io_pressure: float | None = None
    oom_kills_s: float | None = None
    swap_in_bytes_s: float | None = None
    swap_out_bytes_s: float | None = None
    cgroup_throttled: float | None = None
    net_tx_errors_s: float | None = None
    net_rx_errors_s: float | None = None
    net_tx_drops_s: float | None = None
    net_rx_drops_s: float | None = None
    link_downs_s: float | None = None
    retransmits_s: float | None = None
    congestion_s: float | None = None
    net_faulty: Name = ""
    busy: Annotated[list[BusyProcess], Meta(max_length=MOST_BUSY)] = []

    @property
    def key(self) -> DeviceKey:
        """What identifies the device."""
        return self.host, self.boot_id, self.kind, self.index


class Bye(msgspec.Struct, tag="bye", tag_field="type", kw_only=True, omit_defaults=True):
    """The end of a rank (``rank`` set) or of the whole run (``rank`` None, sent by the collector).

    ``phase``, ``step`` and ``in_flight`` are the last that is known of the rank. If it ``exits``, its process is about
    to end, by a code that its exit handlers do not know; else it may go on without ddpwatch.
    """

    rank: Rank | None
    by: Literal["rank", "collector"]
    reason: EndReason
    detail: Name = ""
    signal: Count | None = None
    at_ns: Ns
    step: Count | None = None
    phase: Name = ""
    in_flight: Annotated[list[Count], Meta(max_length=65536)] = []
    exits: bool = False


INTERRUPTED_LAUNCHER: Final = " from the launcher, which got SIGINT"  # in a `Bye`, after the signal that ended a rank


def sends_no_more(message: Bye | Beat) -> bool:
    """Returns whether no step of its rank is to come."""
    return isinstance(message, Bye) or message.activity == NO_LONGER_WATCHED


class Stack(msgspec.Struct, tag="stack", tag_field="type", kw_only=True, omit_defaults=True):
    """Where a rank's threads are: taken once when it does not go on, from ``since_ns`` on; in a pause, one.

    ``text`` has faulthandler's format, most recent call first. The training thread comes first; ``threads`` are all
    there are, and those that have no room are left out.
    """

    rank: Rank
    at_ns: Ns
    since_ns: Ns
    step: Count
    text: Annotated[str, Meta(max_length=32768)]
    threads: Count = 1


class SampledLine(msgspec.Struct, array_like=True):
    """Where a sampled thread was: ``function`` at ``file``:``line``, in the forward of ``module``; empty if unknown.

    It is the innermost call outside of torch and the standard library, and ``inner`` the innermost of all if that is
    another. The phase is that of the step, empty in a bare one.
    """

    phase: Name
    module: Name
    file: Name
    line: Count
    function: Name
    inner: Name = ""


class StackSamples(msgspec.Struct, tag="stack_samples", tag_field="type", kw_only=True, omit_defaults=True):
    """Samples of the training thread's stack, which an order (`ddpwatch.sampling.stack_order`) has asked for.

    ``order`` is its number, ``explained`` the rank that it wants explained, and ``peer`` the one to compare it with,
    None without one. ``slots`` are the steps that were sampled, of which the first and the last only in part.
    The other columns are the samples in turn: in which of these steps, at which of the ``lines``, and the time since
    the sample before, in ns; successive ones of one step and line are one.

    ``count`` is how often it was sampled between ``start_ns`` and ``end_ns``, ``longest_ns`` the longest time without
    a sample, and ``cpu_ns`` the CPU time of the sampling. What the operating system says of the training thread for
    the same time is None if it does not: how long it ran, how long it waited for a core, how often it was made to leave
    one, and how many pages came from a disk. ``input_elements`` are those of the tensors that the model was called with
    in each of the ``slots``, 0 where that is not known, or nothing. ``ordered`` is how many whole steps were asked for,
    and ``cut_short`` why there are fewer, if there are.

    With ``profiler``, it is what torch's profiler says instead: the ``lines`` are operators, or what a GPU did, with
    their ``calls``, and in place of samples are times without what they call. All ``slots`` are whole, ``cpu_ns`` is
    what that added to them, ``obstacle`` says why there is nothing, and ``trace`` has all events
    (`ddpwatch.wire.profile_trace`).
    """

    rank: Rank
    order: Count
    explained: Rank
    peer: Rank | None = None
    start_ns: Ns
    end_ns: Ns
    count: Count
    longest_ns: Count
    cpu_ns: Count | None
    slots: Column
    lines: Annotated[list[SampledLine], Meta(max_length=65536)]
    sample_slot: Column
    sample_line: Column
    sample_ns: Column
    run_ns: Count | None = None
    wait_ns: Count | None = None
    preempted: Count | None = None
    major_faults: Count | None = None
    profiler: bool = False
    calls: Column = []
    input_elements: Column = []
    ordered: Count = 0
    cut_short: Name = ""
    obstacle: Name = ""
    trace: Annotated[bytes, Meta(max_length=MAX_TRACE_BYTES)] = b""

    def __post_init__(self) -> None:
        if len({len(self.sample_slot), len(self.sample_line), len(self.sample_ns)}) > 1:
            raise ValueError("sample columns differ in length")


class Status(msgspec.Struct, tag="status", tag_field="type", kw_only=True, omit_defaults=True):
    """The collector about itself, twice a second.

    ``refused`` counts frames by reason, ``restarts`` how many collectors of this run have died before this one.
    ``lease_ppm`` is what sampling may cost while somebody looks, in ppm of a step; None while nobody does.
    ``cpu_ns`` is the CPU time of its process so far, and ``here`` how many running ranks it serves on its own node.

    ``whole`` is what to type for the whole run, on a host that shows only its own ranks. ``order`` is the number of the
    order to sample stacks that ranks have, 0 without one: others wait for their turn.
    """

    at_ns: Ns
    frames: Count
    bytes: Count
    refused: dict[Name, Count] = {}
    recording: Name = ""
    recording_bytes: Count | None = None
    recording_error: Name = ""
    restarts: Count = 0
    lease_ppm: Count | None = None
    cpu_ns: Count | None = None
    here: Count = 0
    whole: Name = ""
    order: Count = 0


class RankSample(msgspec.Struct, tag="rank_sample", tag_field="type", kw_only=True, omit_defaults=True):
    """What the operating system denied a rank in the ``span_ns`` before ``at_ns``, on the collector's clock.

    ``step`` is the one that the rank was in by its newest heartbeat, of which ``memory_reserved`` is, too: collectors
    keep samples for late viewers, but no heartbeats.

    ``run_ns`` is how long a thread of the rank ran, ``wait_ns`` how long it was ready to run and waited for a core: of
    the thread that wanted to run longest. ``preempted`` counts how often the main thread had to give up its core,
    ``swapped_bytes`` is how much of the rank's memory is swapped out. Of ranks that the collector can see, on Linux.

    ``memory_bytes`` is the memory that only the rank's end or itself can free: all but files' pages. Its cgroup or host
    has ``memory_left_bytes`` more before it is full.

    ``workers`` is how many DataLoader workers the rank has: together they ran ``workers_run_ns``, were ready to run for
    ``workers_wait_ns`` more, and read ``workers_read_bytes`` from disks; None without any.
    """

    rank: Rank
    at_ns: Ns
    span_ns: Annotated[int, Meta(gt=0, lt=1 << 62)]
    run_ns: Count | None = None
    wait_ns: Count | None = None
    preempted: Count | None = None
    swapped_bytes: Count | None = None
    memory_bytes: Count | None = None
    memory_left_bytes: Count | None = None
    workers: Count | None = None
    workers_run_ns: Count | None = None
    workers_wait_ns: Count | None = None
    workers_read_bytes: Count | None = None
    step: Count | None = None
    memory_reserved: Count | None = None


class NodeStep(msgspec.Struct, tag="node_step", tag_field="type", kw_only=True, omit_defaults=True):
    """One step of a node's ranks, as its agent sends it up. `ddpwatch.wire.node_step` packs and expands it.

    ``packed`` holds the Steps of the ``ranks``, compressed; all is there but the hook columns that the agent left out.
    ``longest_ns`` is how long it took the slowest of them, 0 from an agent that does not say.
    """

    node: Count
    step: Count
    ranks: Annotated[list[Rank], Meta(min_length=1, max_length=MAX_NODE_RANKS)]
    packed: Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
    longest_ns: Ns = 0

    def __post_init__(self) -> None:
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError("a rank occurs twice")


class ClockExchange(msgspec.Struct, tag="clock_exchange", tag_field="type", kw_only=True, omit_defaults=True):
    """A ping of a node's agent and the root's answer, which bound how the two clocks differ.

    ``sent_ns`` and ``returned_ns`` are on the node's clock, ``received_ns`` and ``replied_ns`` on the root's. Boot and
    time namespace name the clocks, as in :class:`Hello`.
    """

    node: Count
    node_boot_id: Name
    node_time_ns: Name = ""
    root_boot_id: Name
    root_time_ns: Name = ""
    sent_ns: Ns
    received_ns: Ns
    replied_ns: Ns
    returned_ns: Ns


class Node(msgspec.Struct, tag="node", tag_field="type", kw_only=True, omit_defaults=True):
    """One node of the run, as the root sees it. Sent when it joins, on every change, and every 2 s.

    ``node`` is the number by which its NodeSteps and ClockExchanges name it. ``at_ns`` and ``seen_ns``, when its agent
    last sent something, are times of the root's clock. The ranks of a node that is not ``connected`` are unseen:
    nothing is known of them, and they are not to blame. ``dropped`` counts frames that the agent has not sent, because
    the root or the network was too slow.
    """

    node: Count
    host: Name
    ranks: Annotated[list[Rank], Meta(max_length=MAX_NODE_RANKS)] = []
    at_ns: Ns
    seen_ns: Ns
    connected: bool = True
    dropped: Count = 0


# Recordings rely on the order: append only.
Message = (
    Hello
    | Layout
    | Step
    | Beat
    | Mark
    | Device
    | Bye
    | Status
    | Group
    | Stack
    | RankSample
    | NodeStep
    | ClockExchange
    | Node
    | StackSamples
)
MESSAGE_TYPES: Final[dict[str, type[msgspec.Struct]]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(Message)
}
RANK_MESSAGES: Final = (Hello, Group, Layout, Step, Beat, Mark, Bye, Stack, StackSamples)

_encoder = msgspec.msgpack.Encoder()


def run_before(named: Mapping[int, str]) -> str:
    """Returns the run that a job was before, given what the hello of each rank names; empty if none does.

    That is the one that most ranks name, and of several that of the lowest rank: the same one everywhere.
    """
    counts = Counter(run_id for _, run_id in sorted(named.items()) if run_id)
    return max(counts, key=counts.__getitem__, default="")  # of equals, the first


def encode(message: Message) -> bytes:
    """Serialises one message to a frame."""
    return _encoder.encode(message)


@cache
def _decoder() -> msgspec.msgpack.Decoder[Message]:
    """Makes it on first use: a rank only sends, and would pay 2 ms for it."""
    return msgspec.msgpack.Decoder(Message)


def decode(frame: bytes | memoryview) -> Message:
    """Parses and validates one frame.

    Raises:
        FrameError: The frame is too large, not msgpack, of an unknown type, or does not match its type.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError("oversize", f"{len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    try:
        return _decoder().decode(frame)
    except msgspec.ValidationError as error:
        raise FrameError("unknown type" if "Invalid value" in str(error) else "invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError("not msgpack", str(error)) from None


def is_step(frame: bytes) -> bool:
    """Recognizes by its first bytes a frame that holds a step, of a rank or of a node. Decodes nothing.

    The type comes first in what `encode` returns. False for what others have encoded in another order.
    """
    return frame[:20].find(b"\xa4type\xa4step") > 0 or frame[:20].find(b"\xa4type\xa9node_step") > 0


def type_name(message: Message) -> str:
    """Returns the ``type`` a message carries in its frame."""
    return str(type(message).__struct_config__.tag)
