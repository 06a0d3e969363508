"""Records of one step and of one bucket, as the hooks fill them in. No torch, no clock, no thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from operator import itemgetter
from typing import NamedTuple

from ddpwatch.common.intervals import Intervals, subtract, union
from ddpwatch.sampling.levels import BARE
from ddpwatch.wire.messages import (
    ALL_REDUCE,
    DEFAULT_GROUP,
    OWN_COLLECTIVES,
    CollectiveOp,
    PhaseName,
    Span,
    Step,
    StepStatus,
)

PhaseSpan = tuple[PhaseName, int, int]


class RecordedBucket(NamedTuple):
    """One row of the columns of a `Step`: stamps are offsets from its start, ``seq`` is absolute."""

    launch: int
    module: int
    label: int
    nbytes: int
    ready: int | None
    start: int | None
    done: int | None
    group: int = DEFAULT_GROUP
    seq: int | None = None
    op: CollectiveOp = ALL_REDUCE
    wait_begin: int | None = None
    wait_end: int | None = None


class BucketRecord:
    """One collective: a bucket of one backward, or what FSDP2 does with a parameter group. Stamps are absolute ns.

    None is not measured. The thread that completes a collective writes ``done``, the training thread all else. A single
    attribute store needs no lock. ``start`` is when the wire was free for the collective, None where that is not known;
    ``group`` the id of its process group, and ``seq`` its sequence number there. ``wait_begin`` is when the training
    thread started to wait for it; without a ``wait_end``, that is over when the collective is done.
    """

    __slots__ = (
        "done",
        "group",
        "idle",
        "index",
        "launch",
        "module",
        "nbytes",
        "op",
        "ready",
        "seq",
        "start",
        "wait_begin",
        "wait_end",
    )

    def __init__(self, module: int, index: int, nbytes: int, launch: int) -> None:
        self.module = module
        self.index = index
        self.nbytes = nbytes
        self.launch = launch
        self.ready: int | None = None
        self.start: int | None = None
        self.done: int | None = None
        self.group = DEFAULT_GROUP
        self.seq: int | None = None
        self.op: CollectiveOp = ALL_REDUCE
        self.wait_begin: int | None = None
        self.wait_end: int | None = None
        self.idle = False  # its comm hook returned a finished result at once: nothing was communicated

    def row(self, start: int) -> RecordedBucket:
        """Returns the bucket's columns in a `Step`: stamps are offsets from ``start``."""
        stamps = (self.ready, self.start, self.done, *(self.wait or (None, None)))
        ready, free, done, began, ended = (None if at is None else at - start for at in stamps)
        which = (self.launch - start, self.module, self.index, self.nbytes)
        return RecordedBucket(*which, ready, free, done, self.group, self.seq, self.op, began, ended)

    @property
    def wait(self) -> tuple[int, int] | None:
        """When the training thread waited for it; None if that is not known."""
        end = self.done if self.wait_end is None else self.wait_end
        return None if self.wait_begin is None or end is None else (self.wait_begin, max(self.wait_begin, end))


class StepRecord:
    """A step being recorded. Stamps are absolute ns; `message` makes them offsets.

    ``step`` is the rank's own count. ``slot`` is the number by which all ranks choose alike what to record: how many
    steps with synchronised gradients there were, and steps since then. A skipped batch does not change it for long.
    """

    __slots__ = (
        "backwards",
        "buckets",
        "clock_error_ns",
        "cpu_ns",
        "data",
        "derived",
        "end",
        "ends",
        "epoch",
        "first_seq",
        "hooks",
        "last_hook",
        "later",
        "own_ns",
        "reductions",
        "resolved",
        "sent",
        "slot",
        "spans",
        "start",
        "status",
        "step",
        "untimed",
    )  # fmt: skip

    def __init__(self, step: int, start: int) -> None:
        self.step = self.slot = step
        self.start = start
        self.end = start
        self.ends: list[int] = []  # of the steps before its last one, if it is of a stretch of bare steps
        self.sent = 0  # messages; written by the sender thread
        self.status: StepStatus = "ok"
        self.epoch = 0
        self.backwards = 0
        self.spans: list[PhaseSpan] = []
        self.data: list[tuple[int, int]] | None = None  # waits for data on the host; None if no DataLoader was seen
        self.buckets: list[BucketRecord] = []
        self.derived: list[RecordedBucket] = []  # buckets whose launch was not seen
        self.hooks: list[tuple[int, int]] = []
        self.last_hook: int | None = None  # the parameter whose gradient came last, once that is derived
        self.later: list[Callable[[StepRecord], None]] = []  # work left to the sender thread
        self.own_ns = 0
        self.reductions = 0
        self.first_seq: int | None = None  # of the collectives of its first backward
        self.cpu_ns: int | None = None
        self.clock_error_ns: int | None = None  # how far the host times of GPU stamps may lie from the truth
        self.untimed = False  # completions cannot be stamped here
        self.resolved = True  # no stamp waits for the GPU

    def settled(self) -> bool:
        """Returns whether every launched bucket has its completion stamp (or never gets one)."""
        return self.resolved and (self.untimed or all(bucket.done is not None for bucket in self.buckets))

    @property
    def steps(self) -> int:
        """How many steps of it have not been sent: one, but for a stretch of bare steps."""
        return 1 + len(self.ends) - self.sent

    def durations(self) -> Iterator[int]:
        """Yields how long each of its steps took (ns)."""
        for start, end in pairwise((self.start, *self.ends, self.end)):
            yield max(0, end - start)

    def messages(self, rank: int, dropped: int, is_open: bool = False) -> Iterator[Step]:
        """Yields the messages of its steps that have not been sent, in order. Call it on the sender thread.

        Args:
            rank: Put into the messages.
            dropped: Put into the messages.
            is_open: Whether its last step goes on, and has no message yet. Only of a stretch.
        """
        if self.status != BARE and not self.ends:
            yield self.message(rank, dropped)
            return
        stamps = [self.start, *self.ends] if is_open else [self.start, *self.ends, self.end]
        own_ns = max(0, self.own_ns) // (1 + len(self.ends))
        for step, (start, end) in islice(enumerate(pairwise(stamps), self.step), self.sent, None):
            yield Step(
                rank=rank, step=step, status=self.status, synced=self.reductions > 0, micro_steps=self.backwards,
                epoch=self.epoch, start_ns=start, duration_ns=max(0, end - start),
                clock_error_ns=self.clock_error_ns, own_ns=own_ns, cpu_ns=self.cpu_ns, dropped=dropped,
            )  # fmt: skip

    def message(self, rank: int, dropped: int) -> Step:
        """Returns the record of one step as a message, after the work that was left for later.

        Call it on the sender thread.
        """
        if self.status == BARE:  # most steps of a fast job, and this competes with the training for its core
            return next(self.messages(rank, dropped))
        later, self.later = self.later, []
        for work in later:
            work(self)
        start = self.start
        rows = sorted([*(bucket.row(start) for bucket in self.buckets), *self.derived], key=itemgetter(0))
        columns = zip(*rows, strict=True) if rows else [()] * len(RecordedBucket._fields)
        launch, module, label, nbytes, ready, free, done, group, seq, op, began, ended = map(list, columns)
        waits = union(wait for bucket in self.buckets if (wait := bucket.wait) is not None)
        of_wrapper = [bucket for bucket in self.buckets if bucket.module != OWN_COLLECTIVES]
        by_ddp = bool(rows) and all(one.op == ALL_REDUCE and one.wait is None for one in of_wrapper)
        synced = bool(rows) or self.reductions > 0
        first_seq = self.first_seq if synced else None
        hooks, spans = sorted(self.hooks, key=itemgetter(1)), without(waits, self.spans, by_ddp)
        return Step(
            rank=rank,
            step=self.step,
            status=self.status,
            synced=synced,
            micro_steps=self.backwards,
            epoch=self.epoch,
            start_ns=start,
            duration_ns=max(0, self.end - start),
            spans=[Span(phase, first - start, last - start) for phase, first, last in spans],
            hook_param=[param for param, _ in hooks],
            hook_ns=[at - start for _, at in hooks],
            comm_first_seq=first_seq,
            comm_group=group if any(group) else [],
            comm_seq=[] if first_seq is None or None in seq else [number - first_seq for number in seq],
            comm_op=op if waits or any(one != ALL_REDUCE for one in op) else [],
            comm_module=module,
            comm_label=label,
            comm_bytes=nbytes,
            comm_ready=ready,
            comm_launch=launch,
            comm_start=free if any(at is not None for at in free) else [],
            comm_done=done,
            comm_wait_begin=began if waits else [],
            comm_wait_end=ended if waits else [],
            data=None if self.data is None else [(first - start, last - start) for first, last in self.data],
            reduced=not of_wrapper or not all(bucket.idle for bucket in of_wrapper),
            clock_error_ns=self.clock_error_ns,
            own_ns=max(0, self.own_ns),
            cpu_ns=self.cpu_ns,
            dropped=dropped,
        )


def joined(parts: Sequence[StepRecord]) -> StepRecord:
    """Returns the one step that these are parts of."""
    record = parts[0]
    for part in parts[1:]:
        record.end, record.epoch = part.end, part.epoch
        record.backwards += part.backwards
        record.reductions += part.reductions
        record.own_ns += part.own_ns
        record.cpu_ns = None if record.cpu_ns is None or part.cpu_ns is None else record.cpu_ns + part.cpu_ns
        record.spans += part.spans
        record.buckets += part.buckets
        record.hooks += part.hooks
        record.later += part.later
        record.untimed = record.untimed or part.untimed
        if part.data is not None:
            record.data = [*(record.data or []), *part.data]
    return record


def without(waits: Intervals, spans: list[PhaseSpan], by_ddp: bool = False) -> list[PhaseSpan]:
    """Returns the spans without the waits for collectives, which become spans of their own.

    Args:
        waits: As far as they are known.
        spans: The phases.
        by_ddp: Whether DDP waits besides, which its phases show.
    """
    if not waits:
        return spans
    found: list[PhaseSpan] = [("sync", start, end) for start, end in waits]
    for phase, first, last in spans:
        if first == last and by_ddp:  # a forward that has only waited for buffers so far
            found.append((phase, first, last))
        elif phase != "sync" or by_ddp:
            found += [(phase, start, end) for start, end in subtract([(first, last)], waits)]
    return sorted(found, key=itemgetter(1))
