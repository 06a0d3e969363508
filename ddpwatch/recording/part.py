"""One file of a recording: its metadata, its index and its frames."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mcap.opcode import Opcode

from ddpwatch.errors import UsageError
from ddpwatch.recording.container import (
    BROKEN,
    END_NAME,
    MAGIC,
    ROW_OPCODE,
    ChunkRow,
    Record,
    UnpackedChunk,
    attachment_of,
    describes_chunk,
    metadata_of,
    open_to_read,
    record_at,
    records,
    unpack_chunk,
)
from ddpwatch.recording.decoding import FrameDecoder
from ddpwatch.recording.index import Index, read_index
from ddpwatch.recording.selection import CONTEXT, Selection
from ddpwatch.recording.writer import SCHEMA_MINOR
from ddpwatch.wire.messages import SCHEMA_VERSION
from ddpwatch.wire.transport import Frame


class Part:
    """One file.

    Args:
        path: The file.

    Raises:
        UsageError: The file cannot be opened, is not an MCAP file, or was written by a newer major version.

    Attributes:
        metadata: What the recorder wrote at the start.
        note: A warning about its format; may be empty.
        skipped: Frames of the last pass that could not be decoded.
        cut_tail: The last pass met damage, or the file has no proper end.
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
        return int_field(self.metadata, "part")

    @property
    def end(self) -> dict[str, str]:
        """What the recorder wrote at the end; empty for a file that was cut off."""
        with self._open() as file, contextlib.suppress(*BROKEN):
            record = record_at(file.fileno(), self.index.last_metadata)
            if record is not None and record.opcode == Opcode.METADATA:
                metadata = metadata_of(record)
                return dict(metadata.metadata) if metadata.name == END_NAME else {}
        return {}

    @property
    def lost(self) -> int:
        """Frames of the whole recording lost by the end of this part, or by its start if it has no end."""
        return max(int_field(self.metadata, "lost"), int_field(self.end, "lost"))

    @property
    def index(self) -> Index:
        """The file's chunks. Takes constant time for a file with its end, otherwise a walk from record to record."""
        if self._index is None:
            with self._open() as file:
                self._index = read_index(file.fileno())
        return self._index

    def frames(self, selection: Selection, first: bool = True) -> Iterator[Frame]:
        """Yields the selected frames in file order, up to the end or the first damage.

        Args:
            selection: Which frames.
            first: False skips the frames that are repeated from the part before.
        """
        self.skipped, self.cut_tail = 0, False
        decoder = FrameDecoder()
        everything = selection.everything
        with self._open() as file:
            source = self._raw(file.fileno()) if everything else self._selected(file.fileno(), selection)
            for chunk, wanted in source:
                frames = decoder.frames(chunk, first, steps_from_ns=selection.steps_from_ns)
                if everything:
                    yield from frames
                else:
                    yield from (frame for frame in frames if self._wants(frame, selection, wanted))
                self.skipped = decoder.skipped
                if decoder.is_damaged:
                    self.cut_tail = True
                    return

    def attachments(self) -> dict[str, bytes]:
        """Returns the documents in the file, by name, as far as it is readable."""
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
        """Reads the metadata, so that errors come before anything is drawn."""
        with self._open() as file:
            head = os.pread(file.fileno(), len(MAGIC), 0)
            if head != MAGIC:
                what = "is empty" if not head else "is not an MCAP recording"
                raise UsageError(f"{self.path}: {what}", "give a file that was written with --record")
            with contextlib.suppress(*BROKEN):
                # The metadata is the second record, so a foreign file need not be searched to its end
                for record in itertools.islice(records(file.fileno()), 8):
                    if record.opcode == Opcode.METADATA and (metadata := metadata_of(record)).name == "ddpwatch":
                        return dict(metadata.metadata)
        raise UsageError(
            f"{self.path}: not a ddpwatch recording, or cut off in its first second", "there is nothing to read in it"
        )

    def _safely(self, source: Iterator[Record]) -> Iterator[Record]:
        """Passes on records up to the first damage, and notes how the file ends."""
        ended = False
        try:
            for record in source:
                ended = record.opcode == Opcode.FOOTER
                yield record
        except BROKEN:
            ended = False
        self.cut_tail = not ended

    def _raw(self, fd: int) -> Iterator[tuple[UnpackedChunk, bool]]:
        """Yields all chunks, from front to back. Needs no index."""
        chunk_at = 0
        for record in self._safely(records(fd)):
            if record.opcode == Opcode.CHUNK:
                chunk_at = record.offset
                try:
                    chunk = unpack_chunk(record.content)
                except BROKEN:
                    break
                yield chunk, True
            elif record.opcode == ROW_OPCODE and not describes_chunk(record, chunk_at):
                break  # the chunk before it is damaged and was not recognised
        else:
            return
        self.cut_tail = True

    def _selected(self, fd: int, selection: Selection) -> Iterator[tuple[UnpackedChunk, bool]]:
        """Yields each chunk that the selection needs, with whether more than context is wanted."""
        self.cut_tail = not self.index.complete
        after = self.index.steps[0] - 1 if self.index.steps is not None else -1
        for row in self.index:
            wanted = selection.wants_chunk(row, after)
            after = row.last_step if row.has_steps else after
            if wanted or selection.wants_context(row):
                yield self._chunk(fd, row), wanted
                if self.cut_tail and self.index.complete:
                    return

    def _chunk(self, fd: int, row: ChunkRow) -> UnpackedChunk:
        try:
            record = record_at(fd, row.offset)
            if record is not None and record.opcode == Opcode.CHUNK:
                return unpack_chunk(record.content)
        except BROKEN:
            pass
        self.cut_tail = True
        return UnpackedChunk([], 0)

    @staticmethod
    def _wants(frame: Frame, selection: Selection, wanted: bool) -> bool:
        return (wanted or isinstance(frame[0], CONTEXT)) and selection.wants(frame[0], frame[1].received_ns)


class _File:
    """A file opened for reading; raises a UsageError if that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _File:
        try:
            self._fd = open_to_read(self._path)
            os.pread(self._fd, 1, 0)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}", "give a file that was written with --record") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """Returns the file descriptor."""
        return self._fd


def int_field(metadata: dict[str, str], name: str) -> int:
    """Returns a count in metadata; 0 if it is missing or malformed."""
    text = metadata.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def _checked_format(path: Path, metadata: dict[str, str]) -> str:
    """Returns a note if the file has a newer minor version, whose additions are skipped.

    Refuses a newer major version.
    """
    text = metadata.get("schema_version", "")
    version = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9}))?", text, re.ASCII)
    if version is None or int(version[1]) > SCHEMA_VERSION:
        raise UsageError(
            f"{path}: recorded in format {text[:20]!r}, this ddpwatch reads up to {SCHEMA_VERSION}", "update ddpwatch"
        )
    if int(version[1]) == SCHEMA_VERSION and int(version[2] or 0) > SCHEMA_MINOR:
        return f"{path.name} was recorded by a newer ddpwatch (format {text}): its additions are left out"
    return ""
