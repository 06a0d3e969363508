"""Reads a recording while it is being written: the live view where only a shared disk connects you."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mcap.opcode import Opcode

from ddpwatch.messages import Bye, FrameError, Message, decode
from ddpwatch.recording.container import (
    BROKEN,
    MAGIC,
    ROW_OPCODE,
    Record,
    chunk_messages,
    metadata_of,
    record_at,
    tells_of,
)
from ddpwatch.recording.reader import Recording
from ddpwatch.transport import Envelope

LOOK_S = 0.1
PATIENCE_S = 90.0  # a shared disk may show new data only after a minute


class FollowSource:
    """Frames of a file that grows, as a `ddpwatch.sources.Source`. Goes on with the next part when the file is rotated.

    Args:
        path: The file.
        sleep: How to wait between two looks (s).

    Raises:
        UsageError: As for `Recording`.

    Attributes:
        over: The recorder has written the end (or the file is damaged): no frame will come any more.
        unreadable: Frames that could not be decoded, skipped.
    """

    def __init__(self, path: str | os.PathLike[str], sleep: Callable[[float], None] = time.sleep) -> None:
        self.path = Path(path)
        self.over = False
        self.unreadable = 0
        self._sleep = sleep
        self._seq = 0
        self._queue: list[tuple[Message, Envelope]] = []
        self._older = [part.path for part in Recording(self.path).parts]
        self._first = True
        self._continued = False
        self._fd = -1
        self._open(self._older.pop(0))

    def read(self, timeout_s: float, limit: int = 5000) -> list[tuple[Message, Envelope]]:
        """See `Source.read`."""
        deadline = time.monotonic() + timeout_s
        while not self._queue and not self.over:
            if not self._advance():
                if time.monotonic() >= deadline:
                    break
                self._sleep(LOOK_S)
        batch, self._queue = self._queue[:limit], self._queue[limit:]
        return batch

    def close(self) -> None:
        """See `Source.close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- inside ----------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> None:
        self.close()
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset = len(MAGIC)
        self._chunk_at = 0
        self._continued = False

    def _advance(self) -> bool:
        """Takes the next record, if all of it is there; False if not yet."""
        try:
            record = record_at(self._fd, self._offset)
            if record is None:
                return self._replaced()
            self._offset = record.end
            self._take(record)
        except BROKEN:
            self.over = True
        return True

    def _take(self, record: Record) -> None:
        if record.opcode == Opcode.CHUNK:
            self._chunk_at = record.offset
            self._take_chunk(record.content)
        elif record.opcode == ROW_OPCODE and not tells_of(record, self._chunk_at):
            self.over = True  # damage has made the chunk before it look like something else
        elif record.opcode == Opcode.METADATA:
            metadata = metadata_of(record)
            self._continued = metadata.name == "ddpwatch.end" and "continued" in metadata.metadata
        elif record.opcode == Opcode.FOOTER:
            self.over = not self._next_part()

    def _take_chunk(self, content: bytes) -> None:
        for raw in chunk_messages(content):
            if raw.sequence == 0 and not self._first:
                continue
            try:
                message = decode(raw.data)
            except FrameError:
                self.unreadable += 1
                continue
            self._seq += 1
            self._queue.append((message, Envelope(self._seq, raw.log_time, raw.data)))

    def _next_part(self) -> bool:
        """Goes on with the part after this one; False after the last one."""
        self._first = False
        if self._older:
            self._open(self._older.pop(0))
            return True
        return self._continued and self._replaced(wait_s=2.0)

    def _replaced(self, wait_s: float = 0.0) -> bool:
        """Whether another file has taken this one's place; if so, that is read on from its beginning.

        Between the end of a part and the first byte of the next the name is free for a moment.
        """
        deadline = time.monotonic() + wait_s
        while not self._stands_elsewhere():
            if time.monotonic() >= deadline:
                return False
            self._sleep(LOOK_S)
        self._first = False
        self._open(self.path)
        return True

    def _stands_elsewhere(self) -> bool:
        try:
            status = self.path.stat()
            return not os.path.samestat(status, os.fstat(self._fd)) and status.st_size > len(MAGIC)
        except OSError:
            return False


def follow_frames(
    path: str | os.PathLike[str], patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[Message, Envelope]]:
    """The frames of a file that grows, until its end, the run's end, or ``patience_s`` without a frame."""
    source = FollowSource(path)
    heard = clock()
    try:
        while not source.over and clock() - heard < patience_s:
            for message, envelope in source.read(0.2):
                heard = clock()
                yield message, envelope
                if isinstance(message, Bye) and message.rank is None:
                    return
    finally:
        source.close()
