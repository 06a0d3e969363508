"""The container of a recording: MCAP records, read one by one.

Three things differ from the mcap library: a chunk is closed by time as well as by size; after each chunk follows a
private record with its contents (times, steps, kinds of messages), so that a file without its end can be searched
without unpacking it; and every size that a hostile file claims is checked before anything is allocated.

The files remain plain MCAP: private records have an opcode that the format reserves for applications.
"""

from __future__ import annotations

import errno
import io
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.records import Attachment, Metadata

from ddpwatch.common.unpacking import unpacked
from ddpwatch.run.regular import allow_all_files, open_regular
from ddpwatch.wire.messages import MAX_FRAME_BYTES, MESSAGE_TYPES

MAGIC: Final = b"\x89MCAP0\r\n"
ROW_OPCODE: Final = 0x81
RECORD_LIMIT: Final = 16 * MAX_FRAME_BYTES
UNPACK_RATIO: Final = 64  # to how many times its size a large chunk may unpack; what we record to 8, if it is not alike
LARGE_CHUNK: Final = 2 * MAX_FRAME_BYTES  # ours are smaller; the layouts of 1,000 ranks are alike, and unpack to more
INDEX_NAME: Final = "ddpwatch.index"
END_NAME: Final = "ddpwatch.end"
KINDS: Final = tuple(MESSAGE_TYPES)
NO_STEP: Final = (1 << 64) - 1
HEAD: Final = struct.Struct("<BQ")  # opcode, length
CHUNK: Final = struct.Struct("<QQQII")  # start, end, unpacked size, CRC, length of the compression's name
MESSAGE: Final = struct.Struct("<BQHIQQ")  # head, channel, sequence, log time, publish time
ROW: Final = struct.Struct("<7Q")
LENGTH: Final = struct.Struct("<Q")
_MAX_OFFSET = (1 << 62) - 1
BROKEN: Final = (
    McapError, zstandard.ZstdError, struct.error, ValueError, KeyError, IndexError, EOFError, MemoryError,
    OverflowError,
)  # fmt: skip


def kind_bit(kind: str) -> int:
    """Returns the bit of a message type in a row's ``kinds``; the last bit for unknown types."""
    return 1 << (KINDS.index(kind) if kind in KINDS else 15)


class ChunkRow(NamedTuple):
    """Contents of one chunk. Times in ns since the Unix epoch; without a step ``first_step`` exceeds ``last_step``."""

    offset: int
    start_ns: int
    end_ns: int
    first_step: int
    last_step: int
    kinds: int
    frames: int

    @property
    def has_steps(self) -> bool:
        """Whether the chunk is known to hold steps, and which."""
        return self.first_step <= self.last_step < NO_STEP

    def pack(self) -> bytes:
        """Returns the content of the private record."""
        return ROW.pack(*self)


class RawMessage(NamedTuple):
    """One message of a chunk. Sequence 0 marks a frame that is repeated from an earlier part."""

    channel: int
    sequence: int
    log_time: int
    data: bytes


class UnpackedChunk(NamedTuple):
    """The messages of a chunk, and its size in the file."""

    messages: list[RawMessage]
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the file."""

    offset: int
    opcode: int
    content: bytes

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + HEAD.size + len(self.content)


def open_to_read(path: Path) -> int:
    """Opens a file; returns its descriptor. A thousand rank files are more than a process may open by default.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno != errno.EMFILE or not allow_all_files():
            raise
    return open_regular(path)


def record_at(fd: int, offset: int) -> Record | None:
    """Returns the record at an offset; None if the file does not hold all of it.

    Raises:
        ValueError: Its length or offset is beyond what ddpwatch writes.
    """
    if offset > _MAX_OFFSET:
        raise ValueError(f"record at {offset}")
    head = os.pread(fd, HEAD.size, offset)
    if len(head) < HEAD.size:
        return None
    opcode, length = HEAD.unpack(head)
    if length > RECORD_LIMIT:
        raise ValueError(f"record of {length} bytes")
    content = os.pread(fd, length, offset + HEAD.size)
    return Record(offset, opcode, content) if len(content) == length else None


def records(fd: int, offset: int = len(MAGIC)) -> Iterator[Record]:
    """Yields the records from an offset to the footer or the end of the file. May raise ValueError, see `record_at`."""
    while (record := record_at(fd, offset)) is not None:
        yield record
        if record.opcode == Opcode.FOOTER:
            return
        offset = record.end


def unpack_chunk(content: bytes) -> UnpackedChunk:
    """Unpacks and checks a chunk.

    Raises:
        One of `BROKEN`: It is damaged, or unpacks to more than `RECORD_LIMIT`, or to more than its size allows.
    """
    data = _unpack(content)
    messages, offset = [], 0
    while offset < len(data):
        opcode, length = HEAD.unpack_from(data, offset)
        if length > len(data) - offset - HEAD.size:
            raise ValueError("a record reaches beyond its chunk")
        if opcode == Opcode.MESSAGE:
            _, _, channel, sequence, log_time, _ = MESSAGE.unpack_from(data, offset)
            messages.append(
                RawMessage(channel, sequence, log_time, data[offset + MESSAGE.size : offset + HEAD.size + length])
            )
        offset += HEAD.size + length
    return UnpackedChunk(messages, len(content))


def _unpack(content: bytes) -> bytes:
    _, _, size, crc, name_length = CHUNK.unpack_from(content)
    name = content[CHUNK.size : CHUNK.size + name_length]
    (packed_size,) = LENGTH.unpack_from(content, CHUNK.size + name_length)
    packed = content[CHUNK.size + name_length + LENGTH.size :]
    if len(packed) != packed_size or size > min(RECORD_LIMIT, max(LARGE_CHUNK, UNPACK_RATIO * packed_size)):
        raise ValueError(f"chunk of {size} bytes")
    if name == b"zstd":
        if zstandard.frame_content_size(packed) > RECORD_LIMIT:  # what zstd would allocate; the chunk may claim less
            raise ValueError("a chunk that unpacks to more than the limit")
        data = unpacked(packed, max_output_size=size)
    elif name == b"":
        data = packed
    else:
        raise ValueError(f"compression {name!r}")
    if len(data) != size or (crc and zlib.crc32(data) != crc):
        raise ValueError("a chunk fails its checksum")
    return data


def describes_chunk(row: Record, chunk_at: int) -> bool:
    """Returns whether a row's record describes the chunk at that offset."""
    return len(row.content) == ROW.size and LENGTH.unpack_from(row.content)[0] == chunk_at


def metadata_of(record: Record) -> Metadata:
    """Parses a metadata record. May raise any of `BROKEN`."""
    metadata: Metadata = Metadata.read(ReadDataStream(io.BytesIO(record.content)))
    return metadata


def attachment_of(record: Record) -> Attachment:
    """Parses an attachment record. May raise any of `BROKEN`."""
    attachment: Attachment = Attachment.read(ReadDataStream(io.BytesIO(record.content)))
    return attachment
