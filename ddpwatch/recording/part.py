"""One file of a recording: its metadata, its index, and its frames."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mcap.opcode import Opcode

from ddpwatch.errors import UsageError
from ddpwatch.messages import SCHEMA_VERSION, FrameError, Message, decode
from ddpwatch.recording.container import (
    BROKEN,
    END_NAME,
    MAGIC,
    ROW_OPCODE,
    ChunkRow,
    Index,
    RawMessage,
    Record,
    attachment_of,
    chunk_messages,
    metadata_of,
    read_index,
    record_at,
    records,
    tells_of,
)
from ddpwatch.recording.selection import CONTEXT, Selection
from ddpwatch.recording.writer import SCHEMA_MINOR
from ddpwatch.transport import Envelope

Frame = tuple[Message, Envelope]
_HEAD_RECORDS = 8  # the metadata is the second record; a foreign file need not be searched through


class Part:
    """One file.

    Args:
        path: The file.

    Raises:
        UsageError: The file cannot be opened, is not an MCAP file, or was written by a newer major version.

    Attributes:
        metadata: What the recorder wrote when it began.
        note: What a user should know about its format; empty if nothing.
        skipped: Frames of the last pass that could not be decoded.
        cut_tail: The last pass came upon the end of the file, or damage, before the end that a writer writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self.cut_tail = False
        self.metadata = self._peek()
        self.note = _checked_format(path, self.metadata)
        self._index: Index | None = None

    @property
    def number(self) -> int:
        """Which part of a rotated recording this is, from 0."""
        return count_in(self.metadata, "part")

    @property
    def end(self) -> dict[str, str]:
        """What the recorder wrote when it ended; empty for a file that was cut."""
        with self._open() as file, contextlib.suppress(*BROKEN):
            record = record_at(file.fileno(), self.index.last_metadata)
            if record is not None and record.opcode == Opcode.METADATA:
                metadata = metadata_of(record)
                return dict(metadata.metadata) if metadata.name == END_NAME else {}
        return {}

    @property
    def lost(self) -> int:
        """Frames of the whole recording that had not got to the disk when the part ended, or else when it began."""
        return max(count_in(self.metadata, "lost"), count_in(self.end, "lost"))

    @property
    def index(self) -> Index:
        """Where what is. Constant time for a file with its end, else a walk over its chunks' heads."""
        if self._index is None:
            with self._open() as file:
                self._index = read_index(file.fileno())
        return self._index

    def frames(self, selection: Selection, first: bool = True) -> Iterator[Frame]:
        """The selected frames in file order, up to the end or the first damage.

        Args:
            selection: What is wanted.
            first: False leaves out frames that were repeated from the part before.
        """
        self.skipped, self.cut_tail = 0, False
        whole = selection.whole
        with self._open() as file:
            source = self._raw(file.fileno()) if whole else self._selected(file.fileno(), selection)
            for raw, wanted in source:
                if raw.sequence == 0 and not first:
                    continue
                frame = self._frame(raw)
                if frame is not None and (whole or self._wants(frame, selection, wanted)):
                    yield frame

    def attachments(self) -> dict[str, bytes]:
        """The documents kept in the file, by name; as far as it is readable."""
        found: dict[str, bytes] = {}
        with self._open() as file, contextlib.suppress(*BROKEN):
            for record in records(file.fileno()):
                if record.opcode == Opcode.ATTACHMENT:
                    attachment = attachment_of(record)
                    found[attachment.name] = attachment.data
        return found

    # -- inside ----------------------------------------------------------------------------------------------

    def _open(self) -> _File:
        return _File(self.path)

    def _peek(self) -> dict[str, str]:
        """Checks that this is a recording at all, so that the error comes before anything is drawn."""
        with self._open() as file:
            head = os.pread(file.fileno(), len(MAGIC), 0)
            if head != MAGIC:
                what = "is empty" if not head else "is not an MCAP recording"
                raise UsageError(f"{self.path}: {what}", "give a file that was written with --record")
            with contextlib.suppress(*BROKEN):
                for record in itertools.islice(records(file.fileno()), _HEAD_RECORDS):
                    if record.opcode == Opcode.METADATA and (metadata := metadata_of(record)).name == "ddpwatch":
                        return dict(metadata.metadata)
        raise UsageError(f"{self.path}: not a ddpwatch recording, or cut before its first second", "nothing to read")

    def _safely(self, source: Iterator[Record]) -> Iterator[Record]:
        """Passes records up to the first damage; notes how the file ends."""
        ended = False
        try:
            for record in source:
                ended = record.opcode == Opcode.FOOTER
                yield record
        except BROKEN:
            ended = False
        self.cut_tail = not ended

    def _raw(self, fd: int) -> Iterator[tuple[RawMessage, bool]]:
        """All messages, front to back; needs no index."""
        chunk_at = 0
        for record in self._safely(records(fd)):
            if record.opcode == Opcode.CHUNK:
                chunk_at = record.offset
                try:
                    messages = chunk_messages(record.content)
                except BROKEN:
                    break
                for message in messages:
                    yield message, True
            elif record.opcode == ROW_OPCODE and not tells_of(record, chunk_at):
                break  # damage has made the chunk before it look like something else
        else:
            return
        self.cut_tail = True

    def _selected(self, fd: int, selection: Selection) -> Iterator[tuple[RawMessage, bool]]:
        """Messages of the chunks that the selection needs, and whether more than context is wanted of them."""
        self.cut_tail = not self.index.complete
        for row in self.index:
            wanted = selection.wants_chunk(row)
            if wanted or selection.wants_context(row):
                for message in self._chunk(fd, row):
                    yield message, wanted
                if self.cut_tail and self.index.complete:
                    return

    def _chunk(self, fd: int, row: ChunkRow) -> list[RawMessage]:
        try:
            record = record_at(fd, row.offset)
            if record is not None and record.opcode == Opcode.CHUNK:
                return chunk_messages(record.content)
        except BROKEN:
            pass
        self.cut_tail = True
        return []

    def _frame(self, raw: RawMessage) -> Frame | None:
        try:
            message = decode(raw.data)
        except FrameError:
            self.skipped += 1
            return None
        return message, Envelope(raw.sequence, raw.log_time, raw.data)

    @staticmethod
    def _wants(frame: Frame, selection: Selection, wanted: bool) -> bool:
        return (wanted or isinstance(frame[0], CONTEXT)) and selection.wants(frame[0], frame[1].received_ns)


class _File:
    """A file opened for reading at given places, with our error where that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _File:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            os.pread(self._fd, 1, 0)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}", "give a file that was written with --record") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd


def count_in(metadata: dict[str, str], name: str) -> int:
    """A count that metadata holds; 0 where it holds none."""
    text = metadata.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def _checked_format(path: Path, metadata: dict[str, str]) -> str:
    """A note on a file of a newer minor version: additions only, which are skipped; a newer major one is refused."""
    text = metadata.get("schema_version", "")
    version = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9}))?", text, re.ASCII)
    if version is None or int(version[1]) > SCHEMA_VERSION:
        raise UsageError(
            f"{path}: recorded in format {text[:20]!r}, this ddpwatch reads up to {SCHEMA_VERSION}", "update ddpwatch"
        )
    if int(version[1]) == SCHEMA_VERSION and int(version[2] or 0) > SCHEMA_MINOR:
        return f"{path.name} was recorded by a newer ddpwatch (format {text}): what this one does not know is left out"
    return ""
