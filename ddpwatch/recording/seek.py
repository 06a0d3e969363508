"""Seek targets: what a user types, and the position in the recording that it means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from ddpwatch.errors import UsageError

_TIME = re.compile(r"(?:(?:(\d{1,3}):)?(\d{1,3}):)?(\d{1,6}(?:\.\d{1,9})?)(s?)")
HINT = "a step (120) or a time from the start (1:30, 90s)"


@dataclass(frozen=True, slots=True)
class SeekTarget:
    """A step, or else so many seconds after the start of the recording.

    ``at_ns`` is when to look (receive time in ns since the Unix epoch) if the recording ends before that step.
    """

    step: int | None = None
    seconds: float = 0.0
    at_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """A moment (receive time in ns since the Unix epoch), and its step if the target was one."""

    at_ns: int
    step: int | None = None


class Searchable(Protocol):
    """What `locate` needs from a recording."""

    @property
    def span_ns(self) -> tuple[int, int]:
        """Finds a step, as `ddpwatch.recording.reader.Recording` does."""

    def find_step(self, number: int, back: bool = False) -> Position | None:
        """Finds a step, as `ddpwatch.recording.reader.Recording` does."""


def parse_target(text: str) -> SeekTarget:
    """Parses a step (``120``) or a time (``1:30``, ``1:02:03``, ``90s``, ``1.5s``).

    Raises:
        UsageError: The text is something else.
    """
    text = text.strip()
    if text.isdecimal() and len(text) <= 15:
        return SeekTarget(step=int(text))
    match = _TIME.fullmatch(text)
    if match is None or not (match[2] or match[4]):
        raise UsageError(f"{text!r} is neither a step nor a time", f"give {HINT}")
    return SeekTarget(seconds=3600 * int(match[1] or 0) + 60 * int(match[2] or 0) + float(match[3]))


def locate(recording: Searchable, target: SeekTarget) -> Position:
    """Finds the position of a target; for a step that was not recorded, that of the next one.

    Raises:
        UsageError: The target lies beyond the end of the recording.
    """
    if target.step is not None:
        found = recording.find_step(target.step)
        if found is None and target.at_ns is not None:
            return Position(target.at_ns)
        if found is None:
            raise UsageError(f"the recording ends before step {target.step}", f"give {HINT}")
        return found
    start_ns, end_ns = recording.span_ns
    at_ns = start_ns + int(target.seconds * 1e9)
    if at_ns > end_ns:
        raise UsageError(f"the recording is only {duration_text((end_ns - start_ns) / 1e9)} long", f"give {HINT}")
    return Position(at_ns)


def duration_text(seconds: float) -> str:
    """Formats as ``1:05``, or ``1:02:05`` from an hour on."""
    hours, rest = divmod(int(seconds), 3600)
    text = f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else text
