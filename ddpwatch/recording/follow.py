"""Reads a recording while it is being written: a live view where only a shared disk connects you to the job.

A `GrowingFile` reads one recording; `FollowSource` merges those of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from mcap.opcode import Opcode
from mcap.records import Metadata

from ddpwatch.errors import UsageError
from ddpwatch.recording.container import (
    BROKEN,
    END_NAME,
    MAGIC,
    ROW_OPCODE,
    Record,
    describes_chunk,
    metadata_of,
    open_to_read,
    record_at,
    unpack_chunk,
)
from ddpwatch.recording.decoding import FrameDecoder
from ddpwatch.recording.names import is_older_part, older_part
from ddpwatch.recording.part import Part, int_field
from ddpwatch.recording.part_chain import (
    PartChain,
    chains_of,
    clock_difference_ns,
    foreign_ranks,
    identity_of,
    received_earlier,
    run_of,
    steps_apart_ns,
    wall_clocks_note,
    with_siblings,
)
from ddpwatch.recording.reader import Recording
from ddpwatch.wire.messages import Bye
from ddpwatch.wire.transport import Envelope, Frame

POLL_S = 0.1
TIMEOUT_S = 90.0  # a shared disk may show new data only after a minute
SEARCH_S = 1.0  # between two searches for files of more ranks
HOLD_S = 5.0  # how long frames of other ranks wait for a silent rank


class FollowSource:
    """Frames of growing files: of one recording, or of a directory with one per rank. A `live_source.Source`.

    Frames of several files come in the order of their receive times. They wait for the file that is behind, but no
    longer than `HOLD_S`, since its rank may be dead. Files of ranks that start later are found. A rank that is in
    several files comes from one: as in `Recording`, or else from the first with a frame of it. Receive times are those
    of the first file, as in `Recording`, also if the steps that show how wall clocks differ come later.

    Args:
        path: The file or directory.
        sleep: Waits between two polls, in seconds.

    Raises:
        UsageError: As for `Recording`.

    Attributes:
        over: No more frames will come: the recorders have written their ends, or the files are damaged.
        unreadable: Frames that could not be decoded, skipped.
        missed: Always 0, since a file loses nothing.
        notes: See `Source`.
    """

    def __init__(self, path: str | os.PathLike[str], sleep: Callable[[float], None] = time.sleep) -> None:
        recording = Recording(path)
        self.over = False
        self.unreadable = 0
        self.missed = 0
        self.trouble = ""
        self.notes: list[str] = []
        self._sleep = sleep
        self._seq = 0
        self._queue: deque[Frame] = deque()
        self._folder = Path(path) if Path(path).is_dir() else None
        self._run = run_of(recording.chains[0].newest)
        self._known = {chain.identity for chain in recording.chains}  # recordings and files to skip
        self._searched = time.monotonic()
        self._files = [GrowingFile([part.path for part in chain.parts], chain.ahead_ns) for chain in recording.chains]
        self._foreign = dict(zip(self._files, foreign_ranks(recording.chains), strict=True))
        self._file_of: dict[int, GrowingFile] = {}  # of a rank
        self._unaligned = [file for file in self._files[1:] if not file.ahead_ns]
        self._noted = self._wall_clocks()
        self._align(dict(zip(self._files, recording.chains, strict=True)).get)

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        deadline = time.monotonic() + timeout_s
        while not self._queue and not self.over:
            if not self._advance():
                if time.monotonic() >= deadline:
                    break
                self._sleep(POLL_S)
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]

    def order_stacks(self, order: object) -> None:
        """Refuses: see `Source`."""
        raise UsageError("a recording takes no orders", "ask the run that writes it: ddpwatch explain RUN, on its host")

    def close(self) -> None:
        for file in self._files:
            file.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Reads on in files without waiting frames, and queues the frames that are due; False if nothing is new."""
        self._search()
        advanced = [file.advance() for file in self._files if not file.waiting and not file.over]
        silent_since = time.monotonic() - HOLD_S
        alive = [file for file in self._files if file.waiting or (not file.over and file.grew_at > silent_since)]
        until_ns = min((file.newest_ns for file in alive), default=None)
        taken = [(file, frame) for file in self._files for frame in file.take_frames(until_ns)]
        ready = [frame for file, frame in taken if self._is_its(file, frame)]
        for message, envelope in sorted(ready, key=lambda frame: frame[1].received_ns):
            self._seq += 1
            self._queue.append((message, Envelope(self._seq, envelope.received_ns, envelope.frame)))
        self.unreadable = sum(file.unreadable for file in self._files)
        self.over = not self._queue and all(file.over and not file.waiting for file in self._files)
        return any(advanced) or bool(taken)

    def _is_its(self, file: GrowingFile, frame: Frame) -> bool:
        """Returns whether a frame counts: its rank comes from this file."""
        rank = getattr(frame[0], "rank", None)
        if rank is None:
            return True
        return rank not in self._foreign.get(file, ()) and self._file_of.setdefault(rank, file) is file

    def _search(self) -> None:
        """Finds new files of the run."""
        if self._folder is None or time.monotonic() - self._searched < SEARCH_S:
            return
        self._searched = time.monotonic()
        for file in sorted(self._folder.rglob("*.mcap")):
            if str(file) in self._known:
                continue
            try:
                part = Part(file)
                if identity_of(part) not in self._known and run_of(part) == self._run:
                    self._files.append(GrowingFile([file]))
                    self._unaligned.append(self._files[-1])
            except (UsageError, OSError):
                continue  # it was created or removed just now
            self._known |= {str(file), identity_of(part)}
        self._align(_chain_of)

    def _align(self, chain_of: Callable[[GrowingFile], PartChain | None]) -> None:
        """Finds by how much wall clocks differ: by steps; until these come, by when files start and end."""
        first = chain_of(self._files[0]) if self._unaligned else None
        if first is None or first.span_ns is None:
            return
        for file in tuple(self._unaligned):
            if (chain := chain_of(file)) is None or chain.span_ns is None:
                continue
            apart = steps_apart_ns(chain, first) if clock_difference_ns(chain.start_ns - first.start_ns) else 0
            if apart is not None:
                self._unaligned.remove(file)
            file.align(clock_difference_ns(_spans_apart_ns(chain, first) if apart is None else apart))
        if not self._unaligned and (note := self._wall_clocks()) != self._noted:
            self._noted = note
            self.notes.append(note)

    def _wall_clocks(self) -> str:
        return wall_clocks_note([file.ahead_ns for file in self._files], self._files[0].path)


def _chain_of(file: GrowingFile) -> PartChain | None:
    """Returns what a file has by now."""
    try:
        (chain,) = chains_of(with_siblings(Part(file.path)))
        return chain
    except (UsageError, OSError):
        return None  # it was removed, or is being replaced


def _spans_apart_ns(chain: PartChain, other: PartChain) -> int:
    """Returns by how much later a recording starts, or has grown, than another one: the lesser of both."""
    (start_ns, end_ns), (other_start_ns, other_end_ns) = chain.span_ns or (0, 0), other.span_ns or (0, 0)
    return min(start_ns - other_start_ns, end_ns - other_end_ns, key=abs)


class GrowingFile:
    """The frames of one growing recording. Continues with the next part when the file is rotated.

    Args:
        paths: Its parts; the last one grows.
        ahead_ns: See `PartChain`.

    Attributes:
        ahead_ns: The same, as far as is known by now.
        over: No more frames will come: the recorder has written the end, or the file is damaged.
        waiting: Frames that were read and not yet taken.
        newest_ns: Receive time of the newest frame read; 0 before the first.
        grew_at: When the file last had something new (`time.monotonic`).
    """

    def __init__(self, paths: list[Path], ahead_ns: int = 0) -> None:
        self.path = paths[-1]
        self.ahead_ns = ahead_ns
        self.over = False
        self.waiting: deque[Frame] = deque()
        self.newest_ns = 0
        self.grew_at = time.monotonic()
        self._decoder = FrameDecoder()
        self._remaining = paths
        self._first = True
        self._number = 0
        self._continued = False
        self._fd = -1
        self._open(self._remaining.pop(0))

    @property
    def unreadable(self) -> int:
        """Frames that could not be decoded, skipped."""
        return self._decoder.skipped

    def advance(self) -> bool:
        """Reads up to the next frames, if they are there; False if nothing is new."""
        advanced = False
        while not self.waiting and not self.over and self._next_record():
            advanced = True
            self.grew_at = time.monotonic()
        return advanced

    def align(self, ahead_ns: int) -> None:
        """Corrects receive times from now on, also of frames that wait."""
        by_ns, self.ahead_ns = ahead_ns - self.ahead_ns, ahead_ns
        if by_ns:
            self.waiting = deque(received_earlier(self.waiting, by_ns))
            self.newest_ns -= by_ns

    def take_frames(self, until_ns: int | None) -> Iterator[Frame]:
        """Takes the waiting frames that were received by then; None for all."""
        while self.waiting and (until_ns is None or self.waiting[0][1].received_ns <= until_ns):
            yield self.waiting.popleft()

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- inside ----------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> None:
        opened = open_to_read(path)
        self.close()
        self._fd = opened
        self._offset = len(MAGIC)
        self._chunk_at = 0
        self._continued = False

    def _next_record(self) -> bool:
        """Reads the next record; False if not all of it is there yet."""
        try:
            record = record_at(self._fd, self._offset)
            if record is None:
                return self._reopen_if_replaced()
            self._offset = record.end
            self._take_record(record)
        except BROKEN:
            self.over = True
        return True

    def _take_record(self, record: Record) -> None:
        if record.opcode == Opcode.CHUNK:
            self._chunk_at = record.offset
            self._take_chunk(record.content)
        elif record.opcode == ROW_OPCODE and not describes_chunk(record, self._chunk_at):
            self.over = True  # the chunk before it is damaged and was not recognised
        elif record.opcode == Opcode.METADATA:
            self._take_metadata(metadata_of(record))
        elif record.opcode == Opcode.FOOTER:
            self.over = not (self._next_part() or self._continued)  # on a full disk, the next part comes later

    def _take_chunk(self, content: bytes) -> None:
        for frame in self._decoder.frames(unpack_chunk(content), self._first, self.ahead_ns):
            self.waiting.append(frame)
            self.newest_ns = max(self.newest_ns, frame[1].received_ns)
        self.over = self.over or self._decoder.is_damaged

    def _take_metadata(self, metadata: Metadata) -> None:
        if metadata.name == END_NAME:
            self._continued = "continued" in metadata.metadata and not is_older_part(self.path, self._number)
        else:
            self._number = int_field(metadata.metadata, "part")

    def _next_part(self) -> bool:
        """Opens the next part; False if it is not there, or not yet."""
        if not self._remaining:
            return self._continued and self._reopen_if_replaced()
        self._open_next(self._remaining.pop(0))
        return True

    def _reopen_if_replaced(self) -> bool:
        """Opens the part after this one, once another file has taken its path; False if none has."""
        if not self._is_replaced():
            return False
        self._open_next(self.path)
        return True

    def _open_next(self, path: Path) -> None:
        """Opens the next part: the one at that path, unless that is a later one by now."""
        due = older_part(self.path, self._number + 1)
        self._first = False
        self._open(path)
        with contextlib.suppress(FileNotFoundError):
            self._open(due)

    def _is_replaced(self) -> bool:
        try:
            status = self.path.stat()
            return not os.path.samestat(status, os.fstat(self._fd)) and status.st_size > len(MAGIC)
        except OSError:
            return False


def follow_frames(path: str | os.PathLike[str], note: Callable[[str], None] = lambda _: None) -> Iterator[Frame]:
    """Yields the frames of a growing recording, until its end, the run's end, or `TIMEOUT_S` without a frame.

    Args:
        path: The file or directory.
        note: Takes each of the source's notes.
    """
    source = FollowSource(path)
    last_frame = time.monotonic()
    try:
        while not source.over and time.monotonic() - last_frame < TIMEOUT_S:
            frames = source.read(0.2)
            while source.notes:
                note(source.notes.pop(0))
            for message, envelope in frames:
                last_frame = time.monotonic()
                yield message, envelope
                if isinstance(message, Bye) and message.rank is None:
                    return
    finally:
        source.close()
