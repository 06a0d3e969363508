"""Comm hooks of the user's, seen from the moment they are registered.

On Python ≥ 3.12 by their calls, else on torch ≥ 2.14 by the hooks of their process group: then they run as they are.
Elsewhere `timed` is around them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.probe.calls import SeenCalls
from ddpwatch.probe.ddp_collectives import DdpObserver, GroupHooks, issued_anywhere, nbytes_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

# The stamp, the bytes, and how many collectives were issued before; None where it is left alone
Launch = tuple[int, int, "int | None"] | None
_original_register = DistributedDataParallel.register_comm_hook
_observers: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[DdpObserver]] = weakref.WeakKeyDictionary()
_registrations: SeenCalls | None = None
_seen_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, SeenCalls] = weakref.WeakKeyDictionary()


def comm_hook_of(ddp: DistributedDataParallel) -> str:
    """Returns the name of the comm hook that a module has, empty if none."""
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))  # type: ignore[no-untyped-call]


def time_later_hook(ddp: DistributedDataParallel, observer: DdpObserver) -> None:
    """Sees any comm hook that is registered on this module from now on, until `no_later_hook`."""
    global _registrations
    _observers[ddp] = weakref.ref(observer)
    weakref.finalize(observer, observer.guard.run, "closing", _end_with_the_last).atexit = False
    if _registrations is not None:
        return
    place = DistributedDataParallel, "register_comm_hook"
    _registrations = SeenCalls([place], names=("self", "hook"), end=_see, on_error=_failed)
    if not _registrations.by_events and not GroupHooks.supported(dist.ProcessGroup):
        _registrations.close()
        _patch_registration()


def no_later_hook(ddp: DistributedDataParallel | None) -> None:
    """Sees no comm hook of this module's any more, nor any that is registered from now on."""
    if ddp is not None:
        _observers.pop(ddp, None)
        if (seen := _seen_hooks.pop(ddp, None)) is not None:
            seen.close()
    _end_with_the_last()


def pause_hook(ddp: DistributedDataParallel, paused: bool) -> None:
    """Lets the calls of the module's comm hook pass, or sees them again."""
    if (seen := _seen_hooks.get(ddp)) is not None:
        seen.pause(paused)


def _end_with_the_last() -> None:
    global _registrations
    if _registrations is not None and not any(observer() for observer in list(_observers.values())):
        _registrations.close()
        _registrations = None


def _failed(error: Exception) -> None:
    for reference in list(_observers.values()):
        if (observer := reference()) is not None:
            observer.guard.failed(error, "collectives")


def _observer_of(ddp: DistributedDataParallel) -> DdpObserver | None:
    reference = _observers.get(ddp)
    return None if reference is None else reference()


def _see(ddp: DistributedDataParallel, hook: Hook, result: None) -> None:
    """Watches a comm hook that runs as it is: it is seen by its calls, or by its process group's hooks.

    The former say which bucket a call is for, and see a hook that communicates nothing.
    """
    observer = _observer_of(ddp)
    if observer is not None and not _see_calls(ddp, hook, observer):
        observer.guard.run("collectives", observer.on_comm_hook)


def _see_calls(ddp: DistributedDataParallel, hook: Any, observer: DdpObserver) -> bool:
    """Stamps the calls of a hook, whose code other modules may share; whether that is possible."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None or "bucket" not in code.co_varnames[: code.co_argcount]:
        return False
    watching, parameters = weakref.ref(observer), frozenset(map(id, ddp.parameters()))
    under_way: list[Launch] = []

    def begin(bucket: GradBucket) -> None:
        under_way.clear()  # of a call that has raised
        observer = watching()
        if observer is not None and id(bucket.parameters()[0]) in parameters:
            under_way.append(_before(observer, bucket))

    def end(bucket: GradBucket, future: Any) -> None:
        observer = watching()
        if observer is not None and under_way:
            _after(observer, bucket, future, under_way.pop())

    failed = functools.partial(observer.guard.failed, feature="collectives")
    seen = SeenCalls([], code=code, names=["bucket"], begin=begin, end=end, on_error=failed)
    weakref.finalize(observer, observer.guard.run, "closing", seen.close).atexit = False
    _seen_hooks[ddp] = seen
    return seen.by_events


def _before(observer: DdpObserver, bucket: GradBucket) -> Launch:
    at = observer.before_launch()
    return (at, nbytes_of(bucket.buffer()), issued_anywhere()) if at else None


def _after(observer: DdpObserver, bucket: GradBucket, future: Any, launch: Launch) -> None:
    """Records a hook's bucket. With a finished future, it has waited itself, or is idle: nothing was communicated."""
    if launch is None or not isinstance(future, torch._C.Future):  # DDP refuses anything else
        return
    at, nbytes, before = launch
    done = future.done()
    idle = bool(before) and before == issued_anywhere() and done
    if done and before and not idle:
        observer.hook_has_waited(at)
    entry = observer.after_launch(bucket.index(), nbytes, at, future)
    if entry is not None:
        entry.idle = idle


def timed(hook: Hook, observer: DdpObserver) -> Hook:
    """Stamps a user's comm hook before and when its future is done, where its calls cannot be seen."""

    @functools.wraps(hook)
    def ddpwatch_timing(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        launch = observer.guard.run("collectives", _before, observer, bucket)
        future = hook(state, bucket)
        if launch is not None:
            observer.guard.run("collectives", _after, observer, bucket, future, launch)
        return future

    return ddpwatch_timing


def _patch_registration() -> None:
    """Patches the class rather than the instance, so that instances still pickle. It stays patched."""

    @functools.wraps(_original_register)
    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Hook) -> None:
        given = hook
        try:
            observer = _observer_of(self)
            if observer is not None and hasattr(hook, "__qualname__"):  # DDP refuses what has no name
                given = timed(hook, observer)
        except Exception as error:
            _failed(error)
        _original_register(self, state, given)
        if given is not hook:
            self._comm_hooks[-1] = (hook, state)  # code that looks finds the hook that was given

    if DistributedDataParallel.register_comm_hook is _original_register:
        DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]
