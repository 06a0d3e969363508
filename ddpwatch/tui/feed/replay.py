"""Plays a recording at any speed and from any position, forwards, backwards, in a loop.

To be at a position means to have applied every frame up to it. Going forwards reads on. Going backwards, or far
forwards, starts again from as far back as a viewer keeps anything, so that the figures are those of reading the
recording from its start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from ddpwatch.analysis.kept_steps import KEPT
from ddpwatch.errors import UsageError
from ddpwatch.recording.seek import Position, SeekTarget, locate
from ddpwatch.recording.selection import Selection
from ddpwatch.tui.feed.events import Arrived, Attached, FeedEvent, Missed, Over, Rewound
from ddpwatch.tui.feed.playback import Playable, PlaybackClock
from ddpwatch.tui.feed.thread import POLL_S, ThreadFeed
from ddpwatch.tui.models.devices import HISTORY_S
from ddpwatch.wire.transport import Frame

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class ReplaySpec:
    """A recording to play, from ``start`` on. ``speed`` is in recorded seconds per second."""

    name: str
    recording: Playable
    speed: float = 1.0
    clock: Callable[[], float] = time.monotonic
    start: SeekTarget | None = None
    loop: bool = False


Seek = Callable[[int], Position | None]  # from the present time (ns) to a position; None if there is none


class ReplayFeed(ThreadFeed):
    """Plays a recording. The feed's own thread looks up the positions that the dashboard asks for.

    Attributes:
        paused: The playback clock does not advance.
        speed: Recorded seconds per second.
        loop: Whether it starts again after the end.
        position_s, length_s: The present position, and the recording's length.
    """

    def __init__(self, spec: ReplaySpec, post: Callable[[FeedEvent], object]) -> None:
        super().__init__(post)
        self._spec = spec
        self._recording = spec.recording
        self._woken = threading.Event()
        self._seeks: SimpleQueue[Seek] = SimpleQueue()
        self._playback = PlaybackClock(iter(()), spec.speed)
        self._start_ns = self._end_ns = 0
        self._end_posted = False
        self.paused = False
        self.speed = spec.speed
        self.loop = spec.loop

    # -- called by the dashboard -----------------------------------------------------------------------------

    def stop(self) -> None:
        super().stop()
        self._woken.set()

    def pause(self, paused: bool) -> None:
        """Holds the playback, or resumes it."""
        self.paused = paused
        self._woken.set()

    def change_speed(self, steps: int) -> None:
        """Goes up (or down) in `SPEEDS`, step by step."""
        others = [speed for speed in SPEEDS if (speed > self.speed if steps > 0 else speed < self.speed)]
        if others:
            self.speed = others[0] if steps > 0 else others[-1]

    def toggle_loop(self) -> None:
        """Turns the loop on or off."""
        self.loop = not self.loop
        self._woken.set()

    def go_by(self, seconds: float) -> None:
        """Goes forwards or backwards in time, at most to an end of the recording."""
        self._ask(lambda now_ns: Position(now_ns + int(seconds * 1e9)))

    def go_to(self, target: SeekTarget) -> None:
        """Goes to a step or a time."""
        self._ask(lambda _: locate(self._recording, target))

    def go_to_neighbour(self, step: int, by: int) -> None:
        """Goes to the step after (before) that one."""
        self._ask(lambda _: self._recording.find_step(max(step + by, 0), back=by < 0))

    def play_to_end(self) -> None:
        """Plays all that is left at once."""
        self._ask(lambda _: Position(self._end_ns))
        self.pause(False)

    @property
    def position_ns(self) -> int:
        """The present position as a receive time (ns since the Unix epoch)."""
        return max(min(self._playback.now_ns, self._end_ns), self._start_ns)

    @property
    def position_s(self) -> float:
        """See the class."""
        return (self.position_ns - self._start_ns) / 1e9

    @property
    def length_s(self) -> float:
        """See the class."""
        return (self._end_ns - self._start_ns) / 1e9

    def order_stacks(self, order: object) -> None:
        """Does nothing: a recording has what was sampled then."""

    def _ask(self, seek: Seek) -> None:
        self._seeks.put(seek)
        self._woken.set()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._post(Attached(self._spec.name))
        self._start_ns, self._end_ns = self._recording.span_ns
        self._playback = PlaybackClock(self._recording.select(Selection()), self.speed)
        if self._spec.start is not None:
            self.go_to(self._spec.start)
        before = self._spec.clock()
        while not self._stopped.is_set():
            now = self._spec.clock()
            elapsed, before = now - before, now
            self._playback.speed = self.speed
            if not self._seeks.empty():
                self._go()
            elif self._playback.over:
                self._end()
            else:
                self._post_frames(self._due(elapsed))

    def _due(self, elapsed_s: float) -> list[Frame]:
        frames = self._playback.due(0.0 if self.paused else elapsed_s)
        if not frames:
            self._wait(POLL_S if self.paused else POLL_S / 2)
        return frames

    def _wait(self, seconds: float | None) -> None:
        self._woken.wait(seconds)
        self._woken.clear()

    def _end(self) -> None:
        """Starts again, or posts the end once and waits for the next request."""
        if self.loop and self._end_ns > self._start_ns and not self.paused:
            self._move(Position(self._start_ns))
            return
        if not self._end_posted:
            self._end_posted = True
            self._post(Over("; ".join(self._recording.left_out)))
        self._wait(None)

    def _go(self) -> None:
        """Adds up all requests that have come meanwhile, and goes where they lead."""
        goal, now_ns = None, self._playback.now_ns
        while not self._seeks.empty():
            try:
                position = self._seeks.get()(now_ns)
            except UsageError as error:
                self._post(Missed(f"{error.message}: {error.hint}"))
                continue
            if position is None:
                self._post(Missed("none found"))
            else:
                now_ns = min(max(position.at_ns, self._start_ns), self._end_ns)
                goal = Position(now_ns, position.step)
        if goal is not None:
            self._move(goal)

    def _move(self, position: Position) -> None:
        lead_in = self._recording.lead_in(position.at_ns, KEPT.of(self._recording.world_size), HISTORY_S)
        if position.at_ns < self._playback.now_ns or lead_in.steps_from_ns > self._playback.now_ns:
            self._post(Rewound())
            self._playback = PlaybackClock(self._recording.select(lead_in), self.speed)
            self._end_posted = False
        while not self._stopped.is_set() and (frames := self._playback.until(position.at_ns)):
            self._post_frames(frames)
        self._post(Arrived(position.step))
