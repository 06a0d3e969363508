"""Where the dashboard's frames come from: a thread that reads a source and posts events. Knows no screen.

Live and replay post the same events. At most `IN_FLIGHT` batches wait for the dashboard at any time, so neither
a long recording nor a busy terminal makes memory grow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from ddpwatch import rundir
from ddpwatch.errors import UsageError
from ddpwatch.messages import Bye
from ddpwatch.recording.reader import Recording
from ddpwatch.rundir import RunInfo
from ddpwatch.sources import LiveSource, Source
from ddpwatch.transport import Frame
from ddpwatch.tui.job_output import OutputTail

POLL_S = 0.1
LOOK_S = 0.5
BATCH = 400  # frames: some 10 ms of work, so that a key is never kept waiting for longer
IN_FLIGHT = 4


# -- what is asked for ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttachFeed:
    """A live run: the one given, or an endpoint, or else the newest, then whichever begins after it has ended.

    ``open_source``, ``list_runs`` and ``where`` are there to be replaced in tests.

    Attributes:
        job: The command line of the job, if it was started by us.
        output: The file that its output goes to.
        list_ended: Small recordings that ended runs have left, newest first: the newest is shown until a run begins.
    """

    run: RunInfo | None = None
    endpoint: str | None = None
    job: str = ""
    output: Path | None = None
    list_ended: Callable[[], list[Path]] = list
    open_source: Callable[[str], Source] = LiveSource
    list_runs: Callable[[], list[RunInfo]] = rundir.live_runs
    where: Callable[[], object] = rundir.directory


# -- what is posted ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no run yet. ``job`` is the command that is expected to begin one, if we have started it."""

    directory: str
    job: str = ""


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
    """Lines that the job has printed, and the one that it has begun (see `ddpwatch.tui.job_output`)."""

    lines: list[str]
    begun: str = ""


@dataclass(frozen=True, slots=True)
class Over:
    """No frame will come any more. ``note`` says what the user should know about that."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Rewound:
    """Frames of the same recording follow, from an earlier (or a much later) place on."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The replay is where it was wanted, at that step if one was meant."""

    step: int | None = None


@dataclass(frozen=True, slots=True)
class Missed:
    """The replay cannot go where it was wanted."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The feed broke."""

    error: Exception


FeedEvent = Waiting | Attached | Frames | Output | Over | Rewound | Arrived | Missed | Failed


class Feed(Protocol):
    """A running feed. All methods may be called from the dashboard's thread and return at once."""

    def start(self) -> None:
        """Begins to post."""

    def stop(self) -> None:
        """Lets the thread end by itself; it takes at most one poll."""

    def taken(self) -> None:
        """One batch was applied."""


class ThreadFeed:
    """What both kinds share: the thread, its end, and the bound on batches that wait."""

    def __init__(self, post: Callable[[FeedEvent], object]) -> None:
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

    def _post(self, event: FeedEvent) -> None:
        if not self._stopped.is_set():
            self._post_event(event)

    def _post_frames(self, frames: list[Frame]) -> None:
        while frames and not self._stopped.is_set():
            if self._slots.acquire(timeout=POLL_S):
                self._post(Frames(frames))
                return


class LiveFeed(ThreadFeed):
    """Attaches, reads, and attaches again."""

    def __init__(self, spec: AttachFeed, post: Callable[[FeedEvent], object]) -> None:
        super().__init__(post)
        self._spec = spec
        self._wanted: RunInfo | Path | None = spec.run
        self._looked_back = False
        self._tail = OutputTail(spec.output) if spec.output is not None else None
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
        self._post(Waiting(str(self._spec.where()), self._spec.job))
        self._hear()
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
            self._hear()
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
            self._hear()
            self._stopped.wait(LOOK_S)

    def _hear(self) -> None:
        """Posts what the job has printed meanwhile."""
        if self._tail is None:
            return
        begun, lines = self._tail.begun, self._tail.lines()
        if lines or self._tail.begun != begun:
            self._post(Output(lines, self._tail.begun))
