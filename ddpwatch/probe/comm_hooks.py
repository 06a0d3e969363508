"""Comm hooks of the user's: timed from the moment they are registered."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.probe.collectives import DdpObserver, GroupHooks, issued_anywhere, nbytes_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_original_register = DistributedDataParallel.register_comm_hook
_observers: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def comm_hook_of(ddp: DistributedDataParallel) -> str:
    """Name of the comm hook that a module has, empty if none."""
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))  # type: ignore[no-untyped-call]


def time_later_hook(ddp: DistributedDataParallel, observer: DdpObserver) -> None:
    """Wraps by `timed` any comm hook that is registered on this module from now on."""
    _patch_registration()
    _observers[ddp] = weakref.ref(observer)


def timed(hook: Hook, observer: DdpObserver, count: Callable[[], int | None]) -> Hook:
    """A user's comm hook with a stamp before and one when its future is done.

    Args:
        hook: The comm hook.
        observer: Sees each call.
        count: How many collectives this process has issued in any group, None if that is not known. A hook that
            returns a finished future and has issued none has communicated nothing.
    """

    def before(bucket: GradBucket) -> tuple[int, int, int | None] | None:
        at = observer.before_launch()
        return (at, nbytes_of(bucket.buffer()), count()) if at else None

    def after(bucket: GradBucket, future: Any, at: int, nbytes: int, issued: int | None) -> None:
        idle = bool(issued) and issued == count() and future.done()
        entry = observer.after_launch(bucket.index(), nbytes, at, lambda: future)
        if entry is not None:
            entry.idle = idle

    @functools.wraps(hook)
    def ddpwatch_timing(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        called = observer.guard.run("collectives", before, bucket)
        future = hook(state, bucket)
        if called is not None and isinstance(future, torch._C.Future):  # DDP refuses anything else
            observer.guard.run("collectives", after, bucket, future, *called)
        return future

    return ddpwatch_timing


def _patch_registration() -> None:
    """Patches the class rather than the instance, so that instances still pickle."""

    @functools.wraps(_original_register)
    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Hook) -> None:
        reference = _observers.get(self)
        observer = None if reference is None else reference()
        if observer is None or not hasattr(hook, "__qualname__"):  # DDP refuses what has no name
            _original_register(self, state, hook)
            return
        if GroupHooks.supported(self.process_group):
            _original_register(self, state, hook)
            observer.guard.run("collectives", observer.on_comm_hook)
            return
        _original_register(self, state, timed(hook, observer, issued_anywhere))
        self._comm_hooks[-1] = (hook, state)  # code that looks finds the hook that was given

    with _lock:
        if DistributedDataParallel.register_comm_hook is _original_register:
            DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]
