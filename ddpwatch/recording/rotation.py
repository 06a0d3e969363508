"""A recording in parts: a new file by size or age, and a cap on all of them together.

The newest part always has the name that the user gave; a full one is renamed to ``NAME.0000.mcap``,
``NAME.0001.mcap`` and so on. Each part starts with the context of its frames (the ranks, their process groups and
bucket layouts), so that it can be read alone; a reader of several parts skips these repeated frames. Where another
recorder goes on, the ranks introduce themselves again instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from ddpwatch.errors import UsageError
from ddpwatch.recording.limits import Limits
from ddpwatch.recording.names import next_part, older_part, parts_of
from ddpwatch.recording.part import Part
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.wire.messages import Bye, Group, Hello, Layout, Message, NodeStep, Step, encode
from ddpwatch.wire.node_step import without_hooks
from ddpwatch.wire.transport import Envelope

_Key = tuple[object, ...]


class ContextMessages:
    """What later frames need to be understood: who the ranks are, their process groups, bucket layouts, and ends.

    Attributes:
        newest_ns: Receive time of the newest frame (ns since the Unix epoch).
    """

    def __init__(self) -> None:
        self._kept: dict[_Key, Message] = {}
        self._fresh: set[_Key] = set()  # what no part is known to have
        self._members: dict[int, list[int]] = {}  # of a group: mostly all ranks send the same
        self.newest_ns = 0

    def __len__(self) -> int:
        return len(self._kept)

    def envelopes(self) -> Iterator[tuple[Message, Envelope]]:
        """Yields its frames for the next part. Those that an earlier part has are repeated: sequence number 0."""
        for key, message in self._kept.items():
            yield message, Envelope(int(key in self._fresh), self.newest_ns, encode(message))

    def written(self) -> None:
        """Notes that all of it has reached the disk."""
        self._fresh.clear()

    def apply_message(self, message: Message, received_ns: int) -> None:
        """Keeps the message if it is context, whether it reaches the disk or not."""
        self.newest_ns = received_ns
        if isinstance(message, Hello):
            self._keep(("hello", message.rank), message)
            self._kept.pop(("bye", message.rank), None)
        elif isinstance(message, Group):
            self._keep(("group", message.rank, message.id), self._sharing_members(message))
        elif isinstance(message, Layout):
            self._keep(("layout", message.rank, message.module, message.epoch), message)
            self._kept.pop(("layout", message.rank, message.module, message.epoch - 4), None)
        elif isinstance(message, Bye) and message.rank is not None:
            self._keep(("bye", message.rank), message)

    def _keep(self, key: _Key, message: Message) -> None:
        self._kept[key] = message
        self._fresh.add(key)

    def _sharing_members(self, group: Group) -> Group:
        """Returns the group with the list that another rank has sent, if that is equal.

        Of a thousand ranks, each names all.
        """
        members = self._members.setdefault(group.id, group.ranks)
        return replace(group, ranks=members) if members == group.ranks else group


class RotatingWriter:
    """Like `RecordingWriter`, within limits.

    Args:
        path: Path of the newest part.
        about: Free text about the run, for the metadata of every part.
        limits: Size limits.
        clock: Returns seconds, for the age of a part.
        context: What preceded the first frame, if the file could not be created in time.
        resume: Continue the recording of that name, if there is one, in a new part: its recorder has died.

    Raises:
        UsageError: The file cannot be created, or it or a part of that name exists.

    Attributes:
        frames: Frames written so far, over all parts.
        dropped_parts: How many of the oldest parts were removed to stay within the cap.
        lost_before: Frames that the recorder had lost whose recording this one continues.
        unflushed: Frames since the last `flush`, which a failing disk may not have taken.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        about: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        context: ContextMessages | None = None,
        resume: bool = False,
    ) -> None:
        self.path = Path(path)
        self.dropped_parts = self.lost_before = self.unflushed = 0
        self._limits = limits or Limits()
        self._clock = clock
        self._about = {"recording_id": secrets.token_hex(8), **(about or {})}
        self._context = ContextMessages() if context is None else context
        self._closed_frames = 0
        self._parts: list[tuple[Path, int]] = []
        if resume and (left := _newest_part(self.path, self._about.get("run_id", ""))) is not None:
            self._resume(left)
            return
        if parts_of(self.path):
            raise UsageError(f"a part of {path} exists", "give another name: no recording is overwritten")
        self._start_part(RecordingWriter(self.path, {**self._about, "part": "0"}), 0)
        with contextlib.suppress(OSError):
            next_part(self.path).unlink()  # the reservation

    @property
    def frames(self) -> int:
        """See the class."""
        return self._closed_frames + self._writer.frames

    def write_message(self, message: Message, envelope: Envelope) -> None:
        """Adds a frame. May raise OSError."""
        self.unflushed += 1
        self._context.apply_message(message, envelope.received_ns)
        if isinstance(message, (Step, NodeStep)) and message.step % self._limits.every:
            summary = summary_of(message) if isinstance(message, Step) else without_hooks(message)
            envelope = Envelope(envelope.seq, envelope.received_ns, encode(summary))
        self._writer.write_message(message, envelope)

    def flush(self) -> int:
        """Hands everything to the operating system and starts a new part if one is due.

        Returns:
            The size of all parts in bytes.

        Raises:
            OSError: The disk is full, or the file or its directory is gone.
        """
        size = self._writer.flush()
        if not self._writer.in_place():
            raise FileNotFoundError(2, "the file or its directory was removed")
        self.unflushed = 0
        self._context.written()
        limit = self._limits.part_limit
        old = self._limits.part_age_s and self._clock() - self._opened >= self._limits.part_age_s
        if (limit and size >= limit) or (old and self._writer.frames > len(self._context)):
            self._rotate()
        return size + sum(nbytes for _, nbytes in self._parts)

    def close(self, end: Mapping[str, str] | None = None, attachments: Mapping[str, bytes] | None = None) -> None:
        """Writes index and end."""
        self._writer.close({**(end or {}), "dropped_parts": str(self.dropped_parts)}, attachments)

    def abandon(self) -> None:
        """Leaves the newest part as it is, as `RecordingWriter.abandon` does."""
        self._writer.abandon()

    def reopen(self, about: Mapping[str, str] | None = None) -> None:
        """Continues in a new part after an error and `abandon`; ``about`` is added to the metadata.

        Raises:
            OSError: The disk is still full or gone.
        """
        self._about.update(about or {})
        self._continue()

    # -- inside ----------------------------------------------------------------------------------------------

    def _start_part(self, writer: RecordingWriter, number: int) -> None:
        """Writes the context first. Its frames count as written in the part before."""
        self._writer, self._number = writer, number
        self._opened = self._clock()
        for message, envelope in self._context.envelopes():
            writer.write_message(message, envelope)
        self._closed_frames -= writer.frames

    def _rotate(self) -> None:
        self._writer.close({"continued": "1", "dropped_parts": str(self.dropped_parts)})
        self._continue()
        self._enforce_cap()

    def _resume(self, left: Part) -> None:
        """Starts the part after the one that another recorder has left."""
        self._about["recording_id"] = left.metadata["recording_id"]
        self._number = left.number
        self._parts = [(part.path, part.path.stat().st_size) for part in _older_parts(left, self.path)]
        self.lost_before = left.lost
        self.dropped_parts = left.number + (left.path != self.path) - len(self._parts)
        self._start_part(self._next_writer(in_place=left.path == self.path), self._number + 1)
        self._enforce_cap()

    def _continue(self) -> None:
        """Starts the next part."""
        writer = self._next_writer(self._writer.in_place())
        self._closed_frames += self._writer.frames
        self._start_part(writer, self._number + 1)

    def _next_writer(self, in_place: bool) -> RecordingWriter:
        """Opens the next part; the old one keeps its name until then. ``in_place``: it still has it."""
        draft = next_part(self.path)
        draft.unlink(missing_ok=True)
        try:
            writer = RecordingWriter(draft, {**self._about, "part": str(self._number + 1)})
        except UsageError as error:
            raise OSError(0, error.message) from error
        try:
            self._free_name(in_place)
            writer.move(self.path)
        except OSError:
            writer.abandon()
            draft.unlink(missing_ok=True)
            raise
        return writer

    def _free_name(self, in_place: bool) -> None:
        """Gives the finished (or broken) part its number. It keeps its name, too, until the next part takes that."""
        if not in_place:
            if self.path.exists():
                raise FileExistsError(errno.EEXIST, "another file has taken the name")
            return
        older = older_part(self.path, self._number)
        nbytes = self.path.stat().st_size
        try:
            os.link(self.path, older)
        except OSError as error:  # not every file system has links
            if older.exists() and not older.samefile(self.path):
                raise FileExistsError(errno.EEXIST, f"{older.name} exists") from error
            self.path.rename(older)
        if (older, nbytes) not in self._parts:
            self._parts.append((older, nbytes))

    def _enforce_cap(self) -> None:
        """Removes the oldest parts until one more full part fits."""
        limits = self._limits
        while limits.max_bytes and sum(n for _, n in self._parts) + limits.part_limit > limits.max_bytes:
            if not self._parts:
                return
            oldest, _ = self._parts.pop(0)
            self.dropped_parts += 1
            with contextlib.suppress(OSError):  # it has been removed already
                oldest.unlink()


def _newest_part(path: Path, run_id: str) -> Part | None:
    """Returns what a recorder of this run has written last; None if it left nothing that is readable."""
    for file in [path, *reversed(parts_of(path))]:
        with contextlib.suppress(UsageError):
            part = Part(file)
            return part if part.metadata.get("run_id") == run_id and "recording_id" in part.metadata else None
    return None


def _older_parts(newest: Part, path: Path) -> Iterator[Part]:
    """Yields the parts of the same recording that have a number in their names, oldest first."""
    for file in parts_of(path):
        with contextlib.suppress(UsageError):
            part = Part(file)
            if part.metadata.get("recording_id") == newest.metadata["recording_id"]:
                yield part


def summary_of(step: Step) -> Step:
    """Returns the step without the stamps of its hooks. All figures are computed from spans and buckets, which stay."""
    return Step(**{name: getattr(step, name) for name in step.__struct_fields__ if not name.startswith("hook_")})
