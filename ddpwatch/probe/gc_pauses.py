"""Marks for pauses of the interpreter: a garbage collection stops a rank, and all others at the next collective."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

from ddpwatch.probe.guard import Guard
from ddpwatch.wire.messages import Mark

MIN_PAUSE_NS = 1_000_000


class GcPauses:
    """Posts a mark for every garbage collection of at least a millisecond.

    Args:
        rank: Put into the marks.
        post: Takes a mark; must not block.
        guard: Takes ddpwatch's errors.
        clock: Nanoseconds, monotonic.
    """

    def __init__(
        self, rank: int, post: Callable[[Mark], None], guard: Guard, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._rank = rank
        self._post = post
        self._clock = clock
        self._start = 0
        self._callback = partial(guard.run, "garbage collections", self._on_phase)
        gc.callbacks.append(self._callback)

    def close(self) -> None:
        """Removes the callback."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _on_phase(self, phase: str, info: dict[str, int]) -> None:
        """Runs before and after each collection, on the thread that triggered it."""
        if phase == "start":
            self._start = self._clock()
            return
        start, end = self._start, self._clock()
        if start and end - start >= MIN_PAUSE_NS:
            name = f"garbage collection, generation {info['generation']}"
            self._post(Mark(rank=self._rank, kind="gc", name=name, start_ns=start, end_ns=end))
