"""The timing comm hook: DDP's default all-reduce or the user's own hook, with a stamp before and one after.

DDP takes one comm hook for life. So ours is registered at once, and ``register_comm_hook`` on a watched module
hands the user's later hook to ours instead of failing.
"""
# No `from __future__ import annotations` here: DDP compares a comm hook's annotations with the types themselves.

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.errors import UsageError
from ddpwatch.probe.recorder import BucketRecord

FIX = "call ddpwatch.watch(model) before model.register_comm_hook(...): the two then work together"
Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class CommHook:
    """The comm hook of one DDP module.

    Args:
        ddp: The module; must not have a comm hook.
        on_launch: Called once the collective is issued, with the bucket, its bytes, and when (absolute ns) DDP
            called the hook and the collective was issued. Returns what to complete, or None. Never raises.
        on_done: Called when the result is there, on whatever thread finds out.
        clock: Takes a stamp: of the host, or of the current stream.
        timed: Whether a completion can be stamped. With NCCL the future completes when the collective is *enqueued*;
            the callback then runs on a stream that waits for it, where only a GPU clock can stamp.

    Raises:
        UsageError: The module has a comm hook already.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        on_launch: Callable[[GradBucket, int, int, int], Optional[BucketRecord]],
        on_done: Callable[[BucketRecord], None],
        clock: Callable[[], int],
        timed: bool,
    ) -> None:
        self._on_launch = on_launch
        self._on_done = on_done
        self._clock = clock
        self._timed = timed
        self._user: Optional[tuple[Hook, Any]] = None
        self._group = ddp.process_group
        self._count: Optional[Callable[[], int]] = getattr(self._group, "_get_sequence_number_for_group", None)
        self._average = Average(ddp)
        self._register(ddp)

    def note_gradients(self) -> None:
        """A forward has ended: notes what the default all-reduce must know about the gradients before it."""
        if self._user is None:
            self._average.note_gradients()

    def _register(self, ddp: DistributedDataParallel) -> None:
        if ddp._comm_hooks:
            raise UsageError(f"the model has a comm hook already ({ddp._comm_hooks[0][0].__qualname__})", FIX)
        _teach_registration()
        try:
            _original_register(ddp, None, _plain_function(self))
        except RuntimeError as error:  # a built-in hook leaves no trace in Python
            raise UsageError("the model has a built-in comm hook already", FIX) from error
        ddp._comm_hooks.clear()  # as in an unwatched module: nothing here is the user's
        _watched[ddp] = weakref.ref(self)

    def adopt(self, ddp: DistributedDataParallel, state: Any, hook: Hook) -> None:
        """Takes the user's hook in, with DDP's own checks and its own error for a second one."""
        ddp._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        self._take(ddp, hook.__qualname__, hook, state)
        ddp._comm_hooks.append((hook, state))

    def adopt_builtin(self, ddp: DistributedDataParallel, kind: Any) -> None:
        """Takes one of DDP's C++ hooks in, by its Python twin (same arithmetic)."""
        twins = {
            BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self._take(ddp, str(kind), twins[kind], self._group)

    def _take(self, ddp: DistributedDataParallel, name: str, hook: Hook, state: Any) -> None:
        if self._user is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if ddp.logger is not None:
            ddp.logger._set_comm_hook_name(name)
        self._user = (hook, state)

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls when a bucket is full. Nothing of ours comes before the collective but two stamps."""
        called = self._clock()
        buffer = bucket.buffer()
        if self._user is None:
            self._average(bucket, buffer)
            launch = self._clock()
            work = self._group.allreduce([buffer])
            entry = self._on_launch(bucket, buffer.nbytes, called, launch)
            # DDP wants a future made by Python, so the one callback also takes the stamp.
            return work.get_future().then(_Callback(self._reduced, entry))
        hook, state = self._user
        issued = self._issued()
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        entry = self._on_launch(bucket, buffer.nbytes, called, called)
        if entry is not None and self._timed:
            entry.idle = issued is not None and issued == self._issued() and future.done()
            future.add_done_callback(_Callback(self._done, entry))
        return future

    def _issued(self) -> Optional[int]:
        """How many collectives the group has issued; None where it does not count them."""
        try:
            return None if self._count is None else self._count()
        except RuntimeError:
            self._count = None
            return None

    def _reduced(self, entry: Optional[BucketRecord], future: Any) -> torch.Tensor:
        tensors: list[torch.Tensor] = future.value()
        if entry is not None and self._timed:
            self._on_done(entry)
        return tensors[0]

    def _done(self, entry: BucketRecord, future: Any) -> None:
        self._on_done(entry)


_alive: set[int] = set()


class _Callback:
    """A callback that a collective's thread runs and then destroys. See `drain`."""

    __slots__ = ("__weakref__", "_call", "_entry")

    def __init__(self, call: Callable[..., Any], entry: Optional[BucketRecord]) -> None:
        self._call = call
        self._entry = entry
        _alive.add(id(self))

    def __call__(self, future: Any) -> Any:
        return self._call(self._entry, future)

    def __del__(self, _gone: Callable[[int], None] = _alive.discard) -> None:  # bound now: globals go first at exit
        _gone(id(self))


def drain(timeout_s: float = 0.5) -> None:
    """Waits until the collectives' threads have let go of our callbacks; registered to run when the interpreter ends.

    Such a thread wakes who waits for its result, and only then takes the GIL to destroy the callback. If the
    interpreter is ending at that moment, taking the GIL aborts the process: an unwatched job has no Python callbacks
    and cannot meet this, so a watched one must not either.
    """
    deadline = time.monotonic() + timeout_s
    while _alive and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)  # from the callback's end to the thread's last touch of Python: microseconds


class Average:
    """Divides a bucket by the world size as DDP does without a comm hook, to the last bit.

    DDP multiplies a gradient by 1/n while it copies it into the bucket, and divides it by n where it already
    lives there (``gradient_as_bucket_view``, gradients zeroed in place). The two differ in the last bit
    unless n is a power of two, so only then does it matter which of them a gradient gets.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._world = dist.get_world_size(ddp.process_group)
        exact = self._world & (self._world - 1) == 0
        self._params = list(ddp.parameters()) if ddp.gradient_as_bucket_view and not exact else []
        self._homes: dict[int, int] = {}

    def note_gradients(self) -> None:
        """Notes where each gradient lives before the backward, if that will matter."""
        if self._params:
            self._homes = {id(p): p.grad.untyped_storage().data_ptr() for p in self._params if p.grad is not None}

    def __call__(self, bucket: GradBucket, buffer: torch.Tensor) -> None:
        """Averages the bucket in place."""
        if self._world == 1:
            return
        if not self._homes:
            buffer.mul_(1.0 / self._world)
            return
        home = buffer.untyped_storage().data_ptr()
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._homes.get(id(param)) == home:
                gradient.div_(self._world)
            else:
                gradient.mul_(1.0 / self._world)


# Weak on both sides: the reducer owns the hook, the user owns the module.
_watched: "weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[CommHook]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_original_register = DistributedDataParallel.register_comm_hook
_original_builtin = DistributedDataParallel._register_builtin_comm_hook


def _plain_function(comm_hook: CommHook) -> Hook:
    """DDP wants a function with a ``bucket`` parameter and a ``__qualname__``."""

    def ddpwatch_timing(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return comm_hook(bucket)

    return ddpwatch_timing


def _hook_of(ddp: DistributedDataParallel) -> Optional[CommHook]:
    """Our hook on a module, None if it is not watched."""
    found = _watched.get(ddp)
    return None if found is None else found()


def _teach_registration() -> None:
    """Lets ``register_comm_hook`` on watched modules hand over to ours. On the class, so that instances pickle."""

    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Hook) -> None:
        if (ours := _hook_of(self)) is not None:
            ours.adopt(self, state, hook)
        else:
            _original_register(self, state, hook)

    def _register_builtin_comm_hook(self: DistributedDataParallel, comm_hook_type: Any) -> None:
        if (ours := _hook_of(self)) is not None:
            ours.adopt_builtin(self, comm_hook_type)
        else:
            _original_builtin(self, comm_hook_type)  # type: ignore[no-untyped-call]

    with _lock:
        if DistributedDataParallel.register_comm_hook is not _original_register:
            return
        atexit.register(drain)
        for ours, original in (
            (register_comm_hook, _original_register),
            (_register_builtin_comm_hook, _original_builtin),
        ):
            functools.update_wrapper(ours, original)
            setattr(DistributedDataParallel, original.__name__, ours)
