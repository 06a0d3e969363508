"""Writes a recording: the raw frames with their receive time, in an MCAP file.

One channel per message type, frames as msgpack, zstd chunks. A chunk is closed at least once a second, so a
``kill -9`` loses at most that second; a reader finds everything before the cut without an index.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
from mcap.writer import CompressionType, Writer

from ddpwatch.errors import UsageError
from ddpwatch.messages import SCHEMA_VERSION, Beat, Bye, Device, Hello, Layout, Mark, Status, Step
from ddpwatch.transport import Envelope
from ddpwatch.version import __version__

PROFILE = "ddpwatch"
_TYPES: dict[str, type[msgspec.Struct]] = {
    "hello": Hello, "layout": Layout, "step": Step, "beat": Beat,
    "mark": Mark, "device": Device, "bye": Bye, "status": Status,
}  # fmt: skip


class RecordingWriter:
    """One recording being written.

    Args:
        path: The file; must be creatable. An existing one is replaced.
        about: Free text about the run, kept as the file's metadata.

    Raises:
        UsageError: The file cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], about: dict[str, str] | None = None) -> None:
        self.path = Path(path)
        try:
            self._file = open(self.path, "wb")  # noqa: SIM115 - lives as long as the writer
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}", "give --record a file in a directory you can write"
            ) from error
        self._writer = Writer(self._file, compression=CompressionType.ZSTD)
        self._writer.start(profile=PROFILE, library=f"ddpwatch {__version__}")
        self._writer.add_metadata("ddpwatch", {"schema_version": str(SCHEMA_VERSION), **(about or {})})
        self._channels: dict[str, int] = {}
        self.frames = 0
        self.flush()

    def write(self, envelope: Envelope, kind: str) -> None:
        """Adds one frame. ``kind`` is its message type. May raise OSError."""
        self._writer.add_message(
            channel_id=self._channels.get(kind) or self._open_channel(kind),
            log_time=envelope.received_ns,
            publish_time=envelope.received_ns,
            sequence=envelope.seq & 0xFFFFFFFF,
            data=envelope.frame,
        )
        self.frames += 1

    def flush(self) -> int:
        """Closes the open chunk and hands everything to the operating system; returns the file's size in bytes."""
        # The library closes a chunk by size only, and offers no public way to close one by time.
        self._writer._Writer__finalize_chunk()  # type: ignore[attr-defined]
        self._writer._Writer__flush()  # type: ignore[attr-defined]
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        """Writes index and end."""
        try:
            self._writer.finish()  # type: ignore[no-untyped-call]
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Lets go of the file without an end: what was flushed stays readable."""
        with contextlib.suppress(OSError):  # the last buffer may be what the disk refused
            self._file.close()

    def _open_channel(self, kind: str) -> int:
        schema = self._writer.register_schema(
            name=kind, encoding="jsonschema", data=msgspec.json.encode(msgspec.json.schema(_TYPES[kind]))
        )
        self._channels[kind] = self._writer.register_channel(topic=kind, message_encoding="msgpack", schema_id=schema)
        return self._channels[kind]
