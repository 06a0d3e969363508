"""Records of one step and of one bucket, as the hooks fill them in. No torch, no clock, no thread."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

from ddpwatch.messages import PhaseName, Span, Step, StepStatus

BucketColumns = tuple[int, int, int, int, "int | None", "int | None"]  # launch, module, index, bytes, ready, done


class BucketRecord:
    """One bucket of one backward. All stamps are absolute ns; None is not measured.

    The thread that completes a collective writes ``done``, the training thread all else. A single attribute store
    needs no lock.
    """

    __slots__ = ("done", "idle", "index", "launch", "module", "nbytes", "ready")

    def __init__(self, module: int, index: int, nbytes: int, launch: int) -> None:
        self.module = module
        self.index = index
        self.nbytes = nbytes
        self.launch = launch
        self.ready: int | None = None
        self.done: int | None = None
        self.idle = False  # its comm hook returned a finished result at once: nothing was communicated

    def row(self, start: int) -> BucketColumns:
        """The bucket's columns in a `Step`: stamps are offsets from ``start``."""
        ready = None if self.ready is None else self.ready - start
        done = None if self.done is None else self.done - start
        return self.launch - start, self.module, self.index, self.nbytes, ready, done


class StepRecord:
    """A step being recorded. Stamps are absolute ns; `message` makes them offsets."""

    __slots__ = (
        "backwards", "buckets", "cpu_ns", "data", "derived", "end", "epoch", "hooks", "last_hook", "later",
        "own_ns", "reductions", "resolved", "spans", "start", "status", "step", "untimed",
    )  # fmt: skip

    def __init__(self, step: int, start: int) -> None:
        self.step = step
        self.start = start
        self.end = start
        self.status: StepStatus = "ok"
        self.epoch = 0
        self.backwards = 0
        self.spans: list[tuple[PhaseName, int, int]] = []
        self.data: list[tuple[int, int]] | None = None  # waits for data on the host; None if no DataLoader was seen
        self.buckets: list[BucketRecord] = []
        self.derived: list[BucketColumns] = []  # buckets whose launch was not seen
        self.hooks: list[tuple[int, int]] = []
        self.last_hook: int | None = None  # the parameter whose gradient came last, once that is derived
        self.later: list[Callable[[StepRecord], None]] = []  # work left to the sender thread
        self.own_ns = 0
        self.reductions = 0
        self.cpu_ns: int | None = None
        self.untimed = False  # completions cannot be stamped here
        self.resolved = True  # no stamp waits for the GPU

    def settled(self) -> bool:
        """Whether every launched bucket has its completion stamp (or never gets one)."""
        return self.resolved and (self.untimed or all(bucket.done is not None for bucket in self.buckets))

    def message(self, rank: int, dropped: int) -> Step:
        """The record as a message, after the work that was left for later. Call it on the sender thread."""
        later, self.later = self.later, []
        for work in later:
            work(self)
        start = self.start
        rows = sorted([*(bucket.row(start) for bucket in self.buckets), *self.derived], key=itemgetter(0))
        columns = zip(*rows, strict=True) if rows else [()] * 6
        launch, module, index, nbytes, ready, done = map(list, columns)
        hooks = sorted(self.hooks, key=itemgetter(1))
        return Step(
            rank=rank,
            step=self.step,
            status=self.status,
            synced=bool(rows) or self.reductions > 0,
            micro_steps=self.backwards,
            epoch=self.epoch,
            start_ns=start,
            duration_ns=max(0, self.end - start),
            spans=[Span(phase, first - start, last - start) for phase, first, last in self.spans],
            hook_param=[param for param, _ in hooks],
            hook_ns=[at - start for _, at in hooks],
            comm_module=module,
            comm_label=index,
            comm_bytes=nbytes,
            comm_ready=ready,
            comm_launch=launch,
            comm_done=done,
            data=None if self.data is None else [(first - start, last - start) for first, last in self.data],
            reduced=not self.buckets or not all(bucket.idle for bucket in self.buckets),
            own_ns=self.own_ns,
            cpu_ns=self.cpu_ns,
            dropped=dropped,
        )
