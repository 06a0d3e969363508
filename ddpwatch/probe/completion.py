"""Completions of collectives: callbacks that their own threads run, and the stream that waits for them on a GPU."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ddpwatch.probe.record import BucketRecord

_alive: set[int] = set()

# A thread of Gloo's has no Python state of its own: each call into Python, and each release of what was called, would
# make one and destroy it, which maps memory and unmaps it (40 page faults a step with 22 buckets, a third of what
# seeing them took). So the first call keeps the state for as long as the process lives, and notes that in the state.
_thread_state = threading.local()


class Callback:
    """A callback that a collective's thread runs and then destroys. See `drain`."""

    __slots__ = ("__weakref__", "_call", "_entry")

    def __init__(self, call: Callable[[BucketRecord], None], entry: BucketRecord) -> None:
        self._call = call
        self._entry = entry
        _alive.add(id(self))

    def __call__(self, future: Any) -> None:
        """Runs on the collective's thread."""
        self._call(self._entry)
        if not hasattr(_thread_state, "kept"):
            _thread_state.kept = ctypes.pythonapi.PyGILState_Ensure()

    def __del__(self, _forget: Callable[[int], None] = _alive.discard) -> None:  # bound now: globals go first at exit
        _forget(id(self))


def waiting_stream(device: torch.device) -> torch.cuda.Stream:
    """Makes a stream that waits for the collectives of full steps.

    Without one, torch runs a future's callback on one of its pool's 32 streams, which a job has, too: on an H100 that
    broke a CUDA graph which another thread was capturing on that stream. Each priority has a pool; a job takes streams
    of the default priority, NCCL those of -1.
    """
    return torch.cuda.Stream(device, priority=-3)  # type: ignore[no-untyped-call]


def drain(timeout_s: float = 0.1) -> None:
    """Waits until the collectives' threads have released every callback; registered to run when the interpreter ends.

    Such a thread wakes those who wait for its result, and only then takes the GIL to destroy the callback. If the
    interpreter is ending at that moment, taking the GIL aborts the process: an unwatched job has no Python callbacks
    and cannot meet this, so a watched one must not either.
    """
    deadline = time.monotonic() + timeout_s
    while _alive and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)  # from the callback's end to the thread's last touch of Python: microseconds


atexit.register(drain)
