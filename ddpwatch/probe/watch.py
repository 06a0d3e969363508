"""The functions that a job calls. They fail open: an error of ddpwatch's is a warning, and training goes on."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.errors import UsageError
from ddpwatch.probe import session as sessions
from ddpwatch.probe.group_ids import backend_name
from ddpwatch.probe.guard import CLOSING, is_the_jobs, reason_of
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.session import ProbeSession, is_sharded
from ddpwatch.wire.messages import BucketLayout

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import Self

    from ddpwatch.probe.ddp import DdpProbe
    from ddpwatch.probe.fsdp import FsdpProbe
    from ddpwatch.probe.loop import LoopProbe

_log = logging.getLogger("ddpwatch")
_watches: weakref.WeakKeyDictionary[DistributedDataParallel | FSDPModule, Watch] = weakref.WeakKeyDictionary()


def check_watchable(model: object) -> DistributedDataParallel | FSDPModule:
    """Returns the model, if it can be watched.

    Raises:
        UsageError: It is not a module of DDP or FSDP2, or DDP's reducer cannot be seen.
    """
    if is_sharded(model):
        return cast("FSDPModule", model)
    if not isinstance(model, DistributedDataParallel):
        raise _unwatchable(type(model))
    if getattr(model, "_use_python_reducer", False):
        raise UsageError("DDP runs with the Python reducer", "unset torch._dynamo.config.optimize_ddp='python_reducer'")
    return model


def _unwatchable(model_class: type) -> UsageError:
    """Returns what ``watch()`` says of a model that it cannot watch."""
    hint = "wrap the model first: watch(DistributedDataParallel(model)), or watch(fully_shard(model)); or call watch()"
    return UsageError(f"watch() got a {model_class.__name__}", hint)


class Watch:
    """The handle that ``watch()`` returns: closes the watching of its module; usable as a context manager.

    Attributes:
        refused: Why an error of ddpwatch's keeps the module from being watched; empty if none does.
    """

    def __init__(
        self, session: ProbeSession | None, probe: DdpProbe | FsdpProbe | LoopProbe | None, refused: str = ""
    ) -> None:
        self._session = session
        self._probe = probe
        self.refused = refused

    @property
    def run_id(self) -> str:
        """Id of the run; empty while a rank other than 0 does not know it yet, and when ddpwatch is off."""
        return "" if self._session is None else self._session.run_id

    def mark(self, name: str) -> None:
        """Adds a named moment to this rank's timeline."""
        if self._session is not None and self._session.active:
            self._session.guard.run("marks", self._session.mark, name)

    def close(self) -> None:
        """Stops watching the module; with the last one the session ends. Training is not affected."""
        if self._session is not None:
            self._session.guard.run(CLOSING, self._close, self._session)

    def _close(self, session: ProbeSession) -> None:
        if self._probe is not None:
            self._probe.close()
        if not session.watches_anything:
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()  # otherwise the exit handler closes, and can name the exception


def watch(model: torch.nn.Module | None = None, *, record: str | os.PathLike[str] | None = None) -> Watch:
    """Watches a module of DDP or FSDP2 from now on; without one, the training loop of this process.

    Call it on every rank, after wrapping the model and before registering a comm hook. (A hook that is registered
    already works as before, but ddpwatch cannot see when its collectives finish.) It never blocks, adds no collective
    and changes no result. ``DDPWATCH=0`` in the environment turns it off.

    Args:
        model: The DDP module, or what ``fully_shard`` or the new ``replicate`` returned for the whole model. None for a
            loop without either: its optimizers, backwards and collectives are watched.
        record: File that the collector records the run to (on rank 0; other ranks' values are ignored).

    Returns:
        A handle with ``close()``, also a context manager. A second call for the same module returns the same handle.

    Raises:
        UsageError: ``model`` is not a module of DDP or FSDP2, or DDP's reducer cannot be seen.
    """
    if os.environ.get("DDPWATCH") == "0":
        return Watch(None, None)
    if model is None:
        return _watch_loop(record)
    try:
        watchable = check_watchable(model)
    except UsageError:
        raise
    except Exception as error:
        return _unwatched(error)
    if (known := _watches.get(watchable)) is not None and known._probe is not None and known._probe.active:
        return known
    try:
        sessions.current = sessions.current or ProbeSession(record)
        if not sessions.current.active:
            return Watch(None, None)
        with DisableTorchFunction():
            handle = Watch(sessions.current, sessions.current.add_module(watchable))
    except Exception as error:  # an error of ddpwatch's must not reach the job
        return _unwatched(error)
    _watches[watchable] = handle
    return handle


def _watch_loop(record: str | os.PathLike[str] | None) -> Watch:
    """Watches the loop, unless a module is watched already: that knows more."""
    try:
        sessions.current = sessions.current or ProbeSession(record)
        if not sessions.current.active or (sessions.current.watches_anything and sessions.current.loop is None):
            return Watch(None, None)
        with DisableTorchFunction():
            return Watch(sessions.current, sessions.current.add_loop())
    except Exception as error:  # an error of ddpwatch's must not reach the job
        return _unwatched(error)


def _unwatched(error: Exception) -> Watch:
    """Returns what ``watch()`` returns after an error of ddpwatch's, which it reports."""
    if is_the_jobs(error):
        raise error
    if sessions.current is not None:
        sessions.current.cancel_unless_started()
    _log.warning("ddpwatch does not watch, training goes on: %s", reason_of(error))
    return Watch(None, None, reason_of(error))


class RecorderWatch(Watch):
    """The handle that ``watch_recorder()`` returns: the recorder to stamp with, and `layout`.

    Attributes:
        recorder: Call its methods at the moments they name; never raises, never blocks.
    """

    def __init__(self, session: ProbeSession | None, name: str) -> None:
        super().__init__(session, None)
        self._name = name
        self.recorder = StepRecorder(lambda record: None) if session is None else session.recorder

    def layout(self, params: Sequence[str], buckets: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Publishes the buckets, when they are formed and whenever they change.

        Args:
            params: Names of all parameters; a parameter's id is its position here.
            buckets: Per bucket, in index order: its size in bytes, and the ids of its parameters.
        """
        if self._session is not None and self._session.active:
            rows = [BucketLayout(index, nbytes, list(ids)) for index, (nbytes, ids) in enumerate(buckets)]
            self._session.guard.run("bucket layouts", self._session.publish_layout, self._name, list(params), rows)


def watch_recorder(model: torch.nn.Module, *, record: str | os.PathLike[str] | None = None) -> RecorderWatch:
    """Watches a job that synchronises gradients by itself, without DDP, and calls the recorder's methods.

    Torch's global hooks find the optimizer steps, as with ``watch()``. Works with and without a process group. Every
    step is recorded in full.

    Args:
        model: The model, for the introduction only: no hook is attached.
        record: As for ``watch()``.
    """
    name = type(model).__name__
    if os.environ.get("DDPWATCH") == "0":
        return RecorderWatch(None, name)
    try:
        sessions.current = sessions.current or ProbeSession(record)
        known = dist.is_available() and dist.is_initialized()
        with DisableTorchFunction():
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            backend = backend_name(dist.distributed_c10d._get_default_group(), device) if known else ""
            sessions.current.start(model, backend, {})
        return RecorderWatch(sessions.current, name)
    except Exception as error:  # an error of ddpwatch's must not reach the job
        if sessions.current is not None:
            sessions.current.cancel_unless_started()
        _log.warning("ddpwatch does not watch, training goes on: %s", reason_of(error))
        return RecorderWatch(None, name)


def current_run() -> tuple[str, int]:
    """Returns the id of the run that watches this process (empty without one), and how many steps it has taken."""
    session = sessions.current
    return (session.run_id, session.recorder.steps) if session is not None and session.active else ("", 0)


def mark(name: str) -> None:
    """Adds a named moment to this rank's timeline, e.g. ``ddpwatch.mark("checkpoint")``. Free when unwatched."""
    session = sessions.current  # which another thread may close meanwhile
    if session is not None and session.active:
        session.guard.run("marks", session.mark, name)


def count(*, samples: float | None = None, tokens: float | None = None, flops: float | None = None) -> None:
    """Counts what this rank has just trained on, or is about to: once per batch, on any thread. Free when unwatched.

    Ranks that train on the same samples (tensor, pipeline, context or sequence parallel) may all count the whole batch.

    Args:
        samples: In the batch. Without it, batches of the DataLoader times its batch size are counted.
        tokens: In the batch.
        flops: What the whole model computes for the batch, forward and backward. Without it, 6 × parameters × tokens.
    """
    session = sessions.current
    if session is not None and session.active:
        session.guard.run("counts", session.count, samples, tokens, flops)
