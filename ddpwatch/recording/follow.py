"""Reads a recording while it is being written: the live view where only a shared disk connects you.

A `GrowingFile` reads one file, `FollowSource` puts those of all ranks together.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from mcap.opcode import Opcode

from ddpwatch.errors import UsageError
from ddpwatch.messages import Bye, FrameError, Message, decode
from ddpwatch.recording.chain import identity_of, run_of
from ddpwatch.recording.container import (
    BROKEN,
    END_NAME,
    MAGIC,
    ROW_OPCODE,
    Record,
    chunk_messages,
    metadata_of,
    record_at,
    tells_of,
)
from ddpwatch.recording.part import Part
from ddpwatch.recording.reader import Recording
from ddpwatch.transport import Envelope

LOOK_S = 0.1
PATIENCE_S = 90.0  # a shared disk may show new data only after a minute
SEARCH_S = 1.0  # between two searches for files of further ranks
HOLD_S = 5.0  # what other ranks have sent waits for a silent one


class FollowSource:
    """Frames of files that grow, as a `ddpwatch.sources.Source`: of one recording, or of a directory with one per rank.

    Frames of several files come in the order of their receive time. For that they wait for the file that is behind, but
    no longer than `HOLD_S`: its rank may be dead. Files of ranks that begin later are found.

    Args:
        path: The file or directory.
        sleep: How to wait between two looks (s).

    Raises:
        UsageError: As for `Recording`.

    Attributes:
        over: The recorders have written their ends (or the files are damaged): no frame will come any more.
        unreadable: Frames that could not be decoded, skipped.
        missed: Always 0: a file keeps what it has.
    """

    def __init__(self, path: str | os.PathLike[str], sleep: Callable[[float], None] = time.sleep) -> None:
        recording = Recording(path)
        self.over = False
        self.unreadable = 0
        self.missed = 0
        self._sleep = sleep
        self._seq = 0
        self._queue: deque[tuple[Message, Envelope]] = deque()
        self._folder = Path(path) if Path(path).is_dir() else None
        self._run = run_of(recording.chains[0].newest)
        self._known = {chain.identity for chain in recording.chains}  # recordings and files that need no second look
        self._searched = time.monotonic()
        self._tails = [GrowingFile([part.path for part in chain.parts], sleep) for chain in recording.chains]

    def read(self, timeout_s: float, limit: int = 5000) -> list[tuple[Message, Envelope]]:
        """See `Source.read`."""
        deadline = time.monotonic() + timeout_s
        while not self._queue and not self.over:
            if not self._advance():
                if time.monotonic() >= deadline:
                    break
                self._sleep(LOOK_S)
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]

    def close(self) -> None:
        """See `Source.close`."""
        for tail in self._tails:
            tail.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Reads on where nothing waits, and takes over what is known to be next; False if there is nothing new."""
        self._search()
        advanced = [tail.advance() for tail in self._tails if not tail.waiting and not tail.over]
        silent_since = time.monotonic() - HOLD_S
        alive = [tail for tail in self._tails if tail.waiting or (not tail.over and tail.heard > silent_since)]
        until_ns = min((tail.newest_ns for tail in alive), default=None)
        settled = [frame for tail in self._tails for frame in tail.take(until_ns)]
        for message, envelope in sorted(settled, key=lambda frame: frame[1].received_ns):
            self._seq += 1
            self._queue.append((message, Envelope(self._seq, envelope.received_ns, envelope.frame)))
        self.unreadable = sum(tail.unreadable for tail in self._tails)
        self.over = not self._queue and all(tail.over and not tail.waiting for tail in self._tails)
        return any(advanced) or bool(settled)

    def _search(self) -> None:
        """Finds files of the run that have come since."""
        if self._folder is None or time.monotonic() - self._searched < SEARCH_S:
            return
        self._searched = time.monotonic()
        for file in sorted(self._folder.rglob("*.mcap")):
            if str(file) in self._known:
                continue
            try:
                part = Part(file)
                if identity_of(part) not in self._known and run_of(part) == self._run:
                    self._tails.append(GrowingFile([file], self._sleep))
            except (UsageError, OSError):
                continue  # it has only just been created, or removed
            self._known |= {str(file), identity_of(part)}


class GrowingFile:
    """The frames of one recording that grows. Goes on with the next part when the file is rotated.

    Args:
        paths: Its parts; the last one is the one that grows.
        sleep: How to wait between two looks (s).

    Attributes:
        over: The recorder has written the end (or the file is damaged): nothing more can be read.
        unreadable: Frames that could not be decoded, skipped.
        waiting: Frames that were read and not yet taken.
        newest_ns: Receive time of the newest of them, or of those taken; 0 before the first.
        heard: When something new was found last (`time.monotonic`).
    """

    def __init__(self, paths: list[Path], sleep: Callable[[float], None] = time.sleep) -> None:
        self.path = paths[-1]
        self.over = False
        self.unreadable = 0
        self.waiting: deque[tuple[Message, Envelope]] = deque()
        self.newest_ns = 0
        self.heard = time.monotonic()
        self._sleep = sleep
        self._older = paths
        self._first = True
        self._continued = False
        self._fd = -1
        self._open(self._older.pop(0))

    def advance(self) -> bool:
        """Reads up to the next frames, as far as they are there; False if nothing new is."""
        advanced = False
        while not self.waiting and not self.over and self._next_record():
            advanced = True
            self.heard = time.monotonic()
        return advanced

    def take(self, until_ns: int | None) -> Iterator[tuple[Message, Envelope]]:
        """The frames that were received by then; None for all."""
        while self.waiting and (until_ns is None or self.waiting[0][1].received_ns <= until_ns):
            yield self.waiting.popleft()

    def close(self) -> None:
        """Lets go of the file."""
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

    def _next_record(self) -> bool:
        """Takes the next record, if all of it is there; False if not yet."""
        try:
            record = record_at(self._fd, self._offset)
            if record is None:
                return self._replaced()
            self._offset = record.end
            self._take_record(record)
        except BROKEN:
            self.over = True
        return True

    def _take_record(self, record: Record) -> None:
        if record.opcode == Opcode.CHUNK:
            self._chunk_at = record.offset
            self._take_chunk(record.content)
        elif record.opcode == ROW_OPCODE and not tells_of(record, self._chunk_at):
            self.over = True  # damage has made the chunk before it look like something else
        elif record.opcode == Opcode.METADATA:
            metadata = metadata_of(record)
            self._continued = metadata.name == END_NAME and "continued" in metadata.metadata
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
            self.newest_ns = max(self.newest_ns, raw.log_time)
            self.waiting.append((message, Envelope(raw.sequence, raw.log_time, raw.data)))

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
