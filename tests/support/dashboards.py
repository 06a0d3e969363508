"""A source that a test feeds by hand, an app on it, and a way to wait for the app instead of sleeping."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import asdict
from textual.pilot import Pilot

from ddpwatch.analysis.figures import VerdictFigures
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.run.rundir import RunInfo
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import AttachSpec, FrameList, ReplaySpec
from ddpwatch.tui.settings import Settings
from ddpwatch.viewer.listing import LiveRow
from ddpwatch.wire.messages import Message
from ddpwatch.wire.transport import Envelope, Frame
from tests.support.frames import MS, enveloped


class FakeSource:
    """Gives the frames that were put into it."""

    def __init__(self) -> None:
        self.over = False
        self.synced, self.retained = True, 0
        self.unreadable = 0
        self.trouble = ""
        self.notes: list[str] = []
        self.closed = False
        self.ordered: list[StackOrder | None] = []
        self._passed_ns = 0
        self._batches: queue.SimpleQueue[list[Frame]] = queue.SimpleQueue()

    def put(self, messages: Iterable[Message], every_ms: int = 1) -> None:
        """Adds frames, received after those put before."""
        frames = enveloped(list(messages), every_ms)
        later = [(m, Envelope(e.seq, e.received_ns + self._passed_ns, e.frame)) for m, e in frames]
        self._passed_ns += len(frames) * every_ms * MS
        self._batches.put(later)

    def put_frames(self, frames: list[Frame]) -> None:
        """Adds frames with receive times of their own."""
        self._batches.put(frames)

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        try:
            return self._batches.get(timeout=min(timeout_s, 0.02))
        except queue.Empty:
            return []

    def order_stacks(self, order: StackOrder | None) -> None:
        self.ordered.append(order)

    def close(self) -> None:
        self.closed = True


class FakeJobs:
    """Live runs and their sources, by name."""

    def __init__(self, *names: str) -> None:
        self.runs: list[RunInfo] = []
        self.sources: dict[str, FakeSource] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> FakeSource:
        self.sources[name] = FakeSource()
        info = RunInfo(
            run_id=name, ingest="", publish=name, pid=1, world_size=2, started=float(len(self.sources)), script="t.py"
        )
        self.runs = [info, *self.runs]
        return self.sources[name]

    def end(self, name: str) -> None:
        self.runs = [run for run in self.runs if run.run_id != name]

    def look_at(self, run: RunInfo) -> RunInfo:
        """Says how a run does."""
        return LiveRow(**asdict(run), verdict=VerdictFigures("straggler", "bad", f"{run.run_id} is slow"), lost=0.125)

    def feed(self, **changes: object) -> AttachSpec:
        about = {
            "open_source": lambda endpoint: self.sources[endpoint],
            "list_runs": lambda: list(self.runs),
            "look_at": self.look_at,
            "run_directory": lambda: Path("/run/ddpwatch"),
        }
        return AttachSpec(**{**about, **changes})  # type: ignore[arg-type]


class Clock:
    """A clock that a test sets. ``feed_reads`` counts how often the feed's thread has read it: once a round."""

    def __init__(self) -> None:
        self.now = 100.0
        self.feed_reads = 0

    def __call__(self) -> float:
        if threading.current_thread().name == "ddpwatch-feed":
            self.feed_reads += 1
        return self.now

    def advance(self, seconds: float) -> Callable[[], bool]:
        """Lets time pass; returns whether the feed has meanwhile acted on that."""
        self.now += seconds
        before = self.feed_reads
        return lambda: self.feed_reads > before + 2  # one read may be under way, the next sees it, then comes another


def live_app(
    jobs: FakeJobs,
    clock: Clock | None = None,
    wall: Callable[[], float] = time.time,
    settings: Settings | None = None,
    baseline: Path | None = None,
    **changes: object,
) -> DashboardApp:
    feed = jobs.feed(**changes)
    return DashboardApp(feed, clock=clock or Clock(), ticking=False, wall=wall, settings=settings, baseline=baseline)


def ended_recording(path: Path, messages: Iterable[Message]) -> Path:
    """The recording of an ended run."""
    writer = RecordingWriter(path)
    for message, envelope in enveloped(list(messages)):
        writer.write_message(message, envelope)
    writer.close()
    return path


def replay_app(messages: Iterable[Message], clock: Clock | None = None, every_ms: int = 50) -> DashboardApp:
    clock = clock or Clock()
    recording = FrameList(enveloped(list(messages), every_ms))
    return DashboardApp(ReplaySpec("run.mcap", recording, 1.0, clock), clock=clock, ticking=False)


async def until(pilot: Pilot[int], what: Callable[[], object], patience_s: float = 60, every_s: float = 0.005) -> None:
    """Lets the app work until a condition holds. The longer that takes, the less often it is looked: a look paints."""
    started = time.monotonic()
    while not what():
        waited_s = time.monotonic() - started
        assert waited_s < patience_s, f"never came:\n{screen_text(pilot.app)}"  # type: ignore[arg-type]
        await asyncio.sleep(max(every_s, min(waited_s / 10, 0.1)))
        await pilot.pause()
        pilot.app.tick()  # type: ignore[attr-defined]
    pilot.app.tick()  # type: ignore[attr-defined]
    await pilot.pause()


def screen_text(app: DashboardApp) -> str:
    """The text of the view shown, and below it the tabs and keys."""
    view = app.view
    lines = ["".join(segment.text for segment in view.render_line(y)) for y in range(view.size.height)]
    below = app.screen_stack[0]._compositor.render_strips()[len(lines) :]
    return "\n".join([*lines, *(strip.text for strip in below)])


def app_on(**changes: object) -> DashboardApp:
    """An app on the live run ``run-1``, whose source `watching` feeds."""
    jobs = FakeJobs("run-1")
    app = live_app(jobs, **changes)  # type: ignore[arg-type]
    app.jobs = jobs  # type: ignore[attr-defined]
    return app


async def watching(pilot: Pilot[int], messages: Iterable[Message]) -> None:
    """Gives messages to the app of `app_on`, and waits until it has applied all."""
    app, messages = pilot.app, list(messages)
    before = app.session.state.frames  # type: ignore[attr-defined]
    app.jobs.sources["run-1"].put(messages)  # type: ignore[attr-defined]
    await until(pilot, lambda: app.session.state.frames >= before + len(messages))  # type: ignore[attr-defined]


def body(app: DashboardApp) -> str:
    """The lines between verdict and tabs."""
    return "\n".join(screen_text(app).splitlines()[3:-1])
