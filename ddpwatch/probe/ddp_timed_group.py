"""The process group a reducer all-reduces through: `TimedGroup`, before the module's own, which calls an observer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.probe.comm_hooks import comm_hook_of
from ddpwatch.probe.ddp_collectives import DdpObserver, nbytes_of


class TimedGroup(dist.ProcessGroup):
    """The process group that a reducer is given: the module's own group, seen by an observer.

    Every collective is passed on by Python code, even those that nobody observes: what a Python subclass does not
    override, torch runs in the base class *with the GIL held*. There Gloo's queue is locked, whose worker holds that
    lock while it waits for the GIL to let go of a tensor that Python knows: a deadlock. The group's own methods release
    the GIL first.

    Args:
        inner: The module's process group, which carries out every operation.
        observer: Sees the all-reduces; None for nobody.
    """

    def __init__(self, inner: dist.ProcessGroup, observer: DdpObserver | None) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.observer = observer
        self.bound_device_id = inner.bound_device_id  # registering a backend also passes this on to it
        kinds = dist.ProcessGroup.BackendType
        for device in inner._device_types:
            backend = inner._get_backend(device)
            self._register_backend(device, getattr(kinds, backend.name().upper(), kinds.CUSTOM), backend)

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> dist.Work:  # type: ignore[override]
        """All-reduces, with a stamp before and, later, one when the result is there."""
        observer = self.observer
        if observer is None:
            return self.inner.allreduce(tensors, *options)
        at = observer.guard.run("collectives", observer.before_launch)
        work = self.inner.allreduce(tensors, *options)
        if at:
            observer.guard.run("collectives", _launched, observer, tensors[0], at, work)
        return work


def _launched(observer: DdpObserver, tensor: torch.Tensor, at: int, work: dist.Work) -> None:
    """Stamps a launch. A reducer that looks for unused parameters also reduces integers, which are no bucket."""
    if tensor.dtype is not torch.int32:
        observer.after_launch(None, nbytes_of(tensor), at, work)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: TimedGroup, *arguments: Any) -> Any:
        return getattr(self.inner, name)(*arguments)

    method.__name__ = name
    return method


for _name in (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "gather_into_tensor", "gather_single", "reconfigure",
    "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
):  # fmt: skip
    setattr(TimedGroup, _name, _passed_on(_name))


# What the reducers all-reduce through. Must live as long as a reducer or a built-in comm hook may call it, and no
# longer than the module: it owns the process group.
_timed_groups: weakref.WeakKeyDictionary[DistributedDataParallel, list[TimedGroup]] = weakref.WeakKeyDictionary()


class ReducerGroup:
    """Switches one module's reducer between the module's process group and a `TimedGroup` in front of it.

    Args:
        observer: Sees the all-reduces while the reducer has the timed group.

    Attributes:
        timed: Whether the reducer has the timed group; None if a signal came while it was given one of the two.
    """

    def __init__(self, observer: DdpObserver) -> None:
        self.timed: bool | None = False
        self._observer = observer

    def switch(self, ddp: DistributedDataParallel, timed: bool) -> None:
        """Makes the reducer all-reduce through the timed group, or through the module's own."""
        if not timed and self.timed is False:
            return
        group, made = ddp.process_group, _timed_groups.setdefault(ddp, [])
        view = next((known for known in made if known.inner is group), None)
        is_new = view is None  # the first, or the module was given another group
        if view is None:
            view = TimedGroup(group, self._observer)
            made.append(view)
            self.timed = None
        view.observer = self._observer
        if timed is not self.timed:
            self.timed = None
            ddp.reducer._update_process_group(view if timed else group)
            self.timed = timed
        if is_new and not comm_hook_of(ddp).startswith("Builtin"):  # that keeps the group that it was made with
            made[:] = [view]

    def release(self, ddp: DistributedDataParallel, in_backward: bool) -> None:
        """Gives the reducer the module's own group back, and drops the timed one where nothing can hold it.

        Args:
            ddp: The module.
            in_backward: Whether a backward is running, as in a signal handler. Then the reducer is locked and keeps
                the timed group, which only passes on from now on.
        """
        for view in _timed_groups.get(ddp, ()):
            view.observer = None
        if in_backward:
            return
        if self.timed is not False:
            ddp.reducer._update_process_group(ddp.process_group)
            self.timed = False
        if not comm_hook_of(ddp).startswith("Builtin"):  # that keeps the group that it was made with
            _timed_groups.pop(ddp, None)
