"""Marks for pauses of the interpreter: a garbage collection stops a rank, and all others at the next collective."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from ddpwatch.messages import Mark

WORTH_NS = 1_000_000


class GcPauses:
    """Posts a mark for every garbage collection that took at least a millisecond.

    Args:
        rank: Put into the marks.
        post: Takes a mark; must not block.
        clock: Nanoseconds, monotonic.
    """

    def __init__(self, rank: int, post: Callable[[Mark], None], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._rank = rank
        self._post = post
        self._clock = clock
        self._begin = 0
        gc.callbacks.append(self._on_phase)

    def close(self) -> None:
        """Stops listening."""
        if self._on_phase in gc.callbacks:
            gc.callbacks.remove(self._on_phase)

    def _on_phase(self, phase: str, info: dict[str, int]) -> None:
        """Called by the interpreter before and after each collection, on the thread that set it off."""
        if phase == "start":
            self._begin = self._clock()
            return
        begin, end = self._begin, self._clock()
        if begin and end - begin >= WORTH_NS:
            name = f"garbage collection, generation {info['generation']}"
            self._post(Mark(rank=self._rank, kind="gc", name=name, start_ns=begin, end_ns=end))
