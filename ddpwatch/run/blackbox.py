"""The black box: what a rank was doing at the very moment it died.

A heartbeat is up to 0.7 s old (several steps of a fast job) and is sent when that is convenient. So each rank also
keeps its phase, its step and the buckets in flight in a page of shared memory. Writing it costs well under a
microsecond and no system call. The collector reads it once the process is gone, for any reason.

The page is a file in memory (tmpfs), never on a disk: a thread that writes to a page that is being written back waits
for the disk, and here that is the training thread. `rundir.blackbox` says where. Without such a place there
is no file, and the heartbeat has to do.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from ddpwatch.run.regular import read_regular

# Where training is. "" is a bare step; "between" lies inside a step, outside its recorded phases.
Phase = Literal["", "input", "forward", "between", "backward", "sync", "optimizer"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
_CODES: Final = {phase: code for code, phase in enumerate(PHASES)}
_BARE_CODE: Final = _CODES[""]
_ENDED_CODE: Final = len(PHASES)
_HEAD: Final = struct.Struct("=8sQB7xQ")  # in this host's order, as are the words
_STEP_WORD: Final = 1  # of 8 bytes
_PHASE_AT: Final = 16
_SLOT_WORD: Final = 3
_MAGIC: Final = b"ddpwbox1"
_BUCKETS_AT: Final = 64
SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class LastState:
    """Step, phase, the indices of the buckets that were launched and not done, and the step's slot (`StepRecord`)."""

    step: int
    phase: Phase
    in_flight: list[int]
    slot: int = 0


class BlackBox:
    """The writing end, in a rank. It writes into plain memory until it has a file."""

    def __init__(self) -> None:
        self._page: bytearray | mmap.mmap = bytearray(SIZE)
        self._words = memoryview(self._page).cast("Q")
        _HEAD.pack_into(self._page, 0, _MAGIC, 0, _CODES["input"], 0)

    def open(self, path: Path | None) -> None:
        """Moves into a new file; None changes nothing.

        Raises:
            OSError: The file exists, or memory is full: that must show now, not as a SIGBUS later.
        """
        if path is None:
            return
        page = new_page(path, SIZE)
        page[:] = bytes(self._page)
        self._page, self._words = page, memoryview(page).cast("Q")

    def begin_step(self, step: int, slot: int) -> None:
        """Notes the number and the slot of the step that starts. Two words: `struct` takes three times as long."""
        words = self._words
        words[_STEP_WORD] = step
        words[_SLOT_WORD] = slot

    def begin_bare_step(self, step: int, slot: int) -> None:
        """Does `begin_step` and `enter` in one call, for the steps in which as little as possible runs."""
        words = self._words
        words[_STEP_WORD] = step
        words[_SLOT_WORD] = slot
        self._page[_PHASE_AT] = _BARE_CODE

    def enter(self, phase: Phase) -> None:
        """Notes the phase that starts. One byte: this runs several times a step, in cold caches."""
        self._page[_PHASE_AT] = _CODES[phase]

    def end_step(self) -> None:
        """Notes that an optimizer has ended the step: the next one has begun, and gets its number later."""
        self._page[_PHASE_AT] = _ENDED_CODE

    def launch(self, bucket: int) -> None:
        """Notes that a bucket is in flight."""
        if bucket < SIZE - _BUCKETS_AT:
            self._page[_BUCKETS_AT + bucket] = 1

    def done(self, bucket: int) -> None:
        """Notes that a bucket is no longer in flight. Safe on any thread."""
        if bucket < SIZE - _BUCKETS_AT:
            self._page[_BUCKETS_AT + bucket] = 0


def new_page(path: Path, size: int) -> mmap.mmap:
    """Returns a new file of that size, filled with zeros, in memory that other processes can map.

    Raises:
        OSError: The file exists, or memory is full: that must show now, not as a SIGBUS later.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def read(path: Path | None) -> LastState | None:
    """Returns the last state in a black box; None if there is no such file, or if it is something else."""
    if path is None:
        return None
    try:
        page = read_regular(path, SIZE)
    except OSError:
        return None
    if len(page) != SIZE:
        return None
    magic, step, code, slot = _HEAD.unpack_from(page)
    if magic != _MAGIC or code > _ENDED_CODE:
        return None
    if code == _ENDED_CODE:
        step, slot, code = step + 1, slot + 1, _CODES["input"]
    in_flight = [bucket for bucket, flag in enumerate(page[_BUCKETS_AT:]) if flag]
    return LastState(step, PHASES[code], in_flight, slot)
