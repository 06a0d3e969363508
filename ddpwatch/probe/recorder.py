"""StepRecorder: turns stamps from hooks into one record per step. Knows no torch, no socket, no thread.

The training thread calls it at every hook, so each method only takes a stamp and stores it.

A step runs from the end of the previous step's optimizer to the end of its own. Since several optimizers may
step one after the other, a step is closed by the *next* forward, and ends where the last optimizer ended. In a
process that never calls an optimizer (or fuses it into the backward), a synced backward ends the step instead. That
shows only later: until the first optimizer steps, such steps are held back, as they may be parts of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ddpwatch.probe.cpu_clock import CpuClock
from ddpwatch.probe.record import BucketRecord, StepRecord, joined
from ddpwatch.run.blackbox import BlackBox, Phase
from ddpwatch.sampling.lease import Lease
from ddpwatch.sampling.levels import BARE, FULL, LEVELS, LIGHT, PROFILED
from ddpwatch.sampling.schedule import SamplingSchedule
from ddpwatch.wire.messages import PhaseName, StepStatus

Clock = Callable[[], int]
LoaderRef = Callable[[], object | None]  # a weak reference to a DataLoader's iterator
MAX_REDUCTIONS = 1024  # in one step; then every reduced backward is a step of its own
HELD_NS = 5_000_000_000  # for so long, steps are held back that the first optimizer may turn out to end
MAX_WAITS = 1024  # for data, between two forwards; of more, only the newest count
MAX_FORWARDS = 256  # without a backward; more are an evaluation, though with gradients on
MAX_BACKWARDS = 4096  # that have reduced nothing, in one step
MAX_COLLECTIVES = 32_768  # of FSDP2's, in one step; more, and no forward that is seen follows
WAITED_NS = 1_000_000  # by a comm hook that returns a finished future: less is no wait, but the call itself
MUCH_WAITED = 0.01  # of a step, for the job's own collectives
STRETCH_NS = 25_000_000  # of bare steps: half of how far ahead the collector grants a budget


def _no_loader() -> None:
    """Returns None, as a reference to no iterator."""


class GpuClock(Protocol):
    """A clock whose stamps get their values later (`ddpwatch.probe.cuda.CudaClock`).

    Attributes:
        captured_ns: When a CUDA graph was captured (host time), if no step has ended since.
    """

    captured_ns: int | None

    def __call__(self) -> int:
        """Returns a stamp of now."""

    def follow(self, record: StepRecord) -> None:
        """Takes a closed record to resolve its stamps."""

    def finish(self) -> None:
        """Takes no record after this."""


class StepProfile(Protocol):
    """torch's profiler, which is to record some steps (`ddpwatch.probe.profiling`).

    Attributes:
        done: Set once nothing more will come.
    """

    done: threading.Event

    def turn(self, slot: int) -> bool:
        """Starts or ends it where a step starts; returns whether that step is not as usual then."""


class OwnCollectives(Protocol):
    """Collectives that neither DDP nor FSDP2 issues (`ddpwatch.probe.own_beside_wrapper`)."""

    def turn(self, on: bool, at: int) -> None:
        """Sees collectives from here on, or none. None was issued since ``at`` (ns)."""

    def take_issued(self, start: int, end: int) -> list[BucketRecord]:
        """Returns what was issued in a step that has ended (ns); nothing if not all of that was seen."""


class StepRecorder:
    """Follows one process through its steps.

    Args:
        emit: Takes each closed record, in order. Called on the training thread: it must not block.
        clock: Nanoseconds, monotonic. Injected by tests.
        cpu_clock: CPU time of the job in this process, ns.
        on_validation: Takes the start and end (ns) of a validation, once training goes on.

    Attributes:
        sampling: Chooses the light and bare steps; None to record every step in full.
        lease: What the sampling may cost while somebody looks.
        profile: What steps are profiled in; None without an order to do so.
        full: Whether the open step is, as far as is known.
        phase: Where training is now; read by the sender thread. Empty in a bare step.
        last_hook: Id of the newest parameter of which `hook_fired` was called, or None.
        current: The open record, or None before the first forward.
        box: The black box, kept up to date.
        epoch: Number of the bucket layout in force; the code that finds a new layout raises it.
        own: The job's own collectives, where they are seen.
        issuing: Whether DDP issues a bucket's collective now.
        forwards: How many there were since the last backward.
        input_elements: Those of the tensors that the model is called with, by slot, in ``lease.sampled``.
    """

    def __init__(
        self,
        emit: Callable[[StepRecord], None],
        clock: Clock = time.monotonic_ns,
        *,
        cpu_clock: Clock = time.process_time_ns,
        on_validation: Callable[[int, int], None] = lambda start, end: None,
    ) -> None:
        self._emit = emit
        self.clock = self._host = clock
        self._cpu = CpuClock(cpu_clock)
        self._on_validation = on_validation
        self.gpu: GpuClock | None = None
        self.sampling: SamplingSchedule | None = None
        self.lease = Lease()
        self.profile: StepProfile | None = None
        self.input_elements: dict[int, int] = {}
        self.full = True
        self._cpu_ns: int | None = 0  # at the end of the step before; None if it was not needed
        self.current: StepRecord | None = None
        self.box = BlackBox()
        self.phase: Phase = "input"
        self.last_hook: int | None = None
        self.steps = 0
        self.epoch = 0
        self.own: OwnCollectives | None = None
        self.issuing = False
        self._stretch_end = 0  # the slot, and the time, at which the open stretch of bare steps ends
        self._stretch_until = 0
        self._synced = 0  # steps that synchronised gradients
        self._unsynced = 0  # steps since the last of these
        self._syncs = False  # whether the open step is to do so
        self._phase_start = clock()
        self.forwards = 0
        self._most_forwards = MAX_FORWARDS  # in a bare step, whose backwards are not seen
        self._optimizer_end: int | None = None
        self._optimizer_seen = False
        self._optimizer_depth = 0
        self._has_updated = self._gave_up = False  # whether an optimizer has ended a step, or was waited for in vain
        self._held: list[StepRecord] = []  # ended by synced backwards, before the first optimizer has stepped
        self._synced_end: int | None = None
        self._validation: tuple[int, int] | None = None
        self._without_gradients = (-1, 0)  # after how many steps, and when, the first such forward of a row started
        self._waits: deque[tuple[int, int]] = deque(maxlen=MAX_WAITS)  # for data, since the last forward
        self._loader: LoaderRef = _no_loader  # the DataLoader iterator that gave the newest batch
        self._feeding: LoaderRef = _no_loader  # the one that feeds the training
        self._validating: LoaderRef | None = None  # the one that feeds the validation under way
        self._activity_end = 0  # what lies between the last step and this is not part of the next one

    @property
    def since(self) -> int:
        """When the phase started, on the host (ns)."""
        return int(self._phase_start)

    @property
    def step(self) -> int:
        """Number of the step that training is in, for any thread: an optimizer's end begins the next."""
        return self.steps + self._has_ended

    @property
    def slot(self) -> int:
        """The slot of that step (see `StepRecord`)."""
        return self._synced + self._unsynced + self._has_ended

    @property
    def _has_ended(self) -> bool:
        """True once an optimizer has ended the newest step, which is counted at the next one's forward."""
        return self.phase == "input" and self.current is not None

    @property
    def validation(self) -> tuple[int, int] | None:
        """The validation since the last step: its start, and the end of its newest forward (ns)."""
        return self._validation

    def use(self, gpu: GpuClock | None = None, sampling: SamplingSchedule | None = None) -> None:
        """Takes stamps on a GPU, and chooses steps by a schedule, from now on. None changes nothing."""
        if gpu is not None:
            self._end_stretch()
            self.gpu = self.clock = gpu
            if self.own is not None:  # they are stamped by the host
                self.own.turn(False, self._host())
                self.own = None
        if sampling is not None:
            self.sampling = sampling

    # -- forward ---------------------------------------------------------------------------------------------

    def forward_goes_by(self, syncs: bool = True) -> bool:
        """Starts a forward; returns whether it is in a stretch of bare steps, where nothing more is to be done.

        Most steps of a fast job start here, in cold caches: a call more is noticeable, and so is a GPU's stamp. Else,
        see `forward_begin`.
        """
        slot = self._synced + 1
        if slot >= self._stretch_end:
            return False
        if self.phase == "":  # one more forward of the open step
            if self.forwards >= self._most_forwards:
                return False
            self._optimizer_depth = 0  # see `forward_begin`
            self.forwards += 1
            self._syncs = self._syncs or syncs
        else:
            end, now, record = self._optimizer_end, self._host(), self.current
            if end is None or record is None or not self._syncs or now >= self._stretch_until:
                return False
            record.ends.append(end)
            self._optimizer_end, self._optimizer_depth, self.forwards = None, 0, 1
            self._synced, self._unsynced, self._syncs = slot, 0, syncs
            self.steps += 1
            self.phase, self._phase_start = "", now
            self.box.begin_bare_step(self.steps, slot)
        if self._waits:
            self._feeding = self._loader
            self._waits.clear()
        return True

    def forward_begin(self, syncs: bool = True) -> None:
        """Starts a forward of a watched module: closes the previous step if it is complete.

        Args:
            syncs: Whether its backward will synchronise gradients.
        """
        # Handed over last: on a GPU that asks at once whether the forward's stamp is passed
        self._hand_over(self._start_forward(syncs))

    def _start_forward(self, syncs: bool) -> StepRecord | None:
        """Returns the previous step, if it is complete, closed and not handed over."""
        now = self._host()
        self._cpu.waited_ns = 0
        self._optimizer_depth = 0  # one that has not returned has raised, or this is its closure's forward
        if self.phase in ("forward", "backward", "sync"):
            self.abort(self._stamp(now))
        elif self.phase == "" and self.forwards >= self._most_forwards:  # no optimizer ends it any more
            self._optimizer_seen = False
            self.abort(self._stamp(now))
        closure_of = self._phase_start if self.phase == "optimizer" else None
        end = self._step_end()
        closed = None if end is None else self._close(end)
        if self.current is None:
            if end is None:
                self._cpu_ns = self._cpu.read()
            start = self._stamp(now) if end is None else max(end, self._activity_end)
            self.current = StepRecord(self.steps, start)
            self.current.slot = self._synced + self._unsynced
            self.current.own_ns -= self._cpu.waited_ns  # this call is charged to it
            self._activity_end, self._syncs = 0, False
            self._report_validation()
            if self.profile is not None and self.profile.turn(self.current.slot):
                now = self._host()
                self.current.status, self.full = PROFILED, True
            else:
                self.current.status = self._level(self.current.slot, now)
                self.full = self.current.status == FULL  # no call of levels here: it runs with cold caches
            self.issuing = False
            if self.own is not None:
                self.own.turn(self.full, now)
            self.forwards = 0
            if self.current.status == BARE:
                self._begin_stretch(self.current, now)
        self.forwards += 1
        self._syncs = self._syncs or syncs
        self._feed(self.current)
        if self.current.status == BARE:
            self._enter("", now)
            return closed
        now = self._stamp(now)
        if self.forwards > MAX_FORWARDS:
            self._drop_forwards(self.current, now)
        elif self.current.backwards >= MAX_BACKWARDS and not self.current.reductions:
            self._drop_backwards(self.current)
        if closure_of is not None:  # an optimizer before the forward shows that it calls this as its closure
            self.current.spans.append(("optimizer", closure_of, now))
        self._enter("forward", now)
        return closed

    def _stamp(self, now: int) -> int:
        """Returns the stamp of a host time that is now: the same, or one on the GPU."""
        return now if self.gpu is None else self.clock()

    def _level(self, slot: int, now: int) -> StepStatus:
        """Returns how much of the step that starts is recorded. Only an optimizer is sure to end a bare one."""
        if self.sampling is None:
            return FULL
        self.sampling.follow(self.lease.budget_ppm(slot, now))
        if self._optimizer_seen and self.sampling.is_bare(slot):
            return BARE
        return LIGHT if self.sampling.is_light(slot) else FULL

    def _expect_next(self, record: StepRecord) -> None:
        """Sees own collectives from here on if the next step, which starts here, is to be recorded in full."""
        if self.own is None:
            return
        synced, sampling = record.reductions or (record.status == BARE and self._syncs), self.sampling
        slot = self._synced + 1 if synced else self._synced + self._unsynced + 1
        if sampling is None or not (sampling.is_bare(slot) or sampling.is_light(slot)):
            self.own.turn(True, self.since)

    def _begin_stretch(self, record: StepRecord, now: int) -> None:
        """Lets the steps after this bare one pass until then."""
        record.epoch = self.epoch  # now: the sender may send some of its steps before it ends
        if self.sampling is not None:
            until, ordered = self.sampling.bare_until(record.slot), self.lease.sampled
            self._stretch_end = min(until, ordered.start) if record.slot < ordered.start else until
            self._stretch_until = now + STRETCH_NS

    def _end_stretch(self) -> None:
        """Ends a stretch between two steps, or inside one: the finished steps leave, and the open one is alone."""
        record, self._stretch_end = self.current, 0
        if record is None or not record.ends:
            return
        record.end = record.ends.pop()
        self.current = StepRecord(self.steps, record.end)
        self.current.slot, self.current.status = self._synced + self._unsynced, BARE
        self._cpu_ns = None
        self._learn(record)
        self._hand_over(record)

    def _feed(self, record: StepRecord) -> None:
        """Gives the step the waits for data since the last forward; [] if its DataLoader had nothing to wait for.

        A loop uses a DataLoader as long as the iterator lives that gave it the last batch.
        """
        self._validating = None
        waits = list(self._waits)
        if waits:
            self._feeding = self._loader
            self._waits.clear()
        if record.status != BARE and (waits or self._feeding() is not None):
            if record.data is None:
                record.data = waits
            else:
                record.data += waits

    def _drop_backwards(self, record: StepRecord) -> None:
        """Removes backwards that have reduced nothing from the step: perhaps no optimizer ever ends it."""
        record.backwards = 0
        record.data = None if record.data is None else []
        record.spans.clear()
        record.hooks.clear()

    def _drop_forwards(self, record: StepRecord, now: int) -> None:
        """Removes the forwards that no backward has followed from the step, which may start only now."""
        self.forwards = 1
        record.data = None if record.data is None else []
        phases = [phase for phase, _, _ in record.spans]
        while phases and (phases[-1] == "forward" or phases[-2:] == ["forward", "sync"]):  # which waited for buffers
            phases.pop()
        del record.spans[len(phases) :]
        if not record.spans:
            start, _ = self._validation or (record.start, now)
            self._validation = (start, now)
            record.start = now

    def buffers_synced(self) -> None:
        """Notes that DDP has broadcast its buffers: so far the forward has only waited for that."""
        if self.phase == "forward" and self.current is not None:
            start = self._phase_start
            self.current.spans.append(("forward", start, start))
            self._leave("sync", "forward")

    def forward_end(self) -> None:
        """Ends the forward that started last."""
        if self.phase == "forward":
            self._leave("forward", "between")

    # -- between the steps -----------------------------------------------------------------------------------

    def data_wait(self, loader: LoaderRef, start: int, end: int) -> None:
        """Notes a wait of the loop for a batch (host, ns): of the next forward's step, or of the validation under way.

        Args:
            loader: The DataLoader's iterator; the same object as long as the iterator lives.
            start: When its ``next`` was called.
            end: When that returned.
        """
        if loader is self._validating and self._validation is not None:
            self._activity_end = end if self.gpu is None else self.clock()
            self._validation = (self._validation[0], self._activity_end)
            return
        self._loader = loader
        self._waits.append((start, end))

    def validation_begin(self, in_eval: bool) -> None:
        """Starts a forward without gradients. Several in a row are one validation.

        A single one in training mode is part of the step that follows: it makes pseudo-labels, or a generator's images.

        Args:
            in_eval: Whether the model is in eval mode.
        """
        if self.phase != "input":
            return
        if self._validation is None:
            now = self.clock()
            after, start = self._without_gradients
            if after != self.step:
                self._without_gradients = self.step, now
                if not in_eval:
                    return
                start = now
            self._validation = (start, now)
        self._stretch_end = 0
        if self._waits:
            self._validating = self._loader
            self._waits.clear()

    def validation_end(self) -> None:
        """Ends a forward without gradients."""
        if self.phase == "input" and self._validation is not None:
            self._activity_end = self.clock()
            self._validation = (self._validation[0], self._activity_end)

    def _report_validation(self) -> None:
        if self._validation is not None:
            start, end = self._validation
            self._on_validation(int(start), int(end))  # a GPU's stamp: when the host came there
            self._validation = None

    def saved(self) -> None:
        """Notes that a checkpoint has been written: it is part of a step, but of none by which others are judged."""
        self._stretch_end, self._cpu_ns = 0, None

    # -- backward --------------------------------------------------------------------------------------------

    def backward_begin(self) -> bool:
        """Returns the first gradient of a watched output arrived. False if this backward is already open."""
        if self.current is None or self.phase in ("", "backward", "sync"):
            return False
        self.current.backwards += 1
        self.forwards = 0
        self._report_validation()
        self._enter("backward", self.clock())
        return True

    def backward_compute_end(self) -> None:
        """Ends the autograd graph; what follows is waiting for buckets."""
        if self.phase == "backward":
            self._leave("backward", "sync")

    def backward_end(self, reduced: bool | None = None) -> None:
        """Ends the backward call, which is about to return.

        Args:
            reduced: Whether it has reduced its gradients; whether buckets were launched, if not given.
        """
        if self.phase != "sync":
            return
        self._leave("sync", "between")
        if self.current is not None and (bool(self.current.buckets) if reduced is None else reduced):
            self._synced_end = self._phase_start
            self.current.reductions += 1
            if self.current.reductions >= MAX_REDUCTIONS:  # no visible optimizer steps any more
                self._optimizer_seen = False

    def wait_begin(self) -> None:
        """Notes that the backward stops to wait for a collective: a synchronous one, inside a hook."""
        if self.phase == "backward":
            self._leave("backward", "sync")

    def wait_end(self) -> None:
        """Notes that the backward goes on after `wait_begin`."""
        if self.phase == "sync":
            self._leave("sync", "backward")

    def has_waited(self, since: int) -> None:
        """Notes that the backward has only waited since then (ns), which is known now: a comm hook did.

        Light steps would take that for compute.
        """
        if self.phase == "backward" and self.current is not None and self._host() - since >= WAITED_NS:
            since = max(since, self.since)
            self.current.spans.append(("backward", self._phase_start, since))
            self._phase_start = since
            self._leave("sync", "backward")
            if self.sampling is not None:
                self.sampling.use_light(False)

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
        """Notes that a bucket's collective is issued. Returns None outside a backward that is being recorded.

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
        if not self.full:  # nobody will say that it is done
            self.current.untimed = True
        else:
            self.box.launch(index)
        return bucket

    def collective_launch(self, bucket: BucketRecord) -> bool:
        """Notes that a collective of more than a backward is issued; returns whether the open step has it now."""
        if self.current is None or self.phase in ("", "input"):
            return False
        if len(self.current.buckets) >= MAX_COLLECTIVES:
            self.current.buckets.clear()
            self.abort()
            return False
        if self.current.first_seq is None:
            self.current.first_seq = bucket.seq
        self.current.buckets.append(bucket)
        if bucket.done is None:
            self.box.launch(bucket.index)
        return True

    def bucket_done(self, bucket: BucketRecord, at: int | None = None) -> None:
        """Notes that the bucket's result is there, now or at ``at`` (absolute ns). Safe on any thread."""
        bucket.done = self.clock() if at is None else at
        self.box.done(bucket.index)

    def hook_fired(self, param: int, at_ns: int | None = None) -> None:
        """Notes that parameter ``param``'s gradient was accumulated, now or at ``at_ns`` (absolute)."""
        if self.current is not None:
            self.current.hooks.append((param, self.clock() if at_ns is None else at_ns))
            self.last_hook = param

    def charge(self, ns: int) -> None:
        """Adds to what the step cost: ns that ddpwatch has spent on the training thread."""
        if self.current is not None:
            self.current.own_ns += ns

    def warm_up(self) -> None:
        """Keeps the open step, which groups gradients into buckets for the first time, out of every statistic."""
        if self.current is not None:
            self.current.status = "warmup"

    # -- optimizer and step ----------------------------------------------------------------------------------

    def optimizer_begin(self) -> None:
        """Starts an optimizer step. Nested ones (a wrapper around another) count as one."""
        self._optimizer_depth += 1
        if self.phase == "backward" and not self._has_updated:  # fused into the backward, which ends the step
            self._gave_up = True
            return
        self._optimizer_seen = True  # now: its closure's backwards end no step
        if self._optimizer_depth == 1 and self.current is not None and self.phase in ("between", "input"):
            self._enter("optimizer", self.clock())

    def optimizer_end(self) -> None:
        """Ends the optimizer step that started last."""
        self._optimizer_depth = max(0, self._optimizer_depth - 1)
        if self._optimizer_depth or self.current is None:
            return
        if self.phase not in ("", "optimizer", "between"):
            return
        is_bare, now = not self.phase, self.clock()
        if not is_bare:  # "between" if a closure ran forward and backward in there: what came after is the optimizer's
            self.current.spans.append(("optimizer", self._phase_start, now))
        self.phase, self._phase_start, self._optimizer_end = "input", now, now
        self.box.end_step()
        # Only bare steps that synchronise are in stretches
        if not is_bare or not self._syncs or self._synced + 1 >= self._stretch_end:
            self._expect_next(self.current)

    def abort(self, now: int | None = None) -> None:
        """Closes the open step, which an exception has left, as aborted, so that the next one starts clean."""
        self._end_stretch()
        if self.current is not None:
            self.current.status = "aborted"
            self.release_held()
            self._hand_over(self._close(self.clock() if now is None else now))
        self._optimizer_depth = 0
        self._enter("input", self.clock())

    def finish(self) -> None:
        """Ends the watching: closes the open step if it is complete, forgets it otherwise.

        Raises:
            RuntimeError: CUDA has failed. The records that waited for it are closed nonetheless.
        """
        end = self._step_end()
        try:
            self._end_stretch()
            if end is not None:
                self._hand_over(self._close(end))
            self.release_held()
        finally:
            self.current = None
            if self.gpu is not None:
                self.gpu.finish()

    def leave_to_loop(self) -> int:
        """Closes the open step where the newest forward has started (ns), and returns when that was."""
        since = self.since
        self.warm_up()
        self._hand_over(self._close(since))
        self.release_held()
        return since

    # -- of a loop without a wrapper, whose steps are made of its events (`ddpwatch.probe.loop`) ------------------

    def begin_update(self, steps: int, phase: Phase, now: int) -> None:
        """Notes that the steps before that number are over."""
        self.steps = self._synced = steps
        self.box.begin_step(steps, steps)
        self._enter(phase, now)

    def begin_phase(self, phase: Phase, now: int) -> None:
        """Notes where the loop is."""
        self._enter(phase, now)

    # -- inside ----------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: int) -> None:
        self.phase = phase
        self._phase_start = now
        self.box.enter(phase)

    def _leave(self, phase: PhaseName, following: Phase) -> None:
        now = self.clock()
        if self.current is not None:
            self.current.spans.append((phase, self._phase_start, now))
        self.phase = following  # as `_enter` does; one more call is noticeable here (CONTRIBUTING.md)
        self._phase_start = now
        self.box.enter(following)

    def _step_end(self) -> int | None:
        if self._optimizer_end is not None:
            return self._optimizer_end
        return None if self._optimizer_seen else self._synced_end

    def _close(self, end: int) -> StepRecord | None:
        record, self.current = self.current, None
        updated = self._optimizer_end is not None
        self._optimizer_end = self._synced_end = None
        self._stretch_end = 0
        if record is None:
            return None
        if record.backwards > self._most_forwards // 2 and record.status != "aborted":
            self._most_forwards = 2 * record.backwards
        record.end = end if end >= record.start else record.start
        record.epoch = self.epoch
        if self.own is not None and self.full:
            self._add_own(record, self.own.take_issued(record.start, record.end))
        if updated and not self._has_updated:
            self._has_updated, self._synced, self._unsynced = True, 0, 0  # on all ranks, whatever each has held back
        if record.reductions or (record.status == BARE and self._syncs):
            self._synced, self._unsynced = self._synced + 1, 0
        else:
            self._unsynced += 1
        slot = self._synced + self._unsynced
        sampling, before = self.sampling, None if record.ends else self._cpu_ns
        self._cpu_ns = now = self._cpu.read() if sampling is None or sampling.needs_cpu_time(slot) else None
        if before is not None and now is not None and not self._activity_end:
            record.cpu_ns = max(0, now - before)
        if updated and self._held:
            record, self._held = joined([*self._held, record]), []
        elif not (updated or self._has_updated or self._gave_up or record.status == "aborted"):
            self._held.append(record)
            if record.end - self._held[0].start > HELD_NS:
                self._gave_up = True
                self.release_held()
            return None
        self._count(record)
        return record

    def _count(self, record: StepRecord) -> None:
        self.steps += 1
        self.box.begin_step(self.steps, self._synced + self._unsynced)
        self._learn(record)

    def release_held(self) -> None:
        """Hands over what was held back, as no optimizer ends it: also before another model's first step."""
        held, self._held = self._held, []
        for record in held:
            record.step = self.steps
            self._count(record)
            self._hand_over(record)
        if held and self.current is not None:
            self.current.step = self.steps

    def _add_own(self, record: StepRecord, own: list[BucketRecord]) -> None:
        if own and not (record.buckets or record.reductions):
            record.first_seq = own[0].seq
        record.buckets += own
        if self.sampling is None:
            return
        first = min((start for phase, start, _ in record.spans if phase == "forward"), default=record.end)
        last = max((start for phase, start, _ in record.spans if phase == "backward"), default=record.start)
        waits = [
            one.wait_end - one.wait_begin for one in own if one.wait_begin is not None and one.wait_end is not None
        ]
        waited = sum(waits) > MUCH_WAITED * (record.end - record.start)
        if waited or any(first <= one.launch < last for one in own):
            # Light steps would take such waits for compute, as an optimizer's. Where ranks wait for each other already,
            # buckets do not say who is late, as light steps would have it, either
            self.sampling.use_light(False)

    def _hand_over(self, record: StepRecord | None) -> None:
        if record is None:
            return
        try:
            if self.gpu is not None:
                self.gpu.follow(record)
        finally:
            self._emit(record)

    def _learn(self, record: StepRecord) -> None:
        """Passes on to the schedule what each of its steps took, and cost."""
        if self.sampling is not None and record.status in LEVELS:
            own_ns = max(0, record.own_ns) // (1 + len(record.ends))
            for duration in record.durations():
                self.sampling.learn(record.status, own_ns, duration)
