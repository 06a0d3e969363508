"""Writes the container of a recording: chunks that the caller may close, and an index at the end."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from typing import IO, Final

import zstandard
from mcap.data_stream import RecordBuilder
from mcap.opcode import Opcode
from mcap.records import (
    Attachment,
    AttachmentIndex,
    Channel,
    Chunk,
    ChunkIndex,
    DataEnd,
    Footer,
    Header,
    McapRecord,
    Metadata,
    MetadataIndex,
    Schema,
    Statistics,
    SummaryOffset,
)

from ddpwatch.recording.container import HEAD, INDEX_NAME, MAGIC, MESSAGE, NO_STEP, ROW_OPCODE, ChunkRow, kind_bit

CHUNK_BYTES: Final = 1 << 20
_BODY_BYTES: Final = MESSAGE.size - HEAD.size


@dataclass(slots=True)
class _OpenChunk:
    """The chunk that is being filled."""

    parts: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    start_ns: int = NO_STEP
    end_ns: int = 0
    first_step: int = NO_STEP
    last_step: int = 0
    kinds: int = 0
    frames: int = 0

    def row(self, offset: int) -> ChunkRow:
        """Returns the row of the chunk, written at that offset."""
        return ChunkRow(offset, self.start_ns, self.end_ns, self.first_step, self.last_step, self.kinds, self.frames)


class McapWriter:
    """Appends messages to a file. Any method may raise OSError; the writer is then unusable.

    Args:
        file: An empty binary file.
        profile: The MCAP profile, which names the convention of the content.
        library: Name and version of the writing program.
    """

    def __init__(self, file: IO[bytes], profile: str, library: str) -> None:
        self._file = file
        self._offset = 0
        self._compressor = zstandard.ZstdCompressor(level=3)
        self._schemas: list[Schema] = []
        self._channels: dict[str, Channel] = {}
        self._counts: dict[int, int] = {}
        self._chunk_index = bytearray()
        self._chunk_count = 0
        self._span = (NO_STEP, 0)
        self._chunk = _OpenChunk()
        self._attachments: list[AttachmentIndex] = []
        self._metadata: list[MetadataIndex] = []
        self._rows = bytearray()
        self._write(MAGIC + _bytes_of(Header(profile=profile, library=library)))

    def add_message(
        self, kind: str, schema: bytes, log_time: int, sequence: int, data: bytes, step: int | None
    ) -> None:
        """Adds a message to the open chunk, and closes the chunk once it is full."""
        channel = self._channels.get(kind) or self._open_channel(kind, schema)
        length = _BODY_BYTES + len(data)
        chunk = self._chunk
        chunk.parts.append(MESSAGE.pack(Opcode.MESSAGE, length, channel.id, sequence, log_time, log_time))
        chunk.parts.append(data)
        chunk.nbytes += MESSAGE.size + len(data)
        chunk.start_ns = min(chunk.start_ns, log_time)
        chunk.end_ns = max(chunk.end_ns, log_time)
        chunk.kinds |= kind_bit(kind)
        chunk.frames += 1
        self._counts[channel.id] = self._counts.get(channel.id, 0) + 1
        if step is not None:
            chunk.first_step, chunk.last_step = min(chunk.first_step, step), max(chunk.last_step, step)
        if chunk.nbytes >= CHUNK_BYTES:
            self.close_chunk()

    def add_metadata(self, name: str, values: dict[str, str]) -> None:
        """Adds a metadata record."""
        self.close_chunk()
        data = _bytes_of(Metadata(name=name, metadata=values))
        self._metadata.append(MetadataIndex(offset=self._offset, length=len(data), name=name))
        self._write(data)

    def add_attachment(self, name: str, media_type: str, content: bytes) -> None:
        """Adds an attachment."""
        self.close_chunk()
        now = time.time_ns()
        data = _bytes_of(Attachment(create_time=now, log_time=now, name=name, media_type=media_type, data=content))
        self._attachments.append(
            AttachmentIndex(
                offset=self._offset,
                length=len(data),
                log_time=now,
                create_time=now,
                data_size=len(content),
                name=name,
                media_type=media_type,
            )
        )
        self._write(data)

    def close_chunk(self) -> None:
        """Writes the open chunk, unless it is empty, and the row that describes it."""
        opened = self._chunk
        if not opened.frames:
            return
        data = b"".join(opened.parts)
        packed = self._compressor.compress(data)
        chunk = _bytes_of(
            Chunk(
                compression="zstd",
                data=packed,
                message_start_time=opened.start_ns,
                message_end_time=opened.end_ns,
                uncompressed_crc=zlib.crc32(data),
                uncompressed_size=len(data),
            )
        )
        row = opened.row(self._offset).pack()
        self._chunk_index += _bytes_of(
            ChunkIndex(
                chunk_length=len(chunk),
                chunk_start_offset=self._offset,
                compression="zstd",
                compressed_size=len(packed),
                message_end_time=opened.end_ns,
                message_index_length=0,
                message_index_offsets={},
                message_start_time=opened.start_ns,
                uncompressed_size=len(data),
            )
        )
        self._chunk_count += 1
        self._span = (min(self._span[0], opened.start_ns), max(self._span[1], opened.end_ns))
        self._rows += row
        self._chunk = _OpenChunk()
        self._write(chunk + HEAD.pack(ROW_OPCODE, len(row)) + row)

    def flush(self) -> int:
        """Closes the chunk and hands everything to the operating system; returns the file's size in bytes."""
        self.close_chunk()
        self._file.flush()
        return self._offset

    def finish(self) -> None:
        """Writes index, summary and footer."""
        self.close_chunk()  # adds its row first
        self.add_attachment(INDEX_NAME, "application/octet-stream", bytes(self._rows))
        self._write(_bytes_of(DataEnd(data_section_crc=0)))
        summary_start = self._offset
        offsets = bytearray()
        groups = (self._schemas, [*self._channels.values()], [self._statistics()], None, self._attachments,
                  self._metadata)  # fmt: skip
        for group in groups:
            data = self._chunk_index if group is None else b"".join(_bytes_of(record) for record in group)
            offsets += self._write_group(bytes(data))
        offsets_start = self._offset
        self._write(bytes(offsets))
        footer = Footer(summary_start=summary_start, summary_offset_start=offsets_start, summary_crc=0)
        self._write(_bytes_of(footer) + MAGIC)
        self._file.flush()

    # -- inside ----------------------------------------------------------------------------------------------

    def _open_channel(self, kind: str, schema: bytes) -> Channel:
        number = len(self._channels) + 1
        self._schemas.append(Schema(id=number, data=schema, encoding="jsonschema", name=kind))
        channel = Channel(id=number, topic=kind, message_encoding="msgpack", metadata={}, schema_id=number)
        self._channels[kind] = channel
        self._chunk.parts.append(_bytes_of(self._schemas[-1]) + _bytes_of(channel))
        return channel

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._offset += len(data)

    def _write_group(self, data: bytes) -> bytes:
        """Writes summary records of one kind; returns the record with their offset."""
        if not data:
            return b""
        start = self._offset
        self._write(data)
        return _bytes_of(SummaryOffset(group_opcode=data[0], group_start=start, group_length=len(data)))

    def _statistics(self) -> Statistics:
        return Statistics(
            attachment_count=len(self._attachments), channel_count=len(self._channels),
            channel_message_counts=self._counts, chunk_count=self._chunk_count,
            message_count=sum(self._counts.values()),
            message_end_time=self._span[1], message_start_time=self._span[0] if self._chunk_count else 0,
            metadata_count=len(self._metadata), schema_count=len(self._schemas),
        )  # fmt: skip


def _bytes_of(record: McapRecord) -> bytes:
    builder = RecordBuilder()
    record.write(builder)
    return bytes(builder.end())  # type: ignore[no-untyped-call]
