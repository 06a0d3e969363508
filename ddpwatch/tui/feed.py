"""Where the dashboard's frames come from: a thread that reads a source and posts events. Knows no screen.

Live and replay post the same events. At most `IN_FLIGHT` batches wait for the dashboard at any time, so neither
a long recording nor a busy terminal makes memory grow.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from ddpwatch import rundir
from ddpwatch.errors import UsageError
from ddpwatch.messages import Bye, Message
from ddpwatch.recording.reader import Recording
from ddpwatch.rundir import RunInfo
from ddpwatch.sources import LiveSource, Source
from ddpwatch.transport import Envelope

Frame = tuple[Message, Envelope]

POLL_S = 0.1
LOOK_S = 0.5
BATCH = 400  # frames: some 10 ms of work, so that a key is never kept waiting for longer
IN_FLIGHT = 4
OUTPUT_BYTES = 65_536
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


# -- what is asked for ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttachFeed:
    """A live run: the one given, or an endpoint, or else the newest, then whichever begins after it has ended.

    ``open_source``, ``list_runs`` and ``where`` are there to be replaced in tests.

    Attributes:
        output: The file that the job's output goes to, if it was started by us.
        list_ended: Small recordings that ended runs have left, newest first: the newest is shown until a run begins.
    """

    run: RunInfo | None = None
    endpoint: str | None = None
    output: Path | None = None
    list_ended: Callable[[], list[Path]] = list
    open_source: Callable[[str], Source] = LiveSource
    list_runs: Callable[[], list[RunInfo]] = rundir.live_runs
    where: Callable[[], object] = rundir.directory


@dataclass(frozen=True)
class ReplayFeed:
    """A recording, at ``speed`` times the pace at which it was received."""

    path: str | os.PathLike[str]
    frames: Iterator[Frame]
    speed: float = 1.0
    clock: Callable[[], float] = time.monotonic


FeedSpec = AttachFeed | ReplayFeed


# -- what is posted ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no run yet."""

    directory: str


@dataclass(frozen=True, slots=True)
class Attached:
    """Frames of a run follow; what was known of another is void.

    Attributes:
        several: There are several live runs to choose from.
        ended_s: When the run ended (seconds since the Unix epoch), if these are the frames that it has left.
    """

    name: str
    several: bool = False
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Frames:
    """The next frames. The receiver calls `Feed.taken` once it has applied them."""

    frames: list[Frame]


@dataclass(frozen=True, slots=True)
class Output:
    """Lines that the job has printed."""

    lines: list[str]


@dataclass(frozen=True, slots=True)
class Over:
    """No frame will come any more."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The feed broke."""

    error: Exception


Event = Waiting | Attached | Frames | Output | Over | Failed


class Feed(Protocol):
    """A running feed. All methods may be called from the dashboard's thread and return at once."""

    def start(self) -> None:
        """Begins to post."""

    def stop(self) -> None:
        """Lets the thread end by itself; it takes at most one poll."""

    def taken(self) -> None:
        """One batch was applied."""


def open_feed(spec: FeedSpec, post: Callable[[Event], object]) -> LiveFeed | FileFeed:
    """The feed for what was asked for, not started yet."""
    return LiveFeed(spec, post) if isinstance(spec, AttachFeed) else FileFeed(spec, post)


class _ThreadFeed:
    """What both kinds share: the thread, its end, and the bound on batches that wait."""

    def __init__(self, post: Callable[[Event], object]) -> None:
        self._post_event = post
        self._stopped = threading.Event()
        self._slots = threading.Semaphore(IN_FLIGHT)
        self._thread = threading.Thread(target=self._guarded, name="ddpwatch-feed", daemon=True)

    def start(self) -> None:
        """See `Feed.start`."""
        self._thread.start()

    def stop(self) -> None:
        """See `Feed.stop`."""
        self._stopped.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, if it was started."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def taken(self) -> None:
        """See `Feed.taken`."""
        self._slots.release()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._post(Failed(error))

    def _run(self) -> None:
        raise NotImplementedError

    def _post(self, event: Event) -> None:
        if not self._stopped.is_set():
            self._post_event(event)

    def _post_frames(self, frames: list[Frame]) -> None:
        while frames and not self._stopped.is_set():
            if self._slots.acquire(timeout=POLL_S):
                self._post(Frames(frames))
                return


class Tail:
    """The whole lines that are added to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[str]:
        """What came since the last call, at most `OUTPUT_BYTES` of it."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read(OUTPUT_BYTES)
        except OSError:
            return []
        whole, newline, _ = block.rpartition(b"\n")
        if not newline and len(block) < OUTPUT_BYTES:
            return []
        self._offset += len(whole) + len(newline) if newline else len(block)
        return (whole if newline else block).decode("utf-8", "replace").splitlines()


class LiveFeed(_ThreadFeed):
    """Attaches, reads, and attaches again."""

    def __init__(self, spec: AttachFeed, post: Callable[[Event], object]) -> None:
        super().__init__(post)
        self._spec = spec
        self._wanted: RunInfo | Path | None = spec.run
        self._looked_back = False
        self._tail = Tail(spec.output) if spec.output is not None else None
        self._follows_new = spec.run is None and spec.endpoint is None
        self._seen: set[str] = set()  # runs that had begun when one was attached to: none of them is new

    def choose(self, run: RunInfo | Path) -> None:
        """Leaves the present run for this one, or for what one has left."""
        self._wanted = run

    def ended(self) -> list[Path]:
        """What ended runs have left, newest first."""
        return self._spec.list_ended()

    def runs(self) -> list[RunInfo]:
        """The runs that can be chosen, newest first."""
        return self._spec.list_runs()

    def _run(self) -> None:
        if self._spec.endpoint is not None:
            self._read(self._spec.endpoint, self._spec.endpoint, None)
        while not self._stopped.is_set():
            run = self._next_run()
            if isinstance(run, Path):
                self._look_back(run)
            elif run is not None:
                self._read(run.publish, run.run_id, run)

    def _next_run(self) -> RunInfo | Path | None:
        """The chosen run, or the newest, or what the last one has left; waits a moment if there is none."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            return wanted
        runs = [run for run in self._spec.list_runs() if run.run_id not in self._seen]
        if runs:
            return runs[0]
        self._post(Waiting(str(self._spec.where())))
        if not self._looked_back and self._follows_new:
            self._looked_back = True
            return next(iter(self._spec.list_ended()), None)
        self._stopped.wait(LOOK_S)
        return None

    def _look_back(self, path: Path) -> None:
        """Shows what a run has left, until another begins or is chosen."""
        try:
            frames, ended_s = iter(Recording(path)), path.stat().st_mtime
        except (UsageError, OSError):
            return  # cleaned up meanwhile
        self._post(Attached(path.stem, ended_s=ended_s))
        while not self._stopped.is_set() and (batch := list(islice(frames, BATCH))):
            self._post_frames(batch)
        self._post(Over())
        self._wait_for_another()

    def _read(self, endpoint: str, name: str, run: RunInfo | None) -> None:
        several = self._follows_new and not self._seen and len(self._spec.list_runs()) > 1
        self._seen |= {name, *(other.run_id for other in self._spec.list_runs())}
        source = self._spec.open_source(endpoint)
        try:
            self._post(Attached(name, several))
            if self._read_until_end(source, run):
                self._post(Over())
        finally:
            source.close()
        self._wait_for_another()

    def _read_until_end(self, source: Source, run: RunInfo | None) -> bool:
        """Posts frames until the run says goodbye (then True), another run is wanted, or its collector is gone."""
        look = time.monotonic() + LOOK_S
        while not self._stopped.is_set() and self._wanted is None:
            frames = source.read(POLL_S, BATCH)
            self._post_frames(frames)
            if self._tail is not None and (lines := self._tail.lines()):
                self._post(Output(lines))
            if any(isinstance(message, Bye) and message.rank is None for message, _ in frames) or source.over:
                return True
            if not frames and run is not None and time.monotonic() > look:
                look = time.monotonic() + LOOK_S
                if self._has_successor(run):
                    return False
        return False

    def _has_successor(self, run: RunInfo) -> bool:
        """Whether this run's collector is gone without a word while another run has begun."""
        runs = {other.run_id for other in self._spec.list_runs()} if self._follows_new else set()
        return run.run_id not in runs and bool(runs - self._seen)

    def _wait_for_another(self) -> None:
        """Keeps quiet until a run is chosen or, unless one was asked for by name, a new one begins."""
        while not self._stopped.is_set() and self._wanted is None:
            if self._follows_new and any(run.run_id not in self._seen for run in self._spec.list_runs()):
                return
            self._stopped.wait(LOOK_S)


class Pacer:
    """Hands out frames when they are due: their receive times against a clock that runs at ``speed``.

    Attributes:
        speed: Recorded seconds per second.
        over: Every frame was handed out.
        position_ns: Recorded time reached, since the first frame.
    """

    def __init__(self, frames: Iterator[Frame], speed: float) -> None:
        self._frames = iter(frames)
        self._next = next(self._frames, None)
        self._first_ns = self._next[1].received_ns if self._next else 0
        self.speed = speed
        self.over = self._next is None
        self.position_ns = 0

    def due(self, elapsed_s: float, limit: int = BATCH) -> list[Frame]:
        """Lets time pass and gives the frames due by now, at most ``limit``; the rest stays due."""
        self.position_ns += int(elapsed_s * self.speed * 1e9)
        return self._until(self._first_ns + self.position_ns, limit)

    def rest(self, limit: int = BATCH) -> list[Frame]:
        """The next frames, due or not."""
        return self._until(None, limit)

    def _until(self, due_ns: int | None, limit: int) -> list[Frame]:
        batch: list[Frame] = []
        while self._next is not None and len(batch) < limit:
            received_ns = self._next[1].received_ns
            if due_ns is not None and received_ns > due_ns:
                break
            batch.append(self._next)
            self.position_ns = max(self.position_ns, received_ns - self._first_ns)
            self._next = next(self._frames, None)
        self.over = self._next is None
        return batch


class FileFeed(_ThreadFeed):
    """Plays a recording."""

    def __init__(self, spec: ReplayFeed, post: Callable[[Event], object]) -> None:
        super().__init__(post)
        self._spec = spec
        self._woken = threading.Event()
        self._to_end = False
        self.paused = False
        self.speed = spec.speed

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

    def jump_to_end(self) -> None:
        """Plays all that is left at once."""
        self._to_end = True
        self.pause(False)

    def _run(self) -> None:
        self._post(Attached(Path(self._spec.path).name))
        pacer = Pacer(self._spec.frames, self.speed)
        before = self._spec.clock()
        while not pacer.over and not self._stopped.is_set():
            now = self._spec.clock()
            elapsed, before = now - before, now
            pacer.speed = self.speed
            self._post_frames(self._due(pacer, elapsed))
        self._post(Over())

    def _due(self, pacer: Pacer, elapsed_s: float) -> list[Frame]:
        if self._to_end:
            return pacer.rest()
        frames = pacer.due(0.0 if self.paused else elapsed_s)
        if not frames:
            self._woken.wait(POLL_S if self.paused else POLL_S / 2)
            self._woken.clear()
        return frames
