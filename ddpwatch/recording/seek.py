"""Places in a recording: what a user types, and the moment it stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from ddpwatch.errors import UsageError

_TIME = re.compile(r"(?:(?:(\d{1,3}):)?(\d{1,3}):)?(\d{1,6}(?:\.\d{1,9})?)(s?)")
HINT = "a step (120) or a time from the begin (1:30, 90s)"


@dataclass(frozen=True, slots=True)
class SeekTarget:
    """What was asked for: a step, or else so many seconds after the recording's begin."""

    step: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Position:
    """A moment (receive time in ns since the Unix epoch), and the step that it shows, if one was meant."""

    at_ns: int
    step: int | None = None


class Searchable(Protocol):
    """What `locate` needs of a recording."""

    @property
    def span_ns(self) -> tuple[int, int]:
        """See `ddpwatch.recording.reader.Recording`."""

    def find_step(self, number: int, back: bool = False) -> Position | None:
        """See `ddpwatch.recording.reader.Recording`."""


def parse_target(text: str) -> SeekTarget:
    """``120`` is a step; ``1:30``, ``1:02:03``, ``90s`` and ``1.5s`` are times.

    Raises:
        UsageError: It is something else.
    """
    text = text.strip()
    if text.isdecimal() and len(text) <= 15:
        return SeekTarget(step=int(text))
    match = _TIME.fullmatch(text)
    if match is None or not (match[2] or match[4]):
        raise UsageError(f"{text!r} is not a place in a recording", f"give {HINT}")
    return SeekTarget(seconds=3600 * int(match[1] or 0) + 60 * int(match[2] or 0) + float(match[3]))


def locate(recording: Searchable, spot: SeekTarget) -> Position:
    """The moment that is meant; of a step that is not there, the next one.

    Raises:
        UsageError: It lies beyond the recording's end.
    """
    if spot.step is not None:
        found = recording.find_step(spot.step)
        if found is None:
            raise UsageError(f"the recording ends before step {spot.step}", f"give {HINT}")
        return found
    begin_ns, end_ns = recording.span_ns
    at_ns = begin_ns + int(spot.seconds * 1e9)
    if at_ns > end_ns:
        raise UsageError(f"the recording is only {minutes((end_ns - begin_ns) / 1e9)} long", f"give {HINT}")
    return Position(at_ns)


def minutes(seconds: float) -> str:
    """``1:05``, or ``1:02:05`` from an hour on."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else text
