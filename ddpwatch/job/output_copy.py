"""Copies what a job prints from a pipe into memory and to a file, in a process that outlives `ddpwatch run`.

The job must never wait for a disk. One thread reads the pipe and adds to an `OutputBuffer`, in memory. Another writes
from there to the file; where the disk is full, slow or gone, the buffer overwrites what was not written in time.

This file is run by its path and imports only light modules: it starts in 30 ms and takes 12 MiB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import sys
import threading
import time
from pathlib import Path

BLOCK_BYTES = 65_536  # the most that is added at once, and shown
HEADER_BYTES = 4096
CAPACITY_BYTES = 4 * 1024 * 1024
PART_BYTES = 32 * 1024 * 1024  # of the file; there are at most two parts
RETRY_S = 1.0
END_S = 60.0  # for the file's last bytes; a disk may hang
KEEP_JOBS = 20
KEEP_S = 30 * 86_400
# Numbers in the buffer's header: bytes added, written or given up, missing in the file, in the older part, and removed
# with still older ones
TOTAL, DONE, MISSING, OLDER, CUT = range(5)
_WHY = 512  # where the header has the text
_WHY_BYTES = 512


class OutputBuffer:
    """The newest output of a job, in memory that processes share.

    One thread adds, any may read. A number's bytes are written at once, after the bytes that it counts.

    Args:
        descriptor: Of the memory.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> OutputBuffer:
        """Returns a new buffer.

        Raises:
            OSError: There is no memory for it, or a limit on the size of files (``ulimit -f``) is below its own.
        """
        descriptor = os.memfd_create("ddpwatch-output")
        os.posix_fallocate(descriptor, 0, HEADER_BYTES + CAPACITY_BYTES)  # adding cannot fail later
        return cls(descriptor)

    def get(self, number: int) -> int:
        """Returns a number of the header."""
        return int.from_bytes(os.pread(self.descriptor, 8, 8 * number), "little")

    def set(self, number: int, value: int) -> None:
        """Sets a number of the header."""
        os.pwrite(self.descriptor, value.to_bytes(8, "little"), 8 * number)

    @property
    def why(self) -> str:
        """Why bytes are missing in the file."""
        return os.pread(self.descriptor, _WHY_BYTES, _WHY).rstrip(b"\0").decode(errors="replace")

    @why.setter
    def why(self, text: str) -> None:
        os.pwrite(self.descriptor, text.encode(errors="replace")[:_WHY_BYTES].ljust(_WHY_BYTES, b"\0"), _WHY)

    def add_block(self, block: bytes) -> None:
        """Adds at most `BLOCK_BYTES`, over the oldest."""
        total = self.get(TOTAL)
        place = total % CAPACITY_BYTES
        room = CAPACITY_BYTES - place
        os.pwrite(self.descriptor, block[:room], HEADER_BYTES + place)
        os.pwrite(self.descriptor, block[room:], HEADER_BYTES)
        self.set(TOTAL, total + len(block))

    def read(self, offset: int, at_most: int = BLOCK_BYTES) -> tuple[int, bytes]:
        """Returns bytes from an offset on, and before them their own offset: a later one if some were overwritten."""
        start = max(offset, self._oldest())
        place = start % CAPACITY_BYTES
        size = min(self.get(TOTAL) - start, at_most)
        room = CAPACITY_BYTES - place
        block = os.pread(self.descriptor, min(size, room), HEADER_BYTES + place)
        block += os.pread(self.descriptor, max(size - room, 0), HEADER_BYTES)
        overwritten = max(self._oldest() - start, 0)  # while they were read
        return start + overwritten, block[overwritten:]

    def newest(self, offset: int) -> tuple[int, bytes]:
        """Reads like `read`, but of more than `BLOCK_BYTES` only the newest."""
        return self.read(max(offset, self.get(TOTAL) - BLOCK_BYTES))

    def _oldest(self) -> int:
        """Returns the offset of the oldest byte that is not being overwritten."""
        return max(self.get(TOTAL) + BLOCK_BYTES - CAPACITY_BYTES, 0)


class FileCopy:
    """Writes a buffer to a file. A part that is full becomes ``FILE.1``, in place of the one before.

    Attributes:
        news: To set after each addition to the buffer.
        over: To set before `news` after the last one.
    """

    def __init__(self, buffer: OutputBuffer, path: Path, part_bytes: int = PART_BYTES) -> None:
        self.news = threading.Event()
        self.over = threading.Event()
        self._buffer = buffer
        self._path = path
        self._part_bytes = part_bytes
        self._offset = buffer.get(DONE)  # more than 0 if another process began
        self._file: int | None = None
        self._size = 0
        self._failed = False

    def run(self) -> None:
        """Writes until the output is over. After a failure it tries again every `RETRY_S`, and a last time then."""
        while True:
            self.news.clear()
            over = self.over.is_set()
            try:
                self._write_all()
            except OSError as error:
                self._failed = True
                self._buffer.why = error.strerror or str(error)
                self._close()
            if over:
                self._close()
                return
            if self._failed:
                self.over.wait(RETRY_S)
            else:
                self.news.wait()

    def _write_all(self) -> None:
        while True:
            start, block = self._buffer.read(self._offset, 1024 * 1024)
            if not block and self._file is not None:
                return
            file = self._opened()
            if start > self._offset:
                self._leave_out(file, start - self._offset)
            self._write(file, block[: max(self._part_bytes - self._size, 1)])

    def _write(self, file: int, block: bytes) -> None:
        written = os.write(file, block)
        self._size += written
        self._offset += written
        self._buffer.set(DONE, self._offset)
        self._failed = False

    def _leave_out(self, file: int, count: int) -> None:
        """Puts a line in the place of bytes that were overwritten before they could be written."""
        if not self._failed:
            self._buffer.why = "the job printed faster than the disk could write"
        note = f"\n… {count} bytes left out: {self._buffer.why} …\n".encode()
        written = os.write(file, note)
        self._size += written
        if written < len(note):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._offset += count
        self._buffer.set(DONE, self._offset)
        self._miss(count)

    def _miss(self, count: int) -> None:
        self._buffer.set(MISSING, self._buffer.get(MISSING) + count)

    def _opened(self) -> int:
        """Returns the file, with room in it."""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self._close()
            self._removed()
        if self._file is not None and self._size >= self._part_bytes:
            self._close()
            self._rotate()
        if self._file is None:
            self._file = self._open()
            self._size = os.fstat(self._file).st_size
            _remove_old(self._path.parent)
        return self._file

    def _removed(self) -> None:
        """Counts what somebody has removed."""
        self._buffer.why = "the file was removed"
        self._miss(self._size)
        if not older_part(self._path).exists():
            self._miss(self._buffer.get(OLDER))
            self._buffer.set(OLDER, 0)

    def _rotate(self) -> None:
        self._path.replace(older_part(self._path))
        self._buffer.set(CUT, self._buffer.get(CUT) + self._buffer.get(OLDER))
        self._buffer.set(OLDER, self._size)

    def _open(self) -> int:
        """Opens the file to append to it, and locks it: as long as this process lives, nobody removes it as old."""
        if not self._path.is_absolute():
            raise OSError(errno.ENOENT, "no home directory")
        folder = self._path.parent
        folder.mkdir(0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:  # a link is open to all
            raise OSError(errno.EACCES, f"{folder} is not a private directory of yours")
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        _lock(file, fcntl.LOCK_EX)
        return file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what NFS could not write
                os.close(file)


def older_part(path: Path) -> Path:
    """Returns the file that a part becomes once it is full."""
    return path.with_name(f"{path.name}.1")


def _remove_old(folder: Path) -> None:
    """Removes the outputs of all jobs but the newest `KEEP_JOBS`, and those older than `KEEP_S`; no live one."""
    outputs = {path.with_name(path.name.removesuffix(".1")) for path in folder.glob("*.out*")}
    for place, path in enumerate(sorted(outputs, key=_age_s)):
        if (place >= KEEP_JOBS or _age_s(path) > KEEP_S) and not _is_live(path):
            for part in (older_part(path), path):
                with contextlib.suppress(OSError):
                    part.unlink()


def _age_s(path: Path) -> float:
    """Returns how long ago an output was last written to; endless if it was removed meanwhile."""
    ages_s = [math.inf]
    for part in (older_part(path), path):
        with contextlib.suppress(OSError):
            ages_s.append(time.time() - part.stat().st_mtime)
    return min(ages_s)


def _is_live(path: Path) -> bool:
    """Returns whether the job still prints to this file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return not _lock(file.fileno(), fcntl.LOCK_SH)
    return False


def _lock(file: int, kind: int) -> bool:
    """Locks a file; False if another process holds the lock. On a file system without locks, none does."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def copy_output(pipe: int, buffer: OutputBuffer, path: Path, part_bytes: int = PART_BYTES) -> None:
    """Copies from a pipe to a buffer and a file until all who could write to the pipe have closed it."""
    copy = FileCopy(buffer, path, part_bytes)
    thread = threading.Thread(target=copy.run, daemon=True)
    thread.start()
    while block := os.read(pipe, BLOCK_BYTES):
        buffer.add_block(block)
        copy.news.set()
    copy.over.set()
    copy.news.set()
    thread.join(END_S)


if __name__ == "__main__":
    copy_output(0, OutputBuffer(int(sys.argv[1])), Path(sys.argv[2]))
    os._exit(0)  # even if the other thread waits for a disk
