"""Writes a recording: the frames with their receive times, in an MCAP file.

There is one channel per message type, with msgpack frames in zstd chunks. Recorders flush at least once a second, which
closes the chunk: ``kill -9`` loses at most that second, and a reader needs no index for the rest.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ddpwatch.errors import UsageError
from ddpwatch.recording.container import END_NAME
from ddpwatch.recording.mcap_writer import McapWriter
from ddpwatch.version import __version__
from ddpwatch.wire.messages import MESSAGE_TYPES, SCHEMA_VERSION, FrameError, Message, NodeStep, Step, decode, type_name
from ddpwatch.wire.transport import Envelope

SCHEMA_MINOR = 0  # grows with additions that an older reader may skip
_SCHEMAS: dict[str, bytes] = {}


def step_of(message: Message) -> int | None:
    """Returns the step under which the index lists a message, if any."""
    return message.step if isinstance(message, (Step, NodeStep)) else None


class RecordingWriter:
    """Writes one file.

    Args:
        path: The file: a new one, or an empty one.
        about: Free text about the run, for the file's metadata.

    Attributes:
        frames: Frames written so far.

    Raises:
        UsageError: The file cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        try:
            self._file = _create(self.path)
        except FileExistsError as error:
            raise UsageError(f"{path} exists", "give another name: no recording is overwritten") from error
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", "give a file in a directory that you can write to") from error
        self._flushed = 0  # bytes
        status = os.fstat(self._file.fileno())
        self._identity = (status.st_dev, status.st_ino)
        head = {
            "schema_version": f"{SCHEMA_VERSION}.{SCHEMA_MINOR}",
            "recording_id": secrets.token_hex(8),
            **(about or {}),
        }
        try:
            self._writer = McapWriter(self._file, "ddpwatch", f"ddpwatch {__version__}")
            self._writer.add_metadata("ddpwatch", head)
            self.frames = 0
            self.flush()
        except OSError as error:
            self.abandon()
            with contextlib.suppress(OSError):
                self.path.unlink()  # it is empty
            raise UsageError(f"{path}: {error.strerror}", "free some space, or record elsewhere") from error

    def write(self, envelope: Envelope, kind: str, step: int | None = None) -> None:
        """Adds a frame of that message type; ``step`` goes into the index. May raise OSError."""
        if step is None and kind in ("step", "node_step"):
            with contextlib.suppress(FrameError):
                step = step_of(decode(envelope.frame))
        sequence = envelope.seq and (envelope.seq & 0xFFFFFFFF or 1)  # 32 bits, and 0 means "repeated"
        self._writer.add_message(kind, _schema(kind), envelope.received_ns, sequence, envelope.frame, step)
        self.frames += 1

    def write_message(self, message: Message, envelope: Envelope) -> None:
        """Adds a frame that is already decoded. May raise OSError."""
        self.write(envelope, type_name(message), step_of(message))

    def flush(self) -> int:
        """Closes the open chunk and hands everything to the operating system; returns the file's size in bytes."""
        self._flushed = self._writer.flush()
        return self._flushed

    def in_place(self) -> bool:
        """Returns whether the file is still at its path; it or its directory may have been removed."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def move(self, path: Path) -> None:
        """Renames the file being written. May raise OSError."""
        self.path.rename(path)
        self.path = path

    def close(self, end: Mapping[str, str] | None = None, attachments: Mapping[str, bytes] | None = None) -> None:
        """Writes index and end.

        Args:
            end: How the recording went, for the metadata `END_NAME`.
            attachments: JSON documents to add to the file, by name.
        """
        try:
            for name, content in (attachments or {}).items():
                self._writer.add_attachment(name, "application/json", content)
            if end:
                self._writer.add_metadata(END_NAME, dict(end))
            self._writer.finish()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Closes the file without an end. It keeps what was flushed, and nothing of what the disk refused in part."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._flushed)
            with contextlib.suppress(OSError):
                self._file.raw.close()  # without the buffer, which would be written once more


def _create(path: Path) -> io.BufferedWriter:
    """Opens a file that is new or empty. Truncates nothing, and waits for no reader of a pipe."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    os.set_blocking(file, True)
    if os.fstat(file).st_size:
        os.close(file)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return os.fdopen(file, "wb")


def _schema(kind: str) -> bytes:
    if kind not in _SCHEMAS:
        schema = msgspec.json.schema(MESSAGE_TYPES[kind]) if kind in MESSAGE_TYPES else {}
        _SCHEMAS[kind] = msgspec.json.encode(schema)
    return _SCHEMAS[kind]
