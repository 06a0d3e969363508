"""Reads a recording, also one that was cut off: everything before the cut, and a note that there was one.

Recordings are untrusted input. A reader goes through the file once, front to back, chunk by chunk; it needs no
index, so a file without its end reads like any other.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard
from mcap.exceptions import McapError
from mcap.records import Chunk, Footer, McapRecord, Metadata
from mcap.records import Message as McapMessage
from mcap.stream_reader import CRCValidationError, StreamReader, breakup_chunk

from ddpwatch.errors import UsageError
from ddpwatch.messages import MAX_FRAME_BYTES, SCHEMA_VERSION, FrameError, Message, decode
from ddpwatch.transport import Envelope

_RECORD_LIMIT = 16 * MAX_FRAME_BYTES
_BROKEN = (McapError, CRCValidationError, zstandard.ZstdError, struct.error, ValueError, KeyError, IndexError, EOFError)


class Recording:
    """One pass over a recording's frames. Counters are final once the iteration is.

    Args:
        path: The file.

    Raises:
        UsageError: The file cannot be opened, is not an MCAP file, or was written by a newer major version.

    Attributes:
        frames: Frames read so far.
        skipped: Frames that could not be decoded (unknown type, damaged).
        cut_tail: The file ends before its end was written; what was read lies before the cut.
        seconds: From the first to the last frame, by receive time.
        metadata: What the recorder wrote about the run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.frames = 0
        self.skipped = 0
        self.cut_tail = False
        self.metadata: dict[str, str] = {}
        self._first_ns = 0
        self._last_ns = 0
        self._seq = 0
        self._head = self._peek()

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self.path.stat().st_size

    @property
    def seconds(self) -> float:
        """Length of the recording in seconds."""
        return max(0, self._last_ns - self._first_ns) / 1e9

    def __iter__(self) -> Iterator[tuple[Message, Envelope]]:
        """The frames in file order."""
        self.frames = self.skipped = self._seq = 0
        self.cut_tail = False
        with open(self.path, "rb") as file:
            for record in self._records(file):
                if isinstance(record, McapMessage):
                    yield from self._frame(record)

    # -- inside ----------------------------------------------------------------------------------------------

    def _peek(self) -> bytes:
        """Checks that this is a recording at all, so that the error comes before anything is drawn."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(1 << 16)
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}", "give a file that was written with --record") from error
        if head[:8] != b"\x89MCAP0\r\n":
            what = "is empty" if not head else "is not an MCAP recording"
            raise UsageError(f"{self.path}: {what}", "give a file that was written with --record")
        for record in self._records(io.BytesIO(head)):
            if isinstance(record, Metadata) and record.name == "ddpwatch":
                self._check(record.metadata)
                return head
        raise UsageError(f"{self.path}: not a ddpwatch recording, or cut before its first second", "nothing to read")

    def _check(self, metadata: dict[str, str]) -> None:
        version = metadata.get("schema_version", "")
        if not version.isdecimal() or int(version) > SCHEMA_VERSION:
            raise UsageError(
                f"{self.path}: recorded in format {version!r}, this ddpwatch reads up to {SCHEMA_VERSION}",
                "update ddpwatch",
            )
        self.metadata = dict(metadata)

    def _records(self, file: IO[bytes]) -> Iterator[McapRecord]:
        """Records up to the end or the first damage."""
        reader = StreamReader(file, emit_chunks=True, validate_crcs=True, record_size_limit=_RECORD_LIMIT)
        ended = False
        try:
            for record in reader.records:
                if isinstance(record, Chunk):
                    yield from breakup_chunk(_bounded(record), validate_crc=True)
                else:
                    ended = ended or isinstance(record, Footer)
                    yield record
        except _BROKEN:
            pass
        self.cut_tail = not ended

    def _frame(self, record: McapMessage) -> Iterator[tuple[Message, Envelope]]:
        try:
            message = decode(record.data)
        except FrameError:
            self.skipped += 1
            return
        self.frames += 1
        self._seq += 1
        self._first_ns = self._first_ns or record.log_time
        self._last_ns = max(self._last_ns, record.log_time)
        yield message, Envelope(self._seq, record.log_time, record.data)


def _bounded(chunk: Chunk) -> Chunk:
    """Refuses a chunk that claims to unpack to more than any of ours would."""
    if chunk.uncompressed_size > _RECORD_LIMIT:
        raise ValueError(f"chunk of {chunk.uncompressed_size} bytes")
    return chunk
