"""The clock of the job's CPU time, as the training thread reads it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

WAIT_NS: Final = 100_000  # more than a read takes of itself: with cold caches and many threads, it takes microseconds


class CpuClock:
    """Knows for how long reading it has waited, which is no cost of watching.

    Reading is a system call. Where cores are short, that is where a thread gives its core to others: for milliseconds.

    Args:
        read: Returns the CPU time (ns).

    Attributes:
        waited_ns: For how long the newest read took longer than the fastest, if it waited; a caller may set it back.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._fastest_ns: int | None = None
        self.waited_ns = 0

    def read(self) -> int:
        """Returns the CPU time (ns)."""
        before = time.monotonic_ns()
        now = self._read()
        took = time.monotonic_ns() - before
        self._fastest_ns = took if self._fastest_ns is None else min(took, self._fastest_ns)
        longer = took - self._fastest_ns
        self.waited_ns = longer if longer > WAIT_NS else 0
        return now
