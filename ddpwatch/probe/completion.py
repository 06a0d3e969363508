"""Completions of collectives: callbacks that their own threads run, and the stream that waits for them on a GPU."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ddpwatch.probe.record import BucketRecord

# torch has a pool of 32 streams for each priority, and gives them out in turn. A job takes streams of the default
# priority, NCCL may take those of -1.
OWN_PRIORITY = -3

_alive: set[int] = set()
_log = logging.getLogger("ddpwatch")

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
        """Called by the collective's thread."""
        self._call(self._entry)
        if not hasattr(_thread_state, "kept"):
            _thread_state.kept = ctypes.pythonapi.PyGILState_Ensure()

    def __del__(self, _forget: Callable[[int], None] = _alive.discard) -> None:  # bound now: globals go first at exit
        _forget(id(self))


def own_stream(device: torch.device, environment: Mapping[str, str] = os.environ) -> torch.cuda.Stream | None:
    """A stream that waits for the collectives of full steps, or None to leave that to one of torch's pool.

    The pool's 32 streams share a few hardware queues: there, such a wait may block compute. Which of the two is better
    was not measured; ``DDPWATCH_CUDA_STREAM`` chooses, ``pool`` (the default) or ``own``.
    """
    wanted = environment.get("DDPWATCH_CUDA_STREAM", "pool")
    if wanted not in ("own", "pool"):
        _log.warning("DDPWATCH_CUDA_STREAM is %r, which is not a valid choice; hint: own or pool", wanted[:50])
    return torch.cuda.Stream(device, OWN_PRIORITY) if wanted == "own" else None  # type: ignore[no-untyped-call]


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
