"""A recording in parts: a new file by size or age, and a cap on all of them together.

The newest part always has the name that was asked for; when it is full it is renamed to ``NAME.0000.mcap``,
``NAME.0001.mcap`` and so on. Every part begins with the frames needed to understand it (who the ranks are, how
buckets are laid out), so that it can be read alone; a reader of several parts skips them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.messages import Bye, Hello, Layout, Message, Step, encode
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.transport import Envelope

SMALLEST_CAP = 1 << 20
PARTS_WITHIN_CAP = 8
DEFAULT_PART_AGE_S = 86_400.0
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a recording may become. 0 is no limit.

    Attributes:
        max_bytes: All parts together; the oldest go.
        part_bytes: One part; an eighth of ``max_bytes`` where only that is given.
        part_age_s: Age at which a part is closed, in seconds.
        every: Steps whose number is a multiple of it keep every hook's stamp; the others only spans and buckets, so
            that all figures stay exact.
    """

    max_bytes: int = 0
    part_bytes: int = 0
    part_age_s: float = DEFAULT_PART_AGE_S
    every: int = 1

    @property
    def part_limit(self) -> int:
        """Size at which a part is closed, in bytes."""
        return self.part_bytes or self.max_bytes // PARTS_WITHIN_CAP


def parse_bytes(text: str) -> int:
    """``500MB``, ``2G``, ``1.5 GiB``: bytes, in powers of 1024.

    Raises:
        UsageError: It is something else, or too small to hold anything.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if nbytes < SMALLEST_CAP:
        raise UsageError(f"{text!r} is not a size of at least 1 MiB", "give e.g. 500MB or 20GB")
    return nbytes


def limits_from_environment(environment: Mapping[str, str]) -> Limits:
    """``DDPWATCH_RECORD_MAX_SIZE``, ``_PART_SIZE``, ``_PART_AGE`` (s) and ``_EVERY``: for recorders started by a job.

    Raises:
        UsageError: One of them is not understood.
    """

    def number(name: str, default: float) -> float:
        text = environment.get(f"DDPWATCH_RECORD_{name}", "")
        try:
            return float(text) if text else default
        except ValueError:
            raise UsageError(f"DDPWATCH_RECORD_{name}={text!r} is not a number", "unset it, or give a number") from None

    def size(name: str) -> int:
        text = environment.get(f"DDPWATCH_RECORD_{name}", "")
        return parse_bytes(text) if text else 0

    return Limits(
        size("MAX_SIZE"), size("PART_SIZE"), number("PART_AGE", DEFAULT_PART_AGE_S), max(1, int(number("EVERY", 1)))
    )


def environment_of(max_size: str | None, every: int) -> dict[str, str]:
    """The options of a command line as `limits_from_environment` takes them.

    Raises:
        UsageError: The size is not understood.
    """
    found = {} if every == 1 else {"DDPWATCH_RECORD_EVERY": str(every)}
    return found if max_size is None else {**found, "DDPWATCH_RECORD_MAX_SIZE": str(parse_bytes(max_size))}


class Introductions:
    """What a part has to begin with to be understood: who the ranks are, how buckets are laid out, who has ended.

    Attributes:
        newest_ns: Receive time of the newest frame (ns since the Unix epoch).
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Message] = {}
        self.newest_ns = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._kept.values())

    def apply(self, message: Message, received_ns: int) -> None:
        """Takes one message, whether it gets to the disk or not."""
        self.newest_ns = received_ns
        if isinstance(message, Hello):
            self._kept["hello", message.rank] = message
            self._kept.pop(("bye", message.rank), None)
        elif isinstance(message, Layout):
            self._kept["layout", message.rank, message.module, message.epoch] = message
            self._kept.pop(("layout", message.rank, message.module, message.epoch - 4), None)
        elif isinstance(message, Bye) and message.rank is not None:
            self._kept["bye", message.rank] = message


class RotatingWriter:
    """Like `RecordingWriter`, within limits.

    Args:
        path: Of the newest part.
        about: Free text about the run, kept as the metadata of every part.
        limits: Of the size.
        clock: Seconds.
        introductions: What went by before the file could be created; it begins with them.

    Attributes:
        frames: Frames written so far, over all parts.
        dropped_parts: How many of the oldest parts were removed to stay within the cap.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        about: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        introductions: Introductions | None = None,
    ) -> None:
        self.path = Path(path)
        self.dropped_parts = 0
        self._limits = limits or Limits()
        self._clock = clock
        self._about = {"recording_id": secrets.token_hex(8), **(about or {})}
        self._introductions = Introductions() if introductions is None else introductions
        self._closed_frames = 0
        self._parts: list[tuple[Path, int]] = []
        self._begin(RecordingWriter(self.path, {**self._about, "part": "0"}), 0)

    @property
    def frames(self) -> int:
        """See the class."""
        return self._closed_frames + self._writer.frames

    def write_message(self, message: Message, envelope: Envelope) -> None:
        """Adds one frame. May raise OSError."""
        self._introductions.apply(message, envelope.received_ns)
        if isinstance(message, Step) and message.step % self._limits.every:
            envelope = Envelope(envelope.seq, envelope.received_ns, encode(summary_of(message)))
        self._writer.write_message(message, envelope)

    def flush(self) -> int:
        """Hands everything to the operating system, begins a new part if it is time; returns the size of all parts.

        Raises:
            OSError: The disk is full, or the file or its directory is gone.
        """
        size = self._writer.flush()
        if not self._writer.in_place():
            raise FileNotFoundError(2, "the file or its directory was removed")
        limit = self._limits.part_limit
        old = self._limits.part_age_s and self._clock() - self._opened >= self._limits.part_age_s
        if (limit and size >= limit) or (old and self._writer.frames > len(self._introductions)):
            self._rotate()
        return size + sum(nbytes for _, nbytes in self._parts)

    def close(self, end: Mapping[str, str] | None = None, attachments: Mapping[str, bytes] | None = None) -> None:
        """Writes index and end."""
        self._writer.close({**(end or {}), "dropped_parts": str(self.dropped_parts)}, attachments)

    def abandon(self) -> None:
        """See `RecordingWriter.abandon`."""
        self._writer.abandon()

    def reopen(self, about: Mapping[str, str] | None = None) -> None:
        """Goes on in a new part, after an error and `abandon`; ``about`` is added to the metadata.

        Raises:
            OSError: The disk is still full or gone.
        """
        self._about.update(about or {})
        self._continue()

    # -- inside ----------------------------------------------------------------------------------------------

    def _begin(self, writer: RecordingWriter, number: int) -> None:
        """Writes what is needed to understand the part. That counts as written in the part before."""
        self._writer, self._number = writer, number
        self._opened = self._clock()
        for message in self._introductions:
            writer.write_message(message, Envelope(0, self._introductions.newest_ns, encode(message)))
        self._closed_frames -= writer.frames

    def _rotate(self) -> None:
        self._writer.close({"continued": "1", "dropped_parts": str(self.dropped_parts)})
        self._continue()
        self._keep_cap()

    def _continue(self) -> None:
        """Begins the next part; the old one keeps its name until that is there."""
        draft = self.path.with_name(f"{self.path.name}.next")
        try:
            writer = RecordingWriter(draft, {**self._about, "part": str(self._number + 1)})
        except UsageError as error:
            raise OSError(0, error.message) from error
        self._closed_frames += self._writer.frames
        if self._writer.in_place():
            self._set_aside()
        writer.move(self.path)
        self._begin(writer, self._number + 1)

    def _set_aside(self) -> None:
        """Gives the finished (or broken) part its number. It keeps its name, too, until the next part takes that."""
        older = self.path.with_name(f"{self.path.stem}.{self._number:04d}{self.path.suffix}")
        nbytes = self.path.stat().st_size
        try:
            os.link(self.path, older)
        except OSError:  # not every file system has links
            self.path.rename(older)
        if (older, nbytes) not in self._parts:
            self._parts.append((older, nbytes))

    def _keep_cap(self) -> None:
        """Removes the oldest parts until one more full part fits."""
        limits = self._limits
        while limits.max_bytes and sum(n for _, n in self._parts) + limits.part_limit > limits.max_bytes:
            if not self._parts:
                return
            oldest, _ = self._parts.pop(0)
            self.dropped_parts += 1
            with contextlib.suppress(OSError):  # somebody else has removed it
                oldest.unlink()


def summary_of(step: Step) -> Step:
    """The step without its hooks' stamps. Spans and buckets stay: every figure is worked out from them."""
    return Step(**{name: getattr(step, name) for name in step.__struct_fields__ if not name.startswith("hook_")})
