"""The black box: what a rank was doing at the very moment it died.

A heartbeat is up to 0.7 s old, several steps on a fast job, and comes when it is convenient. So each rank also keeps
its phase, its step and the buckets in flight in a page of shared memory (a file in the rendezvous directory). Writing
it costs well under a microsecond and no system call; the collector reads it once the process is gone, however it went.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PHASES: Final = ("", "input", "forward", "between", "backward", "sync", "optimizer")
_CODES: Final = {phase: code for code, phase in enumerate(PHASES)}
_HEAD: Final = struct.Struct("<8sQB")
_STEP: Final = struct.Struct("<Q")
_STEP_AT: Final = 8
_PHASE_AT: Final = 16
_MAGIC: Final = b"ddpwbox1"
_BUCKETS_AT: Final = 64
SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class LastState:
    """Step, phase and the indices of the buckets that were launched and not done."""

    step: int
    phase: str
    in_flight: list[int]


class BlackBox:
    """The writing end, in a rank. Until it has a file it writes into plain memory."""

    def __init__(self) -> None:
        self._page: bytearray | mmap.mmap = bytearray(SIZE)
        _HEAD.pack_into(self._page, 0, _MAGIC, 0, _CODES["input"])

    def open(self, path: Path) -> None:
        """Moves into a file. Raises OSError if there is no room for it: a full disk must show now, not as a SIGBUS."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(file, 0, SIZE)
            page = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        page[:] = bytes(self._page)
        self._page = page

    def begin(self, step: int) -> None:
        """That step begins."""
        _STEP.pack_into(self._page, _STEP_AT, step)

    def enter(self, phase: str) -> None:
        """Training is in that phase of the step now. One byte: this runs several times a step, in cold caches."""
        self._page[_PHASE_AT] = _CODES[phase]

    def launch(self, bucket: int) -> None:
        """A bucket is on its way."""
        if bucket < SIZE - _BUCKETS_AT:
            self._page[_BUCKETS_AT + bucket] = 1

    def done(self, bucket: int) -> None:
        """A bucket has arrived. May be called from any thread."""
        if bucket < SIZE - _BUCKETS_AT:
            self._page[_BUCKETS_AT + bucket] = 0


def read(path: Path) -> LastState | None:
    """What a black box says; None if it is not there or not one."""
    try:
        page = path.read_bytes()
    except OSError:
        return None
    if len(page) != SIZE:
        return None
    magic, step, code = _HEAD.unpack_from(page)
    if magic != _MAGIC or code >= len(PHASES):
        return None
    in_flight = [bucket for bucket, flag in enumerate(page[_BUCKETS_AT:]) if flag]
    return LastState(step, PHASES[code], in_flight)
