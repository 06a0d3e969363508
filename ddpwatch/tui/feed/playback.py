"""What can be played, and the clock that hands out its frames when they are due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from ddpwatch.recording.seek import Position
from ddpwatch.recording.selection import Selection
from ddpwatch.tui.feed.events import BATCH
from ddpwatch.wire.messages import Step
from ddpwatch.wire.transport import Frame


class Playable(Protocol):
    """A recording as `ReplayFeed` needs it; `ddpwatch.recording.reader.Recording` is one."""

    @property
    def left_out(self) -> Sequence[str]:
        """What could not be read, a sentence each, once it was read to its end."""

    @property
    def span_ns(self) -> tuple[int, int]:
        """Receive time of the first and the last frame."""

    @property
    def world_size(self) -> int:
        """How many ranks the run has; 0 if that is not known."""

    def select(self, selection: Selection) -> Iterator[Frame]:
        """Yields the selected frames, and those needed to understand them."""

    def lead_in(self, at_ns: int, steps: int, seconds: float) -> Selection:
        """Selects what to read, so that this many steps and seconds before ``at_ns`` are known."""

    def find_step(self, number: int, back: bool = False) -> Position | None:
        """Returns when that step was complete, or else the next one (``back``: the one before)."""


class FrameList:
    """A recording held in memory."""

    left_out = ()
    world_size = 0

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames = list(frames)

    @property
    def span_ns(self) -> tuple[int, int]:
        """See `Playable`."""
        return (self._frames[0][1].received_ns, self._frames[-1][1].received_ns) if self._frames else (0, 0)

    def select(self, selection: Selection) -> Iterator[Frame]:
        """Gives all frames; the player takes those before a position at once."""
        return iter(self._frames)

    def lead_in(self, at_ns: int, steps: int, seconds: float) -> Selection:
        return Selection()

    def find_step(self, number: int, back: bool = False) -> Position | None:
        steps = [(m.step, e.received_ns) for m, e in self._frames if isinstance(m, Step)]
        numbers = [n for n, _ in steps if (n <= number if back else n >= number)]
        if not numbers:
            return None
        nearest = max(numbers) if back else min(numbers)
        return Position(max(at_ns for n, at_ns in steps if n == nearest), nearest)


class PlaybackClock:
    """Hands out frames when they are due: their receive times against a clock that runs at ``speed``.

    Attributes:
        speed: Recorded seconds per second.
        over: Every frame was handed out.
        now_ns: Recorded time reached.
    """

    def __init__(self, frames: Iterator[Frame], speed: float) -> None:
        self._frames = iter(frames)
        self._next = next(self._frames, None)
        self.speed = speed
        self.over = self._next is None
        self.now_ns = self._newest_ns = self._next[1].received_ns if self._next else 0  # newest: of the frames given

    def due(self, elapsed_s: float, limit: int = BATCH) -> list[Frame]:
        """Advances the clock, at most to the last frame; gives the frames due by now, ``limit`` at most."""
        self.now_ns += int(elapsed_s * self.speed * 1e9)
        batch = self._take_frames(self.now_ns, limit)
        if self.over:
            self.now_ns = self._newest_ns
        return batch

    def until(self, at_ns: int, limit: int = BATCH) -> list[Frame]:
        """Returns the next frames up to that time, due or not. Once none is left, the clock is at that time."""
        batch = self._take_frames(at_ns, limit)
        if not batch:
            self.now_ns = at_ns
        return batch

    def _take_frames(self, due_ns: int, limit: int) -> list[Frame]:
        batch: list[Frame] = []
        while self._next is not None and len(batch) < limit and self._next[1].received_ns <= due_ns:
            batch.append(self._next)
            self._newest_ns = max(self._newest_ns, self._next[1].received_ns)
            self.now_ns = max(self.now_ns, self._newest_ns)
            self._next = next(self._frames, None)
        self.over = self._next is None
        return batch
