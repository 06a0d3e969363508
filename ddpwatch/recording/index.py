"""Finds the chunks of a file: through the index at its end, or by walking from record to record."""

from __future__ import annotations

import io
import itertools
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.records import Footer

from ddpwatch.recording.container import (
    BROKEN,
    CHUNK,
    HEAD,
    INDEX_NAME,
    LENGTH,
    MAGIC,
    NO_STEP,
    RECORD_LIMIT,
    ROW,
    ROW_OPCODE,
    ChunkRow,
    attachment_of,
    record_at,
    records,
)

_ALL_KINDS: Final = (1 << 16) - 1


class Index:
    """The rows of a file's chunks, in file order.

    Attributes:
        complete: The file has its end.
        last_metadata: Offset of the last metadata record; 0 without one.
    """

    def __init__(self, values: array[int], complete: bool, last_metadata: int) -> None:
        self._values = values
        self.complete = complete
        self.last_metadata = last_metadata

    def __len__(self) -> int:
        return len(self._values) // 7

    def __getitem__(self, number: int) -> ChunkRow:
        return ChunkRow(*self._values[7 * number : 7 * number + 7])

    def __iter__(self) -> Iterator[ChunkRow]:
        values = self._values
        for start in range(0, len(values), 7):
            yield ChunkRow(*values[start : start + 7])

    def backwards(self, at_ns: int) -> Iterator[ChunkRow]:
        """Yields the rows of chunks that start at that time or earlier, newest first."""
        for number in range(bisect_right(self._values[1::7], at_ns) - 1, -1, -1):
            yield self[number]

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step number; None if the file holds no step, or does not say."""
        first, last = min(self._values[3::7], default=NO_STEP), max(self._values[4::7], default=0)
        return (first, last) if first <= last < NO_STEP else None

    @property
    def span_ns(self) -> tuple[int, int] | None:
        """Receive time of the first and the last frame; None without frames."""
        return (min(self._values[1::7]), max(self._values[2::7])) if len(self) else None


def read_index(fd: int) -> Index:
    """Reads the index at the file's end in constant time, or builds it by walking from record to record.

    The walk reads no chunk's content and stops at the first damage, as every pass does.
    """
    try:
        found = _stored_index(fd)
    except BROKEN:
        found = None
    return _walk(fd) if found is None else found


def _stored_index(fd: int) -> Index | None:
    """Follows the footer to the summary offsets, and these to the indexes of attachments and metadata."""
    size = os.fstat(fd).st_size
    footer_at = size - len(MAGIC) - HEAD.size - 20
    record = record_at(fd, footer_at) if footer_at > 0 else None
    if record is None or record.opcode != Opcode.FOOTER or os.pread(fd, 8, size - 8) != MAGIC:
        return None
    footer = Footer.read(ReadDataStream(io.BytesIO(record.content)))
    if not footer.summary_offset_start:
        return None
    groups = records(fd, footer.summary_offset_start)
    starts = {g.content[0]: LENGTH.unpack_from(g.content, 1)[0] for g in groups if g.opcode == Opcode.SUMMARY_OFFSET}
    rows = _attached_rows(fd, _indexed(fd, starts, Opcode.ATTACHMENT_INDEX))
    last_metadata = max(_indexed(fd, starts, Opcode.METADATA_INDEX), default=0)
    return None if rows is None else Index(rows, complete=True, last_metadata=last_metadata)


def _indexed(fd: int, starts: dict[int, int], kind: Opcode) -> Iterator[int]:
    """Yields the offsets of the records that the summary lists in its index of that kind."""
    entries = records(fd, starts[kind]) if kind in starts else iter(())
    for entry in itertools.takewhile(lambda record: record.opcode == kind, entries):
        yield LENGTH.unpack_from(entry.content)[0]


def _attached_rows(fd: int, offsets: Iterator[int]) -> array[int] | None:
    for offset in offsets:
        record = record_at(fd, offset)
        if record is not None and record.opcode == Opcode.ATTACHMENT:
            attachment = attachment_of(record)
            if attachment.name == INDEX_NAME:
                return _checked(attachment.data, os.fstat(fd).st_size)
    return None


def _checked(data: bytes, size: int) -> array[int] | None:
    """Returns the stored rows, if their chunks lie in the file and in order."""
    values = array("Q")
    values.frombytes(data)
    offsets = values[0::7]
    if len(values) % 7 or any(a >= b for a, b in itertools.pairwise(offsets)):
        return None
    return values if not offsets or offsets[-1] < size else None


def _walk(fd: int) -> Index:
    values, offset, complete, last_metadata = array("Q"), len(MAGIC), False, 0
    size = os.fstat(fd).st_size
    while True:
        head = os.pread(fd, HEAD.size + CHUNK.size, offset)
        if len(head) < HEAD.size:
            break
        opcode, length = HEAD.unpack_from(head)
        end = offset + HEAD.size + length
        if length > RECORD_LIMIT or end > size:
            break
        if opcode == Opcode.CHUNK and length >= CHUNK.size:
            start_ns, end_ns = struct.unpack_from("<QQ", head, HEAD.size)
            values.extend((offset, start_ns, end_ns, 0, NO_STEP, _ALL_KINDS, 0))  # until its row follows
        elif opcode == ROW_OPCODE and length == ROW.size and len(values):
            row = ROW.unpack(os.pread(fd, ROW.size, offset + HEAD.size))
            if row[0] == values[-7]:
                values[-7:] = array("Q", row)
        elif opcode == Opcode.METADATA:
            last_metadata = offset
        elif opcode == Opcode.FOOTER:
            complete = True
            break
        offset = end
    return Index(values, complete, last_metadata)
