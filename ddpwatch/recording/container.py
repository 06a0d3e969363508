"""The container below a recording: MCAP records, written and read one by one.

Three things are done here rather than by the mcap library: a chunk is closed by time as well as by size; each chunk is
followed by a private record that says what it holds (times, steps, kinds of messages), so that a file without its end
can be searched without unpacking it; and nothing a hostile file claims is allocated before it was checked.

The files stay plain MCAP: private records have an opcode that the format reserves for applications.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import struct
import threading
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.records import Attachment, Footer, Metadata

from ddpwatch.messages import MAX_FRAME_BYTES, MESSAGE_TYPES

MAGIC: Final = b"\x89MCAP0\r\n"
ROW_OPCODE: Final = 0x81
RECORD_LIMIT: Final = 16 * MAX_FRAME_BYTES
INDEX_NAME: Final = "ddpwatch.index"
END_NAME: Final = "ddpwatch.end"
KINDS: Final = tuple(MESSAGE_TYPES)
ALL_KINDS: Final = (1 << 16) - 1
NO_STEP: Final = (1 << 64) - 1
_HEAD = struct.Struct("<BQ")
_CHUNK = struct.Struct("<QQQII")  # start, end, unpacked size, CRC, length of the compression's name
_MESSAGE = struct.Struct("<BQHIQQ")
_ROW = struct.Struct("<7Q")
_LENGTH = struct.Struct("<Q")
_FARTHEST = (1 << 62) - 1
BROKEN: Final = (McapError, zstandard.ZstdError, struct.error, ValueError, KeyError, IndexError, EOFError, MemoryError)


def kind_bit(kind: str) -> int:
    """The bit of a message type in a row's ``kinds``; the last one for types that are not ours."""
    return 1 << (KINDS.index(kind) if kind in KINDS else 15)


class ChunkRow(NamedTuple):
    """What one chunk holds. Times in ns since the Unix epoch; ``first_step`` is above ``last_step`` without a step."""

    offset: int
    start_ns: int
    end_ns: int
    first_step: int
    last_step: int
    kinds: int
    frames: int

    @property
    def has_steps(self) -> bool:
        """Whether the chunk holds steps and says which."""
        return self.first_step <= self.last_step < NO_STEP

    def pack(self) -> bytes:
        """The row as the private record's content."""
        return _ROW.pack(*self)


class RawMessage(NamedTuple):
    """One message of a chunk. Sequence 0 marks a frame repeated from an earlier part of a rotated recording."""

    channel: int
    sequence: int
    log_time: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the file: where it begins, what it is, and its content."""

    offset: int
    opcode: int
    content: bytes

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + _HEAD.size + len(self.content)


def record_at(fd: int, offset: int) -> Record | None:
    """The record that begins there; None where the file does not hold all of it.

    Raises:
        ValueError: It claims to be larger than any of ours, or to lie where no file reaches.
    """
    if offset > _FARTHEST:
        raise ValueError(f"record at {offset}")
    head = os.pread(fd, _HEAD.size, offset)
    if len(head) < _HEAD.size:
        return None
    opcode, length = _HEAD.unpack(head)
    if length > RECORD_LIMIT:
        raise ValueError(f"record of {length} bytes")
    content = os.pread(fd, length, offset + _HEAD.size)
    return Record(offset, opcode, content) if len(content) == length else None


def records(fd: int, offset: int = len(MAGIC)) -> Iterator[Record]:
    """The records from there on, up to the footer, the end of the file, or a record that cannot be."""
    while (record := record_at(fd, offset)) is not None:
        yield record
        if record.opcode == Opcode.FOOTER:
            return
        offset = record.end


def chunk_messages(content: bytes) -> list[RawMessage]:
    """Unpacks and checks a chunk.

    Raises:
        One of `BROKEN`: it is damaged, or unpacks to more than it may.
    """
    data = _unpack(content)
    messages, place = [], 0
    while place < len(data):
        opcode, length = _HEAD.unpack_from(data, place)
        if length > len(data) - place - _HEAD.size:
            raise ValueError("a record reaches beyond its chunk")
        if opcode == Opcode.MESSAGE:
            _, _, channel, sequence, log_time, _ = _MESSAGE.unpack_from(data, place)
            messages.append(
                RawMessage(channel, sequence, log_time, data[place + _MESSAGE.size : place + _HEAD.size + length])
            )
        place += _HEAD.size + length
    return messages


@functools.cache
def _thread_decompressor(thread: int) -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor()


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's: making one costs more than unpacking a small chunk, and two threads may not share one."""
    return _thread_decompressor(threading.get_ident())


def _unpack(content: bytes) -> bytes:
    _, _, size, crc, name_length = _CHUNK.unpack_from(content)
    name = content[_CHUNK.size : _CHUNK.size + name_length]
    (packed_size,) = _LENGTH.unpack_from(content, _CHUNK.size + name_length)
    packed = content[_CHUNK.size + name_length + _LENGTH.size :]
    if len(packed) != packed_size or size > RECORD_LIMIT:
        raise ValueError(f"chunk of {size} bytes")
    if name == b"zstd":
        if zstandard.frame_content_size(packed) > RECORD_LIMIT:  # what would be allocated, whatever the chunk says
            raise ValueError("a chunk that unpacks to more than it may")
        data = _decompressor().decompress(packed, max_output_size=size)
    elif name == b"":
        data = packed
    else:
        raise ValueError(f"compression {name!r}")
    if len(data) != size or (crc and zlib.crc32(data) != crc):
        raise ValueError("a chunk fails its checksum")
    return data


def tells_of(row: Record, chunk_at: int) -> bool:
    """Whether a row's record is about the chunk that begins there."""
    return len(row.content) == _ROW.size and _LENGTH.unpack_from(row.content)[0] == chunk_at


def metadata_of(record: Record) -> Metadata:
    """The content of a metadata record. May raise any of `BROKEN`."""
    metadata: Metadata = Metadata.read(ReadDataStream(io.BytesIO(record.content)))
    return metadata


def attachment_of(record: Record) -> Attachment:
    """The content of an attachment record. May raise any of `BROKEN`."""
    attachment: Attachment = Attachment.read(ReadDataStream(io.BytesIO(record.content)))
    return attachment


# -- the index -----------------------------------------------------------------------------------------------


class Index:
    """The rows of a file's chunks, in file order.

    Attributes:
        complete: The file has its end.
        last_metadata: Where the last metadata record begins; 0 where there is none.
    """

    def __init__(self, values: array[int], complete: bool, last_metadata: int) -> None:
        self._values = values
        self.complete = complete
        self.last_metadata = last_metadata

    def __len__(self) -> int:
        return len(self._values) // 7

    def __getitem__(self, place: int) -> ChunkRow:
        return ChunkRow(*self._values[7 * place : 7 * place + 7])

    def __iter__(self) -> Iterator[ChunkRow]:
        values = self._values
        for place in range(0, len(values), 7):
            yield ChunkRow(*values[place : place + 7])

    def backwards(self, at_ns: int) -> Iterator[ChunkRow]:
        """The rows of chunks that begin at that moment or before it, newest first."""
        for place in range(bisect_right(self._values[1::7], at_ns) - 1, -1, -1):
            yield self[place]

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step number; None without a step, or where the file does not say."""
        first, last = min(self._values[3::7], default=NO_STEP), max(self._values[4::7], default=0)
        return (first, last) if first <= last < NO_STEP else None

    @property
    def span_ns(self) -> tuple[int, int] | None:
        """Receive time of the first and the last frame; None without frames."""
        return (min(self._values[1::7]), max(self._values[2::7])) if len(self) else None


def read_index(fd: int) -> Index:
    """The file's index: from its end in constant time, or else by walking from record to record.

    The walk reads no chunk's content. It ends at the first damage, like every reading does.
    """
    try:
        found = _stored_index(fd)
    except BROKEN:
        found = None
    return _walk(fd) if found is None else found


def _stored_index(fd: int) -> Index | None:
    """Follows the footer to the summary's offsets, from there to the indexes of attachments and metadata."""
    size = os.fstat(fd).st_size
    footer_at = size - len(MAGIC) - _HEAD.size - 20
    record = record_at(fd, footer_at) if footer_at > 0 else None
    if record is None or record.opcode != Opcode.FOOTER or os.pread(fd, 8, size - 8) != MAGIC:
        return None
    footer = Footer.read(ReadDataStream(io.BytesIO(record.content)))
    if not footer.summary_offset_start:
        return None
    groups = records(fd, footer.summary_offset_start)
    begins = {g.content[0]: _LENGTH.unpack_from(g.content, 1)[0] for g in groups if g.opcode == Opcode.SUMMARY_OFFSET}
    rows = _attached_rows(fd, _indexed(fd, begins, Opcode.ATTACHMENT_INDEX))
    last_metadata = max(_indexed(fd, begins, Opcode.METADATA_INDEX), default=0)
    return None if rows is None else Index(rows, complete=True, last_metadata=last_metadata)


def _indexed(fd: int, begins: dict[int, int], kind: Opcode) -> Iterator[int]:
    """Where the records are that the summary has an index of that kind for."""
    entries = records(fd, begins[kind]) if kind in begins else iter(())
    for entry in itertools.takewhile(lambda record: record.opcode == kind, entries):
        yield _LENGTH.unpack_from(entry.content)[0]


def _attached_rows(fd: int, offsets: Iterator[int]) -> array[int] | None:
    for offset in offsets:
        record = record_at(fd, offset)
        if record is not None and record.opcode == Opcode.ATTACHMENT:
            attachment = attachment_of(record)
            if attachment.name == INDEX_NAME:
                return _checked(attachment.data, os.fstat(fd).st_size)
    return None


def _checked(data: bytes, size: int) -> array[int] | None:
    """The stored rows, if every chunk they name can lie in the file, in order."""
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
        head = os.pread(fd, _HEAD.size + _CHUNK.size, offset)
        if len(head) < _HEAD.size:
            break
        opcode, length = _HEAD.unpack_from(head)
        end = offset + _HEAD.size + length
        if length > RECORD_LIMIT or end > size:
            break
        if opcode == Opcode.CHUNK and length >= _CHUNK.size:
            start_ns, end_ns = struct.unpack_from("<QQ", head, _HEAD.size)
            values.extend((offset, start_ns, end_ns, 0, NO_STEP, ALL_KINDS, 0))  # unless its row follows
        elif opcode == ROW_OPCODE and length == _ROW.size and len(values):
            row = _ROW.unpack(os.pread(fd, _ROW.size, offset + _HEAD.size))
            if row[0] == values[-7]:
                values[-7:] = array("Q", row)
        elif opcode == Opcode.METADATA:
            last_metadata = offset
        elif opcode == Opcode.FOOTER:
            complete = True
            break
        offset = end
    return Index(values, complete, last_metadata)
