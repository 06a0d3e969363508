"""StepRecorder: turns stamps from hooks into one record per step. Knows no torch, no socket, no thread.

The training thread calls it at every hook, so each method only takes a stamp and stores it. ``BucketRecord.done``
is the one field another thread writes (a collective's completion callback); a single attribute store needs no lock.

A step runs from the end of the previous step's optimizer to the end of its own. Since several optimizers may
step one after the other, a step is closed by the *next* forward, and ends where the last optimizer ended. In a
process that never calls an optimizer (or frees it into the backward), a synced backward ends the step instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import itemgetter
from typing import Literal, Protocol

from ddpwatch.blackbox import BlackBox
from ddpwatch.messages import Span, Step, StepStatus
from ddpwatch.sampling.levels import FULL, SHADOW, UNWATCHED, is_counted, is_timed, is_watched
from ddpwatch.sampling.schedule import SamplingSchedule

Clock = Callable[[], int]
BucketColumns = tuple[int, int, int, int, "int | None", "int | None"]  # launch, module, index, bytes, ready, done
MOST_REDUCTIONS = 64  # in one step; then every reduced backward is a step of its own
MOST_FORWARDS = 256  # without a backward; more are an evaluation, though with gradients on
Phase = Literal["", "input", "forward", "between", "backward", "sync", "optimizer"]  # "": in an unwatched step


class BucketRecord:
    """One bucket of one backward. All stamps are absolute ns; None is not measured."""

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
        """As it travels: stamps are offsets from ``start``."""
        ready = None if self.ready is None else self.ready - start
        done = None if self.done is None else self.done - start
        return self.launch - start, self.module, self.index, self.nbytes, ready, done


class StepRecord:
    """A step being recorded. Stamps are absolute ns; `message` makes them offsets."""

    __slots__ = (
        "backwards", "buckets", "cpu_ns", "derived", "end", "epoch", "hooks", "later",
        "own_ns", "reductions", "resolved", "spans", "start", "status", "step", "untimed",
    )  # fmt: skip

    def __init__(self, step: int, start: int) -> None:
        self.step = step
        self.start = start
        self.end = start
        self.status: StepStatus = "ok"
        self.epoch = 0
        self.backwards = 0
        self.spans: list[tuple[str, int, int]] = []
        self.buckets: list[BucketRecord] = []
        self.derived: list[BucketColumns] = []  # buckets that were not seen
        self.hooks: list[tuple[int, int]] = []
        self.later: list[Callable[[StepRecord], None]] = []  # work put off to the sender thread
        self.own_ns = 0
        self.reductions = 0
        self.cpu_ns: int | None = None
        self.untimed = False  # completions cannot be stamped here
        self.resolved = True  # no stamp waits for the GPU

    def settled(self) -> bool:
        """Whether every launched bucket has its completion stamp (or never gets one)."""
        return self.resolved and (self.untimed or all(bucket.done is not None for bucket in self.buckets))

    def message(self, rank: int, dropped: int) -> Step:
        """The record as the frame that travels. Called off the training thread."""
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
            spans=[Span(phase, begin - start, end - start) for phase, begin, end in self.spans],  # type: ignore[arg-type]
            hook_param=[param for param, _ in hooks],
            hook_ns=[at - start for _, at in hooks],
            bucket_module=module,
            bucket_index=index,
            bucket_bytes=nbytes,
            bucket_ready=ready,
            bucket_launch=launch,
            bucket_done=done,
            reduced=not self.buckets or not all(bucket.idle for bucket in self.buckets),
            own_ns=self.own_ns,
            cpu_ns=self.cpu_ns,
            dropped=dropped,
        )


class GpuClock(Protocol):
    """A clock whose stamps are resolved later (`ddpwatch.probe.cuda.CudaClock`)."""

    def __call__(self) -> int:
        """A stamp."""

    def follow(self, record: StepRecord) -> None:
        """Takes a closed record to resolve its stamps."""

    def finish(self) -> None:
        """No record follows."""


class StepRecorder:
    """Follows one process through its steps.

    Args:
        emit: Takes each closed record, in order. Called on the training thread: it must not block.
        clock: Nanoseconds, monotonic. Injected by tests.

    Attributes:
        pace: Chooses the shadow steps (`ddpwatch.sampling.schedule`), once whoever owns the hooks has set it.
        shadow: Whether the open step is one, or unwatched.
        cpu: CPU time of the job in this process, ns.
        lull: Called by whoever knows that the training thread is about to wait for its buckets. Must not block.
        on_validation: Told when a validation began and ended (ns), once training goes on.
        phase: Where training is now; read by the heartbeat thread.
        last_hook: Id of the newest parameter whose gradient is known to have arrived, or None.
        current: The open record, or None before the first forward.
        box: The black box, kept up to date.
        epoch: Number of the bucket layout in force; whoever learns a new layout raises it.
    """

    def __init__(self, emit: Callable[[StepRecord], None], clock: Clock = time.monotonic_ns) -> None:
        self._emit = emit
        self.clock = clock
        self.gpu: GpuClock | None = None
        self.sampling: SamplingSchedule | None = None
        self.shadow = False
        self.cpu: Clock = time.process_time_ns
        self._cpu_ns = 0
        self.current: StepRecord | None = None
        self.box = BlackBox()
        self.phase: Phase = "input"
        self.last_hook: int | None = None
        self.steps = 0
        self.epoch = 0
        self._begin = clock()  # of the phase that is open
        self._forwards = 0  # since the last backward
        self._optimizer_end: int | None = None
        self._optimizer_seen = False
        self._optimizer_depth = 0
        self._synced_end: int | None = None
        self.lull: Callable[[], None] = lambda: None
        self.on_validation: Callable[[int, int], None] = lambda begin, end: None
        self._validation: tuple[int, int] | None = None
        self._outside_until = 0  # what lies between the last step and this is not part of the next one

    @property
    def since(self) -> int:
        """When the phase began, on the host."""
        return int(self._begin)

    def use(self, gpu: GpuClock) -> None:
        """Takes stamps on a GPU from now on."""
        self.gpu = self.clock = gpu

    # -- forward ---------------------------------------------------------------------------------------------

    def forward_begin(self) -> None:
        """A forward of a watched module starts: closes the previous step if it is complete."""
        now = self.clock()
        if self.phase in ("forward", "backward", "sync"):
            self.abort(now)
        elif self.phase == "" and self._forwards >= MOST_FORWARDS:  # no optimizer ends it any more
            self._optimizer_seen = False
            self.abort(now)
        end = self._step_end()
        if end is not None:
            self._close(end)
        if self.current is None:
            if end is None:
                self._cpu_ns = self.cpu()
            self.current = StepRecord(self.steps, now if end is None else max(end, self._outside_until))
            self._outside_until = 0
            self._tell_validation()
            self.current.status = self._kind()
            self.shadow = not is_timed(self.current.status)
            self._forwards = 0
        self._forwards += 1
        if not is_watched(self.current.status):
            self._enter("", now)
            return
        if self._forwards > MOST_FORWARDS:
            self._drop_forwards(self.current, now)
        self._enter("forward", now)

    def _kind(self) -> StepStatus:
        """How much of the step that begins is to be seen. An unwatched one is sure to end only by an optimizer."""
        if self.sampling is None:
            return FULL
        if self._optimizer_seen and self.sampling.is_unwatched(self.steps):
            return UNWATCHED
        return SHADOW if self.sampling.is_shadow(self.steps) else FULL

    def _drop_forwards(self, record: StepRecord, now: int) -> None:
        """Takes the forwards that no backward has followed out of the step, which may begin only now."""
        self._forwards = 1
        while record.spans and record.spans[-1][0] == "forward":
            record.spans.pop()
        if not record.spans:
            begin, _ = self._validation or (record.start, now)
            self._validation = (begin, now)
            record.start = now

    def forward_end(self) -> None:
        """The forward that began last has returned."""
        if self.phase == "forward":
            self._leave("forward", "between")

    # -- outside the steps -----------------------------------------------------------------------------------

    def validation_begin(self) -> None:
        """A forward without gradients begins. Several in a row are one validation."""
        if self.phase == "input" and self._validation is None:
            now = self.clock()
            self._validation = (now, now)

    def validation_end(self) -> None:
        """A forward without gradients has returned."""
        if self.phase == "input" and self._validation is not None:
            self._outside_until = self.clock()
            self._validation = (self._validation[0], self._outside_until)

    def _tell_validation(self) -> None:
        if self._validation is not None:
            self.on_validation(*self._validation)
            self._validation = None

    def saved(self) -> None:
        """A checkpoint has been written."""
        if self.phase == "input":
            self._outside_until = self.clock()

    # -- backward --------------------------------------------------------------------------------------------

    def backward_begin(self) -> bool:
        """The first gradient of a watched output arrived. False if this backward is already open."""
        if self.current is None or self.phase in ("", "backward", "sync"):
            return False
        self.current.backwards += 1
        self._forwards = 0
        self._tell_validation()
        self._enter("backward", self.clock())
        return True

    def backward_compute_end(self) -> None:
        """The autograd graph is done; what follows is waiting for buckets."""
        if self.phase == "backward":
            self._leave("backward", "sync")

    def backward_end(self, reduced: bool | None = None) -> None:
        """The backward call is about to return.

        Args:
            reduced: Whether it has reduced its gradients; whether buckets were launched, if not given.
        """
        if self.phase != "sync":
            return
        self._leave("sync", "between")
        if self.current is not None and (bool(self.current.buckets) if reduced is None else reduced):
            self._synced_end = self._begin
            self.current.reductions += 1
            if self.current.reductions >= MOST_REDUCTIONS:  # no optimizer that we see steps any more
                self._optimizer_seen = False

    def wait_begin(self) -> None:
        """The backward stops to wait for a collective: a synchronous one, inside a hook."""
        if self.phase == "backward":
            self._leave("backward", "sync")

    def wait_end(self) -> None:
        """The backward goes on after `wait_begin`."""
        if self.phase == "sync":
            self._leave("sync", "backward")

    # -- buckets and parameters ------------------------------------------------------------------------------

    def bucket_launch(
        self,
        module: int,
        index: int,
        nbytes: int,
        ready_ns: int | None = None,
        *,
        launch: int | None = None,
    ) -> BucketRecord | None:
        """A bucket's collective is issued. None outside a backward that is being recorded.

        Args:
            module: Number of the watched module.
            index: Bucket index.
            nbytes: Bytes of gradients in the bucket.
            ready_ns: When its last gradient was accumulated (absolute ns), where that is known already.
            launch: When it was issued (absolute ns); now, if not given.
        """
        if self.current is None or self.phase not in ("backward", "sync"):
            return None
        at = self.clock() if launch is None else launch
        bucket = BucketRecord(module, index, nbytes, at)
        bucket.ready = ready_ns
        self.current.buckets.append(bucket)
        self.box.launch(index)
        return bucket

    def bucket_done(self, bucket: BucketRecord, at: int | None = None) -> None:
        """The bucket's result is there, now or at ``at`` (absolute ns). May be called from any thread."""
        bucket.done = self.clock() if at is None else at
        self.box.done(bucket.index)

    def hook_fired(self, param: int, at_ns: int | None = None) -> None:
        """Parameter ``param``'s gradient was accumulated, now or at ``at_ns`` (absolute)."""
        if self.current is not None:
            self.current.hooks.append((param, self.clock() if at_ns is None else at_ns))
            self.last_hook = param

    def charge(self, ns: int) -> None:
        """Adds to the step's own cost: time of ours spent on the training thread."""
        if self.current is not None:
            self.current.own_ns += ns

    def warm_up(self) -> None:
        """The open step learns how to group gradients into buckets: it stays out of every statistic."""
        if self.current is not None:
            self.current.status = "warmup"

    # -- optimizer and step ----------------------------------------------------------------------------------

    def optimizer_begin(self) -> None:
        """An optimizer step starts. Nested ones (a wrapper around another) count as one."""
        self._optimizer_depth += 1
        if self._optimizer_depth == 1 and self.current is not None and self.phase in ("between", "input"):
            self._enter("optimizer", self.clock())

    def optimizer_end(self) -> None:
        """The optimizer step that began last has returned."""
        self._optimizer_depth = max(0, self._optimizer_depth - 1)
        if self._optimizer_depth or self.current is None:
            return
        if self.phase == "":
            self._enter("input", self.clock())
            self._optimizer_end = self._begin
        if self.phase not in ("optimizer", "between"):
            return
        # "between" if a closure ran forward and backward in there: what came after them is the optimizer's own
        self._leave("optimizer", "input")
        self._optimizer_seen = True
        self._optimizer_end = self._begin

    def abort(self, now: int | None = None) -> None:
        """The open step was left by an exception: closes it as aborted, so that the next one starts clean."""
        if self.current is not None:
            self.current.status = "aborted"
            self._close(self.clock() if now is None else now)
        self._optimizer_depth = 0
        self._enter("input", self.clock())

    def finish(self) -> None:
        """The process stops being watched: closes the open step if it is complete, forgets it otherwise."""
        end = self._step_end()
        if end is not None:
            self._close(end)
        self.current = None
        if self.gpu is not None:
            self.gpu.finish()

    # -- inside ----------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: int) -> None:
        self.phase = phase
        self._begin = now
        self.box.enter(phase)

    def _leave(self, phase: Phase, following: Phase) -> None:
        now = self.clock()
        if self.current is not None:
            self.current.spans.append((phase, self._begin, now))
        self.phase = following  # as `_enter` does; a call more is noticeable here (docs/architecture.md)
        self._begin = now
        self.box.enter(following)

    def _step_end(self) -> int | None:
        if self._optimizer_end is not None:
            return self._optimizer_end
        return None if self._optimizer_seen else self._synced_end

    def _close(self, end: int) -> None:
        record, self.current = self.current, None
        self._optimizer_end = self._synced_end = None
        if record is None:
            return
        record.end = end if end >= record.start else record.start
        record.epoch = self.epoch
        before, self._cpu_ns = self._cpu_ns, self.cpu()
        record.cpu_ns = None if self._outside_until else max(0, self._cpu_ns - before)
        if self.sampling is not None and is_counted(record.status):
            period = self.sampling.full if is_timed(record.status) else self.sampling.watched
            period.learn(record.own_ns, record.end - record.start)
        self.steps += 1
        self.box.begin(self.steps)
        if self.gpu is not None:
            self.gpu.follow(record)
        self._emit(record)
