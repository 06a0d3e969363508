"""One session per process: the watched modules, the recorder and the sender thread.

Fails open: any error in here after ``watch()`` has returned ends the watching with one warning, and training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.activity import ActivityMonitor, Doing
from ddpwatch.probe.agent_rendezvous import JobUnwatchedError
from ddpwatch.probe.child_end import ChildEnd
from ddpwatch.probe.completion import Completions
from ddpwatch.probe.cuda_calls import cuda_clock
from ddpwatch.probe.ddp import DdpProbe, in_forward
from ddpwatch.probe.gc_pauses import GcPauses
from ddpwatch.probe.group_ids import backend_name, world_backend
from ddpwatch.probe.guard import CLOSING, Guard, reason_of
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.hard_exit import before_hard_exit
from ddpwatch.probe.heartbeat import Heartbeat
from ddpwatch.probe.identity import Flags, as_text, ddp_flags, hello_of
from ddpwatch.probe.issue_counts import see_own_counts
from ddpwatch.probe.optimizer_steps import see_optimizer_steps
from ddpwatch.probe.own_beside_wrapper import CollectivesBeside
from ddpwatch.probe.profiling import see_own_profilers
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.rendezvous import Rendezvous
from ddpwatch.probe.send_queue import SendQueue
from ddpwatch.probe.sender import Sender
from ddpwatch.probe.trained import TrainedCounter, gpu_memory
from ddpwatch.sampling.schedule import SamplingSchedule, schedule_of
from ddpwatch.wire.messages import (
    NO_LONGER_WATCHED,
    PROFILES,
    WATCHING,
    BucketLayout,
    Bye,
    EndReason,
    Feature,
    Layout,
    Mark,
    Trained,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from ddpwatch.probe.fsdp import FsdpProbe
    from ddpwatch.probe.loop import LoopProbe

_log = logging.getLogger("ddpwatch")
_sessions = 0
current: ProbeSession | None = None  # what watches this process


class ProbeSession:
    """Everything ddpwatch does in this process.

    Args:
        record: Where the collector writes a recording, or None. Only rank 0's counts.
    """

    def __init__(self, record: str | os.PathLike[str] | None = None) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.world_size = dist.get_world_size() if grouped else 1
        self._pid = os.getpid()
        store = dist.distributed_c10d._get_default_store() if grouped else None
        self._rendezvous = Rendezvous(self.rank, self.world_size, _sessions + 1, store, record)
        self._probes: weakref.WeakSet[DdpProbe | FsdpProbe | LoopProbe] = (
            weakref.WeakSet()
        )  # the modules' hooks own them
        self._modules = self._parameters = 0
        self._gpu: torch.device | None = None
        self.loop: LoopProbe | None = None  # as long as nothing else is watched
        self._beside: CollectivesBeside | None = None
        self.queue = SendQueue()
        self.guard = Guard(self._take_failure)
        self._has_warned = False
        self._completions = Completions()
        self.recorder = StepRecorder(
            self.queue.add_step, cpu_clock=self.queue.job_cpu_ns, on_validation=self._mark_validation
        )
        self._trained = TrainedCounter(lambda: self.recorder.steps)
        heartbeat = Heartbeat(
            self.rank, self.recorder, lambda: list(self._probes), self._doing, self._counted, self._gpu_memory
        )
        self.sender = Sender(self.rank, self.queue, self.recorder, self._rendezvous, self.guard, heartbeat)
        self._gave_up_ns = 0  # when an error of ddpwatch's ended the watching
        self._started = False
        self._ended_by: BaseException | None = None
        self._exit_code: int | None = None  # of ``os._exit``, or of a process that multiprocessing started
        self._exits = False  # the interpreter has called its exit handlers
        self._undo: list[Callable[[], object]] = []  # takes back what is not a module's
        self._undo_at_end: list[Callable[[], object]] = []
        self.active = True
        try:
            self._install()
        except BaseException:
            self.close()
            raise

    def _install(self) -> None:
        """Hooks into what is not a module's."""
        self._undo.append(see_optimizer_steps(self._optimizer_begin, self._optimizer_end, self.guard.failed))
        if dist.is_available():
            of_groups = partial(self.guard.failed, feature="process groups")
            self._undo.append(see_own_counts(dist.distributed_c10d, of_groups))
        self._gc_pauses = GcPauses(self.rank, self.queue.post, self.guard)
        self._undo.append(self._gc_pauses.close)
        self._activity = ActivityMonitor(self.rank, self.queue.post, self._saved, self._data_wait, self.guard)
        self._undo.append(self._activity.close)
        if (end_profiles := self.guard.run(PROFILES, see_own_profilers, self.guard)) is not None:
            self._undo.append(end_profiles)
        forked = weakref.WeakMethod(self._leave_to_parent)  # a fork handler stays for good: it must not own the session
        os.register_at_fork(after_in_child=partial(_in_child, forked))
        at_exit = partial(self.guard.run, CLOSING, self._close_at_exit)
        atexit.register(at_exit)
        self._undo_at_end.append(partial(atexit.unregister, at_exit))
        # A rank that multiprocessing has forked ends without running what is registered with atexit.
        at_child_exit = Finalize(None, self.guard.run, (CLOSING, self._close_child), exitpriority=0)
        self._undo_at_end.append(at_child_exit.cancel)
        self._undo_at_end.append(before_hard_exit(self._exit_hard))
        self._undo_at_end.append(ChildEnd(self._child_ended, partial(self.guard.failed, feature=CLOSING)).close)

    # -- what is watched -------------------------------------------------------------------------------------

    def add_loop(self, since: int | None = None) -> LoopProbe:
        """Sees the loop of a job whose model has no wrapper.

        Args:
            since: See `LoopProbe`.
        """
        from ddpwatch.probe.loop import Loop, LoopProbe

        if self.loop is None:
            self.recorder.use(sampling=self._schedule(settles=False))
            self.loop = LoopProbe(self._context(), self.queue.job_cpu_ns, since)
            self.queue.made_late = self.loop.records
            self._start_with(self.loop, Loop(), world_backend(), {})
            self._probes.add(self.loop)
            if self.loop.unseen:
                self._say_off("collectives", self.loop.unseen)
        return self.loop

    def add_module(self, model: DistributedDataParallel | FSDPModule) -> DdpProbe | FsdpProbe:
        """Attaches to one more module."""
        if self.loop is not None:  # what it has left is sent; from here on, the module says where steps are
            self.loop.close()
            self.loop = None
        probe = self._add_ddp(model) if isinstance(model, DistributedDataParallel) else self._add_sharded(model)
        self._modules += 1
        self._parameters += probe.parameters
        self._probes.add(probe)
        if self._beside is None and dist.is_initialized() and self.recorder.gpu is None:
            self._beside = self.recorder.own = CollectivesBeside(self._context(), self.recorder.charge)
            self._undo.append(self._beside.close)
        return probe

    def _follow_loop(self) -> None:
        """Sees the loop in place of modules whose forward has all of the update, and no backward comes to its end."""
        for probe in list(self._probes):
            probe.close()
        if self._beside is not None:
            self._beside.close()
            self._beside = self.recorder.own = None
        self.add_loop(self.recorder.leave_to_loop())

    def _add_sharded(self, model: FSDPModule) -> FsdpProbe:
        from ddpwatch.probe.fsdp import FsdpProbe, backend_of, device_of, fsdp_flags

        assert isinstance(model, torch.nn.Module)
        device = device_of(model)
        if device.type == "cuda":
            self._use_gpu(device)
        self.recorder.use(sampling=self._schedule(light=False))
        backend, flags = backend_of(model), fsdp_flags(model)  # first, as they may miss something of FSDP2's
        probe = FsdpProbe(model, self._context())
        self._start_with(probe, model, backend, flags)
        return probe

    def _add_ddp(self, ddp: DistributedDataParallel) -> DdpProbe:
        if ddp.device_type == "cuda":
            self._check_gpu(ddp)
            self._use_gpu(ddp.device)
        if self.recorder.sampling is None:  # jobs without DDP have no schedule: every step is recorded in full
            self.recorder.use(sampling=self._schedule(dear=self._gpu is not None))
        backend = self.guard.run("process groups", backend_name, ddp.process_group, ddp.device) or ""
        probe = DdpProbe(ddp, self._context())
        if probe.foreign_hook:
            _log.warning(
                "ddpwatch does not see the collectives of %s, a comm hook that was there before; "
                "call ddpwatch.watch(model) before model.register_comm_hook(...)",
                probe.foreign_hook,
            )
        self._start_with(probe, ddp.module, backend, ddp_flags(ddp))
        return probe

    def _schedule(self, light: bool = True, dear: bool = False, settles: bool = True) -> SamplingSchedule | None:
        queue = self.queue  # the schedule must not own the session
        return schedule_of(light=light, dear=dear, sender_clock=lambda: queue.sender_cpu_ns, settles=settles)

    def _context(self) -> ProbeContext:
        queue = self.queue
        numbers = self._modules, self._parameters
        return ProbeContext(
            self.recorder, self.guard, queue.post, queue.wake_if_due, *numbers, self._completions, queue.groups
        )

    def _start_with(
        self, probe: DdpProbe | FsdpProbe | LoopProbe, module: torch.nn.Module, backend: str, flags: Flags
    ) -> None:
        """Starts; if that fails, nothing stays of the probe."""
        try:
            self.start(module, backend, flags, probe.timed)
            self.recorder.release_held()
            if self.recorder.sampling is not None:  # the model before may have had to do without
                self.recorder.sampling.use_light(True)
        except BaseException:
            probe.close()
            raise

    def _check_gpu(self, ddp: DistributedDataParallel) -> None:
        """Refuses a second GPU: one clock serves a process, and what computes elsewhere would get false times."""
        used = {param.device for param in ddp.parameters()}
        self._gpu = self._gpu or ddp.device
        if used != {self._gpu}:
            others = ", ".join(sorted(map(str, used - {self._gpu})))
            raise DdpwatchError(f"{type(ddp.module).__name__} computes on {others}, while {self._gpu} is watched")

    def _use_gpu(self, device: torch.device) -> None:
        self._gpu = self._gpu or device
        if self._gpu != device:
            raise DdpwatchError(f"a model computes on {device}, while {self._gpu} is watched")
        if self.recorder.gpu is None:
            self.recorder.use(gpu=cuda_clock(device))

    @property
    def run_id(self) -> str:
        """Id of the run; empty until it is known on this rank."""
        return self._rendezvous.run_id

    @property
    def watches_anything(self) -> bool:
        """Whether a module is being watched."""
        return any(probe.active for probe in list(self._probes))

    def start(self, module: torch.nn.Module, backend: str, flags: Flags, timed: bool = True) -> None:
        """Introduces this rank and starts collector and sender, the first time it is called."""
        global _sessions
        if not self._started:
            source = self._timing_source(module, timed)
            self._hello = hello_of(module, backend, flags, source, self.run_id, self.rank, self.world_size)
            self.queue.post(self._hello)
            self._rendezvous.start()
            self.sender.start()
            self._started = True
            _sessions += 1

    def cancel_unless_started(self) -> None:
        """Leaves nothing of a session that watches nothing."""
        if not self._started:
            self._rendezvous.cancel()
            self.close()

    def _timing_source(self, module: torch.nn.Module, timed: bool) -> str:
        source = "host" if self.recorder.gpu is None else "cuda events"
        on_host = all(p.device.type == "cpu" for p in module.parameters())
        return source if timed and (on_host or self.recorder.gpu is not None) else f"{source} (launch only)"

    def publish_layout(self, name: str, params: list[str], buckets: list[BucketLayout]) -> None:
        """Publishes the bucket layout of a job without DDP modules."""
        self.recorder.epoch += 1
        self.queue.post(Layout(rank=0, module_name=name, epoch=self.recorder.epoch, params=params, buckets=buckets))

    def mark(self, name: str) -> None:
        """Adds a named moment to this rank's timeline."""
        self.queue.post(Mark(rank=self.rank, name=as_text(name, 1024), start_ns=time.monotonic_ns()))

    def count(self, samples: object, tokens: object, flops: object) -> None:
        """Adds to what this rank trains on."""
        self._trained.count(samples, tokens, flops)

    def _counted(self) -> Trained | None:
        return self.guard.run("counts", self._trained.so_far)

    def _gpu_memory(self) -> dict[str, int]:
        return self.guard.run("memory", gpu_memory, self._gpu) or {}

    def _mark_validation(self, start: int, end: int) -> None:
        self.guard.run("validations", self._post_validation, start, end)

    def _post_validation(self, start: int, end: int) -> None:
        self.queue.post(Mark(rank=self.rank, kind="validation", name="validation", start_ns=start, end_ns=end))

    def _optimizer_begin(self, optimizer: Any) -> None:
        if self.active:
            recorder = self.recorder
            if recorder.phase == "forward" and recorder.forwards > 1 and recorder.gpu is None and in_forward():
                self._follow_loop()
            if self.loop is not None:
                self.loop.optimizer_begin(optimizer)
                return
            entered = time.monotonic_ns()
            self.recorder.optimizer_begin()
            self.recorder.charge(time.monotonic_ns() - entered)

    def _optimizer_end(self, optimizer: Any) -> None:
        if self.active:
            if (thread := threading.get_ident()) != self._activity.thread:
                self._activity.thread = self.sender.stacks.thread = thread
            if self._trained.loader is not None:
                self.guard.run("counts", self._trained.end_update)
            if self.loop is not None:
                self.loop.optimizer_end(optimizer)
                return
            entered = time.monotonic_ns()
            self.recorder.optimizer_end()
            self.recorder.charge(time.monotonic_ns() - entered)

    def _saved(self) -> None:
        if self.active:
            self.recorder.saved()

    def _data_wait(self, loader: Callable[[], object], start: int, end: int, came: bool) -> None:
        if self.active:
            (self.loop or self.recorder).data_wait(loader, start, end)
            if came:
                self.guard.run("counts", self._trained.take_batch, loader)

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self, most_s: float = math.inf) -> None:
        """Sends a goodbye and removes every hook. Safe to call more than once.

        Takes less than a second, or up to `STARTING_S` after the start while the collector is not there yet.

        Args:
            most_s: How long it may wait for the sender at most.
        """
        global current
        if os.getpid() != self._pid:
            return
        if current is self:
            current = None
        was_active, self.active = self.active, False
        for undo in [*[probe.close for probe in list(self._probes)], self._completions.stop, *self._undo]:
            self.guard.run(CLOSING, undo)
        if self._started:
            trouble = ""
            try:
                if was_active:
                    self.recorder.finish()
            except Exception as error:  # a CUDA error that stays: the job's own, and the job reports it
                trouble = f"the last steps have no times: {type(error).__name__}: {error}".splitlines()[0][:500]
            goodbye = self._goodbye()
            goodbye.detail = "; ".join(filter(None, (goodbye.detail, trouble)))
            self.sender.stop(goodbye, most_s)
        if not self.sender.is_alive():  # otherwise it does that itself, when it ends
            self._rendezvous.leave()
        for undo in self._undo_at_end:
            self.guard.run(CLOSING, undo)

    def _close_at_exit(self) -> None:
        """Closes; a signal that comes meanwhile would have found an unwatched job gone."""
        self._exits = True
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            self.close()

    def _child_ended(self, code: int, error: BaseException | None) -> None:
        self._exit_code, self._ended_by = code, self._ended_by or error

    def _close_child(self) -> None:
        """Closes at the end of a process that multiprocessing started: the exception is in flight, or was noted."""
        error = sys.exc_info()[1] or self._ended_by
        self.end(None if isinstance(error, SystemExit) and not error.code else error)

    def _exit_hard(self, code: int) -> None:
        """Closes right before ``os._exit``, on whichever thread. One that handles an exception exits because of it."""
        error = sys.exc_info()[1]
        self._exit_code = code
        self._ended_by = error if code and isinstance(error, Exception) else None
        # Which ``os._exit`` may take: to send what is left, or for a collector that is about to be there
        self.close(0.9)

    def end(self, error: BaseException | None) -> None:
        """Closes where the interpreter does not note what has ended the training."""
        self._ended_by = error
        self.close()

    def _goodbye(self) -> Bye:
        """Says that it has finished, or which exception (noted before it exits) or code ends this process."""
        error = self._ended_by or getattr(sys, "last_value", None)
        reason: EndReason = "finished" if error is None else "exception"
        said = [type(error).__name__, *str(error).splitlines()[:1]]
        detail = "" if error is None else as_text(": ".join(said), 500)
        if self._exit_code is not None and error is None:
            reason, detail = ("lost", f"exited with code {self._exit_code}") if self._exit_code else ("finished", "")
        recorder = self.recorder
        return Bye(
            rank=self.rank,
            by="rank",
            reason=reason,
            detail=detail,
            at_ns=time.monotonic_ns(),
            step=recorder.step,
            phase="" if self._gave_up_ns else recorder.phase,
            exits=self._exits,
        )

    def _take_failure(self, feature: Feature, error: Exception) -> None:
        """Turns off what an error of ddpwatch's has hit. Safe on any thread: the hooks stay, and do nothing.

        Only the first warns: a job has one line of this, and the run says the rest.
        """
        _log.debug("ddpwatch: %s went off", feature, exc_info=error)
        if feature == CLOSING or not self.active:
            return
        reason = reason_of(error)
        what, goes_on = f"goes on without {feature}", "the rest is watched"
        if feature == WATCHING:
            self._silence()
            self._gave_up_ns = time.monotonic_ns()
            what, goes_on = "stops watching", "training goes on"
        self._say_off(feature, reason, what)
        level = logging.DEBUG if self._has_warned or isinstance(error, JobUnwatchedError) else logging.WARNING
        self._has_warned = self._has_warned or level == logging.WARNING
        _log.log(level, "ddpwatch %s, %s: %s", what, goes_on, reason)

    def _say_off(self, feature: Feature, reason: str, what: str = "watches") -> None:
        name, step = as_text(f"ddpwatch {what}: {reason}".splitlines()[0], 500), self.recorder.step
        self.queue.post(Mark(rank=self.rank, name=name, start_ns=time.monotonic_ns(), off=feature, step=step))

    def _doing(self) -> Doing:
        """Returns what this rank does outside its steps, for its heartbeats."""
        return (NO_LONGER_WATCHED, self._gave_up_ns) if self._gave_up_ns else self._activity.doing

    def _leave_to_parent(self) -> None:
        """Leaves hooks, sockets and the claim on the run, which a forked child (a DataLoader worker) inherits."""
        self._silence()
        self._rendezvous.leave()

    def _silence(self) -> None:
        """Stops the hooks."""
        self.active = False
        self._gc_pauses.close()
        self._activity.active = False
        for probe in list(self._probes):
            probe.active = False


def _in_child(leave: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Runs in a forked child, whose handlers must not raise."""
    try:
        if (call := leave()) is not None:
            call()
    except Exception as error:
        _log.debug("ddpwatch stays in a forked child: %s", error)


def is_sharded(model: object) -> bool:
    """Returns whether FSDP2 has the model: ``fully_shard``, or the new ``replicate``. Imports nothing of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(model, getattr(fsdp, "FSDPModule", ()))
