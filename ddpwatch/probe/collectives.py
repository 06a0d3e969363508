"""Sees a DDP module's collectives: when each was issued, when its result was there, and who issues them.

Without a comm hook the reducer all-reduces through its process group. `TimedGroup` stands in front of that group, for
this one reducer only, and takes two stamps; what is reduced, and how, stays DDP's own C++ path. Where process groups
have hooks of their own (torch 2.14), a comm hook of the user's is left alone and seen through them. Elsewhere it is
wrapped when it is registered, and one that was registered before stays as it is: its completion is unknown.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from ddpwatch.probe.recorder import BucketRecord

    Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Observer(Protocol):
    """Who is told. No method raises."""

    def called(self) -> int:
        """A collective is about to be issued: the stamp of that, or 0 for not to observe it."""

    def issued(self, index: int | None, nbytes: int, at: int, future: Any) -> BucketRecord | None:
        """It was issued.

        Args:
            index: The bucket's index, None for the next one.
            nbytes: Its size.
            at: What `called` returned.
            future: Is done when the result is there.

        Returns:
            The bucket's record, None if it is not recorded.
        """

    def failed(self, error: Exception) -> None:
        """Something of ours went wrong."""

    def hooked(self) -> None:
        """The module was given a comm hook that was not wrapped, since its group has hooks of its own."""


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a bucket's values, also of a sparse one."""
    return tensor.nbytes if tensor.layout is torch.strided else tensor._values().nbytes


class TimedGroup(dist.ProcessGroup):
    """What a reducer takes for its process group: the group itself, seen through an observer.

    Every collective is passed on by Python code, also those that nobody observes: what a Python subclass does not
    override, torch runs in the base class *with the GIL held*. There Gloo's queue is locked, whose worker holds that
    lock while it waits for the GIL to destroy a callback: a deadlock. The group's own methods release the GIL first.

    Args:
        inner: The process group. Every operation is its own; only all-reduces pass through here on their way.
        observer: Told about them; None: nobody.
    """

    def __init__(self, inner: dist.ProcessGroup, observer: Observer | None) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.observer = observer
        self.bound_device_id = inner.bound_device_id  # registering a backend also tells it this
        kinds = dist.ProcessGroup.BackendType
        for device in inner._device_types:
            backend = inner._get_backend(device)
            self._register_backend(device, getattr(kinds, backend.name().upper(), kinds.CUSTOM), backend)

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> dist.Work:  # type: ignore[override]
        """All-reduces, with a stamp before and, later, one when the result is there."""
        observer = self.observer
        at = 0 if observer is None else observer.called()
        work = self.inner.allreduce(tensors, *options)
        if at and observer is not None:
            try:
                # A reducer that looks for unused parameters also reduces which ones were used: integers, not a bucket.
                if tensors[0].dtype is not torch.int32:
                    observer.issued(None, nbytes_of(tensors[0]), at, work.get_future())
            except Exception as error:
                observer.failed(error)
        return work


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: TimedGroup, *arguments: Any) -> Any:
        return getattr(self.inner, name)(*arguments)

    method.__name__ = name
    return method


for _name in (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
):  # fmt: skip
    setattr(TimedGroup, _name, _passed_on(_name))


def timed(hook: Hook, observer: Observer, count: Callable[[], int | None]) -> Hook:
    """A user's comm hook with a stamp before and one when its future is done.

    Args:
        hook: The comm hook.
        observer: Told about each call.
        count: How many collectives its group has issued, None if that is not known. A hook that returns a finished
            future and has issued none has communicated nothing.
    """

    @functools.wraps(hook)
    def ddpwatch_timing(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        at = observer.called()
        before = nbytes = 0
        if at:
            try:
                nbytes, before = nbytes_of(bucket.buffer()), count() or 0
            except Exception as error:
                observer.failed(error)
                at = 0
        future = hook(state, bucket)
        if at and isinstance(future, torch._C.Future):  # DDP refuses anything else
            try:
                idle = bool(before) and before == count() and future.done()
                entry = observer.issued(bucket.index(), nbytes, at, future)
                if entry is not None:
                    entry.idle = idle
            except Exception as error:
                observer.failed(error)
        return future

    return ddpwatch_timing


MOST_CALLED = 64  # collectives that were called and not issued: each has failed


class GroupHooks:
    """Sees what a comm hook issues on its process group, on torch ≥ 2.14. The user's hook runs as it is.

    One call of it may issue several collectives, and they do not say which bucket they are for: only a hook that issues
    one all-reduce for each bucket is told rightly. With any other the number of buckets does not fit the layout.

    Args:
        group: The process group; see `supported`.
        observer: Told about every collective on it.
    """

    def __init__(self, group: Any, observer: Observer) -> None:
        self._observer = observer
        self._called: dict[int, tuple[int, int]] = {}
        self._handles = [group.register_pre_hook(self._before), group.register_post_hook(self._after)]

    @staticmethod
    def supported(group: object) -> bool:
        """Whether this torch's process groups have such hooks."""
        return hasattr(group, "register_pre_hook") and hasattr(group, "register_post_hook")

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, args: Any) -> None:
        try:
            tensors = _reduced_by(args)
            at = self._observer.called() if tensors else 0
            if at:
                if len(self._called) > MOST_CALLED:
                    self._called.clear()
                self._called[args.op_id] = (sum(map(nbytes_of, tensors)), at)
        except Exception as error:
            self._observer.failed(error)

    def _after(self, args: Any) -> None:
        try:
            nbytes, at = self._called.pop(args.op_id, (0, 0))
            if at:
                self._observer.issued(None, nbytes, at, args.work.get_future())
        except Exception as error:
            self._observer.failed(error)


def _reduced_by(args: Any) -> list[torch.Tensor]:
    """What an all-reduce of gradients takes; nothing for any other collective (these see all of a process group's)."""
    if "allreduce" not in str(args.name).lower().replace("_", ""):
        return []
    return [tensor for tensor in args.input_tensors if tensor.dtype is not torch.int32]


# -- the moment at which a user registers a comm hook ------------------------------------------------------------

_original_register = DistributedDataParallel.register_comm_hook
_observers: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def time_later_hook(ddp: DistributedDataParallel, observer: Observer) -> None:
    """Has a comm hook that is registered on this module from now on wrapped by `timed`."""
    _teach_registration()
    _observers[ddp] = weakref.ref(observer)


def comm_hook_of(ddp: DistributedDataParallel) -> str:
    """Name of the comm hook that a module has, empty if none."""
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))  # type: ignore[no-untyped-call]


def counter(group: Any) -> Callable[[], int | None]:
    """Tells how many collectives a process group has issued on this rank; None where it does not count."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    try:
        count = None if count is None or count() is None else count
    except RuntimeError:  # a backend that does not count
        count = None
    return count or (lambda: None)


def _teach_registration() -> None:
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
            observer.hooked()
            return
        _original_register(self, state, timed(hook, observer, counter(self.process_group)))
        self._comm_hooks[-1] = (hook, state)  # who looks finds the hook that was given

    with _lock:
        if DistributedDataParallel.register_comm_hook is _original_register:
            DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


# -- callbacks that a collective's thread runs --------------------------------------------------------------------

_alive: set[int] = set()

# A thread of Gloo's has no Python state of its own: each call of ours, and each release of what was called, would make
# one and destroy it, which maps memory and unmaps it (40 page faults a step with 22 buckets, a third of what seeing
# them took). So the first call keeps the state, for as long as the process lives. This says so, and lies in that state.
_here = threading.local()


class Callback:
    """A callback that a collective's thread runs and then destroys. See `drain`."""

    __slots__ = ("__weakref__", "_call", "_entry")

    def __init__(self, call: Callable[[BucketRecord], None], entry: BucketRecord) -> None:
        self._call = call
        self._entry = entry
        _alive.add(id(self))

    def __call__(self, future: Any) -> None:
        """What the thread calls."""
        self._call(self._entry)
        if not hasattr(_here, "kept"):
            _here.kept = ctypes.pythonapi.PyGILState_Ensure()

    def __del__(self, _gone: Callable[[int], None] = _alive.discard) -> None:  # bound now: globals go first at exit
        _gone(id(self))


def drain(timeout_s: float = 0.1) -> None:
    """Waits until the collectives' threads have let go of our callbacks; registered to run when the interpreter ends.

    Such a thread wakes who waits for its result, and only then takes the GIL to destroy the callback. If the
    interpreter is ending at that moment, taking the GIL aborts the process: an unwatched job has no Python callbacks
    and cannot meet this, so a watched one must not either.
    """
    deadline = time.monotonic() + timeout_s
    while _alive and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)  # from the callback's end to the thread's last touch of Python: microseconds


atexit.register(drain)
