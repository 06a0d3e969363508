"""FSDP2's collectives, seen where it issues them: a job may exchange the object that gathers or scatters.

`TimedAllGather` and `TimedReduceScatter` stand in front of FSDP2's own object, one per parameter group, and look like
it. The all-reduce of HSDP and of ``replicate`` cannot be exchanged: there `see_all_reduces` puts a view of
``torch.distributed`` in front of the one that FSDP2's own module calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import wrapt
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from ddpwatch.probe.guard import Guard
from ddpwatch.probe.record import BucketRecord
from ddpwatch.wire.messages import CollectiveOp


class ShardedObserver(Protocol):
    """Sees the collectives of one module. Its methods are called through the guard."""

    guard: Guard

    def launch(
        self, op: CollectiveOp, label: int, tensor: torch.Tensor, group: dist.ProcessGroup, ready: int | None = None
    ) -> BucketRecord | None:
        """Notes that a collective is about to be issued; returns None where it is left alone.

        Args:
            op: Its operation.
            label: Index of the parameter group.
            tensor: All that it gathers, scatters or reduces.
            group: The process group.
            ready: When its last gradient was accumulated, where that is known.
        """

    def stamp(self) -> int | None:
        """Returns a stamp of now; None where nothing is recorded."""

    def finished(self, entry: BucketRecord) -> None:
        """Notes that the call has returned: on the host the result is there, on a GPU the collective is enqueued."""

    def failed(self, entry: BucketRecord) -> None:
        """Notes that the call has raised."""

    def follow(self, entry: BucketRecord, work: Any) -> None:
        """Notes that the call has returned at once, and that ``work`` completes later."""

    def waited(self, entry: BucketRecord, begin: int | None) -> None:
        """Notes the end of a wait for it that started at ``begin``."""


class _SeenWork(wrapt.ObjectProxy[Any]):
    """An asynchronous collective, whose `wait` is stamped."""

    def __init__(self, work: Any, observer: ShardedObserver, entry: BucketRecord) -> None:
        super().__init__(work)
        self._self_observer = observer
        self._self_entry = entry

    def wait(self, *arguments: Any, **options: Any) -> Any:
        observer = self._self_observer
        begin = observer.guard.run("collectives", observer.stamp)
        try:
            return self.__wrapped__.wait(*arguments, **options)
        finally:
            observer.guard.run("collectives", observer.waited, self._self_entry, begin)


class TimedComm(wrapt.ObjectProxy[Any]):
    """FSDP2's own communication object of one parameter group, seen by an observer."""

    def __init__(self, comm: Any, observer: ShardedObserver, label: int) -> None:
        super().__init__(comm)
        self._self_observer = observer
        self._self_guarded = partial(observer.guard.run, "collectives")
        self._self_label = label
        self._self_ready: int | None = None

    def _self_issue(self, entry: BucketRecord | None, issue: Callable[[], Any]) -> Any:
        if entry is None:
            return issue()
        guarded, observer = self._self_guarded, self._self_observer
        try:
            work = issue()
        except BaseException:
            guarded(observer.failed, entry)
            raise
        if work is None:
            guarded(observer.finished, entry)
            return None
        guarded(observer.follow, entry, work)
        return _SeenWork(work, observer, entry)


class TimedAllGather(TimedComm):
    """See `TimedComm`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """All-gathers, with its stamps."""
        about = "all_gather", self._self_label, output_tensor, group
        entry = self._self_guarded(self._self_observer.launch, *about)
        return self._self_issue(entry, lambda: self.__wrapped__(output_tensor, input_tensor, group, async_op))


class TimedReduceScatter(TimedComm):
    """See `TimedComm`. FSDP2 asks it for memory when the gradients of its parameter group are complete."""

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Passes on, and stamps the first call of a reduction."""
        self._self_guarded(self._self_begin)
        memory: torch.Tensor = self.__wrapped__.allocate(*arguments, **options)
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce-scatters, with its stamps."""
        ready, self._self_ready = self._self_ready, None
        about = "reduce_scatter", self._self_label, input_tensor, group, ready
        entry = self._self_guarded(self._self_observer.launch, *about)
        return self._self_issue(entry, lambda: self.__wrapped__(output_tensor, input_tensor, group, op, async_op))

    def _self_begin(self) -> None:
        if _Reducing.comm() is not self or self._self_ready is None:
            _Reducing.comm, self._self_ready = weakref.ref(self), self._self_observer.stamp()

    def _self_all_reduce(self, tensor: torch.Tensor, group: Any, issue: Callable[[], Any]) -> Any:
        ready, self._self_ready = self._self_ready, None
        about = "all_reduce", self._self_label, tensor, group, ready
        entry = self._self_guarded(self._self_observer.launch, *about)
        return self._self_issue(entry, issue)


def _none() -> None:
    return None


class _Reducing:
    """The parameter group that is being reduced, until its all-reduce: FSDP2 reduces one at a time."""

    comm: Callable[[], TimedReduceScatter | None] = _none


def forget_reduction() -> None:
    """Forgets, at a forward, what was reduced last: it has had its all-reduce, has none, or has failed."""
    _Reducing.comm = _none


class _SeenDistributed(wrapt.ObjectProxy[Any]):
    """``torch.distributed`` as FSDP2's collectives see it.

    If somebody else puts theirs in front of it, a second one may come in front of that. The first to be called counts.
    """

    def all_reduce(self, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        comm, _Reducing.comm = _Reducing.comm(), _none

        def issue() -> Any:
            return self.__wrapped__.all_reduce(tensor, *arguments, **options)

        group = options.get("group")
        return issue() if comm is None or group is None else comm._self_all_reduce(tensor, group, issue)


_seeing = 0  # observers


def see_all_reduces(observer: ShardedObserver) -> Callable[[], object]:
    """Lets an observer see the all-reduces, until it has gone or calls what this returns.

    Raises:
        KeyError: FSDP2's module has no name ``dist`` any more.
    """
    global _seeing
    names = vars(_fsdp_collectives)
    if type(names["dist"]) is not _SeenDistributed:
        names["dist"] = _SeenDistributed(names["dist"])
    _seeing += 1
    until = weakref.finalize(observer, observer.guard.run, "closing", _see_no_more)
    until.atexit = False
    return until


def _see_no_more() -> None:
    """Gives FSDP2's module what it had, after the last observer, unless somebody else has put theirs in front."""
    global _seeing
    _seeing -= 1
    names = vars(_fsdp_collectives)
    if not _seeing and type(seen := names.get("dist")) is _SeenDistributed:
        names["dist"] = seen.__wrapped__
