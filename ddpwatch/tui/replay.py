"""Plays a recording at any speed and from any place, forwards, backwards, over and over. Knows no screen.

To be at a moment means to have applied every frame up to it. Going forwards reads on. Going backwards, or far forwards,
begins anew from as far back as a viewer keeps anything, so that the figures are those of reading from the start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from queue import SimpleQueue
from typing import Protocol

from ddpwatch.errors import UsageError
from ddpwatch.messages import Step
from ddpwatch.recording.seek import Position, SeekTarget, locate
from ddpwatch.state import KEEP_STEPS
from ddpwatch.transport import Frame
from ddpwatch.tui.feed import (
    BATCH,
    POLL_S,
    Arrived,
    Attached,
    AttachFeed,
    FeedEvent,
    LiveFeed,
    Missed,
    Over,
    Rewound,
    ThreadFeed,
)
from ddpwatch.tui.models.overview import HISTORY_S
from ddpwatch.tui.session import ViewerSession

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SEARCH_NS = 30_000_000_000  # how much is searched backwards at first; then four times as much, and so on
SEARCH_STEPS, SEARCH_S = 256, 10.0  # what a verdict looks at


class Playable(Protocol):
    """What can be played; see `ddpwatch.recording.reader.Recording`, which can."""

    cut_tail: bool

    @property
    def span_ns(self) -> tuple[int, int]:
        """Receive time of the first and the last frame."""

    def seek(self, at_ns: int) -> Iterator[Frame]:
        """The frames received from then on, and what is needed to understand them."""

    def lead_in(self, at_ns: int, steps: int, seconds: float) -> int:
        """Where to begin so as to know so much of what came before a moment."""

    def find_step(self, number: int, back: bool = False) -> Position | None:
        """When a step, or else the next one (the one before), was complete."""


class FrameList:
    """Frames in memory as a film."""

    cut_tail = False

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames = list(frames)

    @property
    def span_ns(self) -> tuple[int, int]:
        """See `Playable`."""
        return (self._frames[0][1].received_ns, self._frames[-1][1].received_ns) if self._frames else (0, 0)

    def seek(self, at_ns: int) -> Iterator[Frame]:
        """See `Playable`. All frames: whoever plays them takes those before the moment at once."""
        return iter(self._frames)

    def lead_in(self, at_ns: int, steps: int, seconds: float) -> int:
        """See `Playable`."""
        return 0

    def find_step(self, number: int, back: bool = False) -> Position | None:
        """See `Playable`."""
        found = [(m.step, e.received_ns) for m, e in self._frames if isinstance(m, Step)]
        numbers = [n for n, _ in found if (n <= number if back else n >= number)]
        if not numbers:
            return None
        nearest = max(numbers) if back else min(numbers)
        return Position(max(at_ns for n, at_ns in found if n == nearest), nearest)


@dataclass(frozen=True)
class ReplayFeed:
    """A recording, at ``speed`` times the pace at which it was received, from ``start`` on; ``loop``: over and over."""

    name: str
    film: Playable
    speed: float = 1.0
    clock: Callable[[], float] = time.monotonic
    start: SeekTarget | None = None
    loop: bool = False


FeedSpec = AttachFeed | ReplayFeed


def open_feed(spec: FeedSpec, post: Callable[[FeedEvent], object]) -> LiveFeed | FileFeed:
    """The feed for what was asked for, not started yet."""
    return LiveFeed(spec, post) if isinstance(spec, AttachFeed) else FileFeed(spec, post)


class Pacer:
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
        self.now_ns = self._next[1].received_ns if self._next else 0

    def due(self, elapsed_s: float, limit: int = BATCH) -> list[Frame]:
        """Lets time pass and gives the frames due by now, at most ``limit``; the rest stays due."""
        self.now_ns += int(elapsed_s * self.speed * 1e9)
        return self._take(self.now_ns, limit)

    def until(self, at_ns: int, limit: int = BATCH) -> list[Frame]:
        """The next frames up to that moment, due or not; once there are none, the clock shows it."""
        batch = self._take(at_ns, limit)
        if not batch:
            self.now_ns = at_ns
        return batch

    def _take(self, due_ns: int, limit: int) -> list[Frame]:
        batch: list[Frame] = []
        while self._next is not None and len(batch) < limit and self._next[1].received_ns <= due_ns:
            batch.append(self._next)
            self.now_ns = max(self.now_ns, self._next[1].received_ns)
            self._next = next(self._frames, None)
        self.over = self._next is None
        return batch


Goal = Callable[[int], Position | None]  # from a moment to another place; None: there is none


class FileFeed(ThreadFeed):
    """Plays a recording. What the dashboard asks for is worked out on the feed's own thread.

    Attributes:
        paused: It stands still.
        speed: Recorded seconds per second.
        loop: After the end it begins anew.
        position_s, length_s: Where it is, and how long it is.
    """

    def __init__(self, spec: ReplayFeed, post: Callable[[FeedEvent], object]) -> None:
        super().__init__(post)
        self._spec = spec
        self._film = spec.film
        self._woken = threading.Event()
        self._goals: SimpleQueue[Goal] = SimpleQueue()
        self._pacer = Pacer(iter(()), spec.speed)
        self._begin_ns = self._end_ns = 0
        self._told = False
        self._at_moment = (-1, -1)  # where the last finding was shown, and when it began
        self.paused = False
        self.speed = spec.speed
        self.loop = spec.loop

    # -- called by the dashboard -----------------------------------------------------------------------------

    def stop(self) -> None:
        """See `Feed.stop`."""
        super().stop()
        self._woken.set()

    def pause(self, paused: bool) -> None:
        """Holds the recording, or lets it run again."""
        self.paused = paused
        self._woken.set()

    def faster(self, steps: int) -> None:
        """Goes up (or down) in `SPEEDS`, step by step."""
        others = [speed for speed in SPEEDS if (speed > self.speed if steps > 0 else speed < self.speed)]
        if others:
            self.speed = others[0] if steps > 0 else others[-1]

    def toggle_loop(self) -> None:
        """Over and over, or only once."""
        self.loop = not self.loop
        self._woken.set()

    def go_by(self, seconds: float) -> None:
        """Forwards or backwards in time, as far as there is any."""
        self._want(lambda here_ns: Position(here_ns + int(seconds * 1e9)))

    def go_to(self, spot: SeekTarget) -> None:
        """To a step or a time."""
        self._want(lambda _: locate(self._film, spot))

    def go_to_neighbour(self, step: int, by: int) -> None:
        """To the step after (before) that one."""
        self._want(lambda _: self._film.find_step(max(step + by, 0), back=by < 0))

    def go_to_finding(self, by: int, step: int | None) -> None:
        """To the next (previous) moment with something to see, seen from that step or else from here."""
        self._want(partial(self._finding, by, step))

    def jump_to_end(self) -> None:
        """Plays all that is left at once."""
        self._want(lambda _: Position(self._end_ns))
        self.pause(False)

    @property
    def position_s(self) -> float:
        """See the class."""
        return max(min(self._pacer.now_ns, self._end_ns) - self._begin_ns, 0) / 1e9

    @property
    def length_s(self) -> float:
        """See the class."""
        return (self._end_ns - self._begin_ns) / 1e9

    def _want(self, goal: Goal) -> None:
        self._goals.put(goal)
        self._woken.set()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._post(Attached(self._spec.name))
        self._begin_ns, self._end_ns = self._film.span_ns
        self._pacer = Pacer(self._film.seek(0), self.speed)
        if self._spec.start is not None:
            self.go_to(self._spec.start)
        before = self._spec.clock()
        while not self._stopped.is_set():
            now = self._spec.clock()
            elapsed, before = now - before, now
            self._pacer.speed = self.speed
            if not self._goals.empty():
                self._go()
            elif self._pacer.over:
                self._end()
            else:
                self._post_frames(self._due(elapsed))

    def _due(self, elapsed_s: float) -> list[Frame]:
        frames = self._pacer.due(0.0 if self.paused else elapsed_s)
        if not frames:
            self._wait(POLL_S if self.paused else POLL_S / 2)
        return frames

    def _wait(self, seconds: float | None) -> None:
        self._woken.wait(seconds)
        self._woken.clear()

    def _end(self) -> None:
        """Begins anew, or says once that there is no more and waits for what is wanted next."""
        if self.loop and self._end_ns > self._begin_ns and not self.paused:
            self._move(Position(self._begin_ns))
            return
        if not self._told:
            self._told = True
            self._post(Over("the recording was cut off here" if self._film.cut_tail else ""))
        self._wait(None)

    def _go(self) -> None:
        """To where all that was asked for meanwhile leads."""
        target, here_ns = None, self._pacer.now_ns
        while not self._goals.empty():
            try:
                place = self._goals.get()(here_ns)
            except UsageError as error:
                self._post(Missed(f"{error.message}: {error.hint}"))
                continue
            if place is None:
                self._post(Missed("there is none"))
            else:
                here_ns = min(max(place.at_ns, self._begin_ns), self._end_ns)
                target = Position(here_ns, place.step)
        if target is not None:
            self._move(target)

    def _move(self, place: Position) -> None:
        since_ns = self._film.lead_in(place.at_ns, KEEP_STEPS, HISTORY_S)
        if place.at_ns < self._pacer.now_ns or since_ns > self._pacer.now_ns:
            self._post(Rewound())
            self._pacer = Pacer(self._film.seek(since_ns), self.speed)
            self._told = False
        while not self._stopped.is_set() and (frames := self._pacer.until(place.at_ns)):
            self._post_frames(frames)
        self._post(Arrived(place.step))

    # -- findings --------------------------------------------------------------------------------------------

    def _finding(self, by: int, step: int | None, here_ns: int) -> Position | None:
        """Both directions leave out the finding that is shown now."""
        shown = self._film.find_step(step) if step is not None else None
        here_ns = shown.at_ns if shown is not None else here_ns
        here_ns = self._at_moment[1] if self._at_moment[0] == here_ns else here_ns
        found = self._next_finding(here_ns) if by > 0 else self._finding_before(here_ns)
        if found is None:
            return None
        seen = self._film.find_step(found.step) if found.step is not None else None
        place = Position(max(found.at_ns, seen.at_ns) if seen is not None else found.at_ns, found.step)
        self._at_moment = (place.at_ns, found.at_ns)
        return place

    def _next_finding(self, here_ns: int) -> Position | None:
        return next(self._search(here_ns, self._end_ns), None)

    def _finding_before(self, here_ns: int) -> Position | None:
        high_ns, reach_ns = here_ns, SEARCH_NS
        while high_ns > self._begin_ns:
            low_ns = max(high_ns - reach_ns, self._begin_ns - 1)
            found = list(self._search(low_ns, high_ns - 1))
            if found:
                return found[-1]
            high_ns, reach_ns = low_ns + 1, 4 * reach_ns
            if low_ns < self._begin_ns:
                break
        return None

    def _search(self, after_ns: int, until_ns: int) -> Iterator[Position]:
        """The moments with something to see, after the first and up to the second moment."""
        frames = self._film.seek(self._film.lead_in(after_ns, SEARCH_STEPS, SEARCH_S))
        wanted = takewhile(lambda _: not self._stopped.is_set(), frames)
        return (place for place in remarkable(wanted, until_ns) if place.at_ns > after_ns)


def remarkable(frames: Iterable[Frame], until_ns: int) -> Iterator[Position]:
    """The moments up to one at which something begins to stand out: what the log warns of, and slow steps."""
    session, slow = ViewerSession(replay=True), set[int]()
    for message, envelope in frames:
        if envelope.received_ns > until_ns:
            return
        told = session.log.count
        session.apply([(message, envelope)])
        for event in session.log.newest(session.log.count - told):
            if event.severity in ("warn", "bad"):
                yield Position(envelope.received_ns, event.step)
        if isinstance(message, Step) and message.step not in slow and session.is_slow(message.step):
            slow.add(message.step)
            yield Position(envelope.received_ns, message.step)
