"""One session per process: what is watched, the sender thread, and on rank 0 the collector process.

Fails open: whatever goes wrong in here after ``watch()`` has returned ends the watching with one warning, and
training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpwatch import clock, rundir
from ddpwatch.errors import DdpwatchError
from ddpwatch.messages import BucketLayout, Bye, EndReason, Layout, Mark
from ddpwatch.probe.activity import ActivityMonitor
from ddpwatch.probe.cuda import CudaClock, CudaEvent
from ddpwatch.probe.gc_pauses import GcPauses
from ddpwatch.probe.hooks import DdpProbe, check_watchable
from ddpwatch.probe.identity import Flags, ddp_flags, hello_of
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.sender import Sender
from ddpwatch.sampling.schedule import schedule_of

if TYPE_CHECKING:
    from typing_extensions import Self

FIND_TIMEOUT_S = 60.0
_log = logging.getLogger("ddpwatch")
_sessions = 0


class CollectorAddress(msgspec.Struct):
    """What rank 0 tells the other ranks through the job's own store."""

    run_id: str
    endpoint: str
    boot_id: str


class ProbeSession:
    """Everything ddpwatch does in this process.

    Args:
        record: Where the collector writes a recording, or None. Only rank 0's counts.
    """

    def __init__(self, record: str | os.PathLike[str] | None = None) -> None:
        global _sessions
        _sessions += 1
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.world_size = dist.get_world_size() if grouped else 1
        self.run_id = ""
        self._pid = os.getpid()
        self._store = dist.distributed_c10d._get_default_store() if grouped else None
        self._key = f"ddpwatch/{_attempt()}/{_sessions}"
        self._deadline = time.monotonic() + FIND_TIMEOUT_S
        self._address = self._start_collector(record) if self.rank == 0 else None
        self._probes: weakref.WeakSet[DdpProbe] = weakref.WeakSet()  # the modules' hooks own them
        self._modules = self._parameters = 0
        self._gpu: torch.device | None = None
        self.sender = Sender(self.rank, self._find_endpoint, self._give_up)
        self.recorder: StepRecorder = self.sender.recorder
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._stamp(self.recorder.optimizer_begin)),
            register_optimizer_step_post_hook(lambda *_: self._stamp(self.recorder.optimizer_end)),
        ]
        self.sender.issued = self._issued
        self._pauses = GcPauses(self.rank, self.sender.post)
        self._outside = ActivityMonitor(self.rank, self.sender.post, lambda: self._stamp(self.recorder.saved))
        self.recorder.on_validation = self._mark_validation
        self.active = True
        self._started = False
        silence = weakref.WeakMethod(self._silence)  # a fork handler can not be taken back, so it must not own us
        os.register_at_fork(after_in_child=lambda: call() if (call := silence()) is not None else None)
        atexit.register(self.close)

    # -- what is watched -------------------------------------------------------------------------------------

    def add(self, ddp: DistributedDataParallel) -> DdpProbe:
        """Attaches to one more module."""
        if ddp.device_type == "cuda":
            self._check_gpu(ddp)
            if self.recorder.gpu is None:
                stream = partial(torch.cuda.current_stream, ddp.device)
                self.recorder.use(CudaClock(_cuda_event, stream, torch.cuda.is_current_stream_capturing))
        if self.recorder.sampling is None:
            self.recorder.sampling = schedule_of()
        probe = DdpProbe(ddp, self._modules, self._parameters, self.recorder, self._publish_layout, self._give_up)
        if probe.foreign_hook:
            _log.warning(
                "ddpwatch does not see the collectives of %s, a comm hook that was there before; "
                "call ddpwatch.watch(model) before model.register_comm_hook(...)",
                probe.foreign_hook,
            )
        self._modules += 1
        self._parameters += probe.parameters
        self._probes.add(probe)
        self.start(ddp.module, str(dist.get_backend(ddp.process_group)), ddp_flags(ddp), probe.timed)
        return probe

    def _check_gpu(self, ddp: DistributedDataParallel) -> None:
        """One clock serves a process, and it is that of one GPU: what computes on others would get false times."""
        used = {param.device for param in ddp.parameters()}
        self._gpu = self._gpu or ddp.device
        if used != {self._gpu}:
            others = ", ".join(sorted(map(str, used - {self._gpu})))
            raise DdpwatchError(f"{type(ddp.module).__name__} computes on {others}, while {self._gpu} is watched")

    @property
    def watches_anything(self) -> bool:
        """Whether a module is being watched."""
        return any(probe.active for probe in list(self._probes))

    def start(self, module: torch.nn.Module, backend: str, flags: Flags, timed: bool = True) -> None:
        """Introduces this rank and begins to send, the first time it is called."""
        if not self._started:
            self._started = True
            self._hello = hello_of(
                module, backend, flags, self._timing_source(module, timed), self.run_id, self.rank, self.world_size
            )
            self.sender.post(self._hello)
            self.sender.start()

    def _timing_source(self, module: torch.nn.Module, timed: bool) -> str:
        source = "host" if self.recorder.gpu is None else "cuda events"
        on_host = all(p.device.type == "cpu" for p in module.parameters())
        return source if timed and (on_host or self.recorder.gpu is not None) else f"{source} (launch only)"

    def publish_layout(self, name: str, params: list[str], buckets: list[BucketLayout]) -> None:
        """Tells the bucket layout of a job without DDP modules."""
        self.recorder.epoch += 1
        self._publish_layout(
            Layout(rank=0, module_name=name, epoch=self.recorder.epoch, params=params, buckets=buckets)
        )

    def _publish_layout(self, layout: Layout) -> None:
        self.sender.post(layout)

    def mark(self, name: str) -> None:
        """Puts a named moment into this rank's timeline."""
        self.sender.post(Mark(rank=self.rank, name=name[:1024], start_ns=time.monotonic_ns()))

    def _mark_validation(self, begin: int, end: int) -> None:
        self.sender.post(Mark(rank=self.rank, kind="validation", name="validation", start_ns=begin, end_ns=end))

    def _issued(self) -> int | None:
        """How many collectives the watched modules' groups have issued: on every rank as many, unless one waits."""
        try:
            counts = [count for probe in list(self._probes) if (count := probe.issue_count()) is not None]
        except RuntimeError:  # the training thread adds a module right now, or a group is gone
            return None
        return sum(counts) if counts else None

    def _stamp(self, stamp: Any) -> None:
        if not self.active:
            return
        try:
            stamp()
        except Exception as error:
            self._give_up(error)

    # -- the collector and how to find it --------------------------------------------------------------------

    def _start_collector(self, record: str | os.PathLike[str] | None) -> CollectorAddress:
        self.run_id = new_run_id()
        ingest, _ = rundir.endpoints(self.run_id)
        if not os.environ.get("DDPWATCH_RECORD_DIR"):  # then every rank writes a file of its own
            spawn_collector(self.run_id, self.world_size, record)
        address = CollectorAddress(self.run_id, ingest, clock.boot_id())
        if self._store is not None:
            self._store.set(self._key, msgspec.json.encode(address).decode())
        return address

    def _find_endpoint(self) -> str | None:
        """The collector's endpoint, or None while rank 0 has not told it. Runs on the sender thread.

        Asks with ``check``, which returns at once: a waiting call would hold the store's lock and with it
        whatever the training thread wants from the store.
        """
        if self._address is None and self._store is not None:
            if not self._store.check([self._key]):
                if time.monotonic() > self._deadline:
                    raise DdpwatchError(f"rank 0 has not called watch() within {FIND_TIMEOUT_S:.0f} s")
                return None
            self._address = msgspec.json.decode(self._store.get(self._key), type=CollectorAddress)
            self.run_id = self._hello.run_id = self._address.run_id
            self._store = None
        if self._address is None:
            return None
        if self._address.boot_id != clock.boot_id():
            raise DdpwatchError(f"rank {self.rank} is on another host than rank 0", "only rank 0's host is watched")
        with contextlib.suppress(OSError):  # no room: then the heartbeat has to do
            self.recorder.box.open(rundir.blackbox(self._address.run_id, self.rank))
        return self._address.endpoint

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Says goodbye and takes every hook off. Safe to call more than once, and takes less than a second."""
        global _session
        if os.getpid() != self._pid:
            return
        if _session is self:
            _session = None
        was_active, self.active = self.active, False
        self._pauses.close()
        self._outside.close()
        for probe in list(self._probes):
            probe.close()
        for handle in self._optimizer_hooks:
            handle.remove()
        if was_active and self._started:
            self.recorder.finish()
            self.sender.stop(self._farewell())
        self._store = None
        atexit.unregister(self.close)

    def _farewell(self) -> Bye:
        """Finished, or the exception that ends this process (the interpreter has noted it by the time of exit)."""
        error = getattr(sys, "last_value", None)
        reason: EndReason = "finished" if error is None else "exception"
        detail = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0][:500]
        recorder = self.recorder
        return Bye(
            rank=self.rank,
            by="rank",
            reason=reason,
            detail=detail,
            at_ns=time.monotonic_ns(),
            step=recorder.steps,
            phase=recorder.phase,
        )

    def _give_up(self, error: Exception) -> None:
        """Ends the watching after an error of our own. On any thread, so the hooks only fall silent."""
        if self.active:
            self._silence()
            _log.warning("ddpwatch stops watching, training goes on: %s", error)

    def _silence(self) -> None:
        """Also what a forked child (a DataLoader worker) needs: it inherits hooks and sockets that are not its own."""
        self.active = False
        self._pauses.close()
        self._outside.active = False
        for probe in list(self._probes):
            probe.active = False


def spawn_collector(run_id: str, world_size: int, record: str | os.PathLike[str] | None) -> None:
    """Starts the collector process: detached, so that a signal to the job's process group spares it."""
    command = [sys.executable, "-m", "ddpwatch.collector", "--run-id", run_id, "--world-size", str(world_size)]
    command += ["--watch-pid", str(os.getpid()), "--script", Path(sys.argv[0]).name]
    if record is not None:
        command += ["--record", str(recording_path(record))]
    with open(rundir.directory() / f"{run_id}.log", "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
    process.returncode = 0  # it outlives us on purpose: no warning about that when the handle is collected


def _cuda_event() -> CudaEvent:
    return cast("CudaEvent", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


def new_run_id() -> str:
    """The id of the run that begins: of our own making, or from `ddpwatch run` with a number for every further one."""
    given = os.environ.get("DDPWATCH_RUN")
    if given is None:
        return rundir.new_run_id(sys.argv[0])
    further = [part for part in (_attempt(), _sessions - 1) if part]
    return ".".join([given, *map(str, further)])


def _attempt() -> int:
    """How often torchrun has restarted the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def recording_path(record: str | os.PathLike[str]) -> Path:
    """Where to record to. A job that torchrun has restarted does not overwrite what led to the restart."""
    path = Path(record).absolute()
    if not os.access(path.parent, os.W_OK):
        _log.warning("ddpwatch cannot record to %s: its directory is missing or not writable", path)
    attempt = _attempt()
    return path.with_suffix(f".{attempt}{path.suffix}") if attempt else path


class Watch:
    """What ``watch()`` returns: closes the watching of its module; usable as a context manager."""

    def __init__(self, session: ProbeSession | None, probe: DdpProbe | None) -> None:
        self._session = session
        self._probe = probe

    @property
    def run_id(self) -> str:
        """Id of the run; empty while a rank other than 0 has not heard it, and when ddpwatch is off."""
        return "" if self._session is None else self._session.run_id

    def mark(self, name: str) -> None:
        """Puts a named moment into this rank's timeline."""
        if self._session is not None and self._session.active:
            self._session.mark(name)

    def close(self) -> None:
        """Stops watching the module; with the last one the session ends. Training is not affected."""
        if self._probe is not None:
            self._probe.close()
        if self._session is not None and not self._session.watches_anything:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()  # otherwise the exit handler closes, and can say which exception it was


_session: ProbeSession | None = None
_watches: weakref.WeakKeyDictionary[DistributedDataParallel, Watch] = weakref.WeakKeyDictionary()


def watch(model: torch.nn.Module, *, record: str | os.PathLike[str] | None = None) -> Watch:
    """Watches a DistributedDataParallel module from now on.

    Call it on every rank, after wrapping the model and before registering a comm hook of your own (one that is there
    already works as before, but when its collectives finish is not seen). It never blocks, adds no collective and
    changes no result. ``DDPWATCH=0`` in the environment turns it off.

    Args:
        model: The DDP module.
        record: File that the collector records the run to (on rank 0; other ranks' values are ignored).

    Returns:
        A handle with ``close()``, also a context manager. A second call for the same module returns the first's.

    Raises:
        UsageError: ``model`` is not a DDP module, or its reducer is of a kind that we cannot see.
    """
    global _session
    if os.environ.get("DDPWATCH") == "0":
        return Watch(None, None)
    ddp = check_watchable(model)
    if (known := _watches.get(ddp)) is not None and known._probe is not None and known._probe.active:
        return known
    try:
        _session = _session or ProbeSession(record)
        if not _session.active:
            return Watch(None, None)
        handle = Watch(_session, _session.add(ddp))
    except Exception as error:  # whatever it is, it is ours and not the job's
        _log.warning("ddpwatch does not watch, training goes on: %s", error)
        return Watch(None, None)
    _watches[ddp] = handle
    return handle


class RecorderWatch(Watch):
    """What ``watch_recorder()`` returns: the recorder to stamp with, and `layout`.

    Attributes:
        recorder: Call its methods at the moments they name; never raises, never blocks.
    """

    def __init__(self, session: ProbeSession | None, name: str) -> None:
        super().__init__(session, None)
        self._name = name
        self.recorder = StepRecorder(lambda record: None) if session is None else session.recorder

    def layout(self, params: Sequence[str], buckets: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Buckets have been formed (anew).

        Args:
            params: Names of all parameters; a parameter's id is its position here.
            buckets: Per bucket, in index order: its size in bytes, and the ids of its parameters.
        """
        if self._session is not None and self._session.active:
            rows = [BucketLayout(index, nbytes, list(ids)) for index, (nbytes, ids) in enumerate(buckets)]
            self._session.publish_layout(self._name, list(params), rows)


def watch_recorder(model: torch.nn.Module, *, record: str | os.PathLike[str] | None = None) -> RecorderWatch:
    """Watches a training that synchronises gradients by itself, without DDP: it calls the recorder's methods.

    Optimizer steps are found by torch's global hooks, as with ``watch()``. Works with and without a process group.

    Args:
        model: What is trained; for the introduction only, no hook is attached.
        record: As for ``watch()``.
    """
    global _session
    name = type(model).__name__
    if os.environ.get("DDPWATCH") == "0":
        return RecorderWatch(None, name)
    try:
        _session = _session or ProbeSession(record)
        backend = str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else ""
        _session.start(model, backend, {})
        return RecorderWatch(_session, name)
    except Exception as error:  # whatever it is, it is ours and not the job's
        _log.warning("ddpwatch does not watch, training goes on: %s", error)
        return RecorderWatch(None, name)


def mark(name: str) -> None:
    """Puts a named moment into this rank's timeline, e.g. ``ddpwatch.mark("checkpoint")``. Free when unwatched."""
    if _session is not None and _session.active:
        _session.mark(name)
