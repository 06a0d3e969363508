"""Follows live runs: attaches to one, reads it to its end, and attaches to the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ddpwatch.analysis.diagnosis.words.why_unwatched import Why
from ddpwatch.errors import UsageError
from ddpwatch.job.output_copy import OutputBuffer
from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.tui.feed.events import BATCH, Attached, FeedEvent, Missed, Note, Output, Over, Trouble, Waiting
from ddpwatch.tui.feed.output_tail import OutputTail
from ddpwatch.tui.feed.thread import POLL_S, ThreadFeed
from ddpwatch.viewer.listing import row_of
from ddpwatch.viewer.live_source import LiveSource, Source
from ddpwatch.wire.messages import Bye

LIST_RUNS_S = 0.5


@dataclass(frozen=True)
class AttachSpec:
    """Which live run to follow: ``run``, or ``endpoint``, or else the newest and then each that starts after it.

    Tests replace ``open_source``, ``list_runs``, ``look_at`` and ``run_directory``.

    Attributes:
        job: The job's command line, if ddpwatch launched it.
        output: What that job prints.
        interrupt: Does to that job what Ctrl-C at its terminal does, for one that was read as a key.
        why: Why nothing of it is watched so far.
        list_ended: Small recordings of ended runs, newest first. The newest is shown until a run starts.
    """

    run: RunInfo | None = None
    endpoint: str | None = None
    job: str = ""
    output: OutputBuffer | None = None
    interrupt: Callable[[], object] | None = None
    why: Callable[[], Why] = Why
    list_ended: Callable[[], list[Path]] = list
    open_source: Callable[[str], Source] = LiveSource
    list_runs: Callable[[], list[RunInfo]] = rundir.live_runs
    look_at: Callable[[RunInfo], RunInfo] = row_of
    run_directory: Callable[[], object] = rundir.directory


class LiveFeed(ThreadFeed):
    """Attaches, reads, and attaches again."""

    def __init__(self, spec: AttachSpec, post: Callable[[FeedEvent], object]) -> None:
        super().__init__(post)
        self._spec = spec
        self._chosen: RunInfo | Path | None = spec.run
        self._showed_ended = False
        self._tail = OutputTail(spec.output) if spec.output is not None else None
        self._follows_new = spec.run is None and spec.endpoint is None
        self._seen: set[str] = set()  # runs that existed when the feed attached to one: none of them is new
        self._shown = ""  # the live run that was read last
        self._order: StackOrder | None = None

    def choose(self, run: RunInfo | Path) -> None:
        """Switches to another live run, or to the recording of an ended one."""
        self._chosen = run

    def order_stacks(self, order: StackOrder | None) -> None:
        """Asks the run for samples of stacks (see `Source.order_stacks`)."""
        self._order = order

    def ended(self) -> list[Path]:
        """Returns recordings of ended runs, newest first."""
        return self._spec.list_ended()

    def runs(self) -> list[RunInfo]:
        """Returns live runs, newest first."""
        return self._spec.list_runs()

    def look(self, _: Callable[[str], object]) -> list[RunInfo]:
        """Returns live runs, each with how it does; takes a moment."""
        return list(map(self._spec.look_at, self.runs()))

    def _run(self) -> None:
        if self._spec.endpoint is not None:
            self._read(self._spec.endpoint, self._spec.endpoint, None)
        while not self._stopped.is_set():
            run = self._next_run()
            if isinstance(run, Path):
                self._read_ended(run)
            elif run is not None:
                self._read(run.publish, run.run_id, run)

    def _next_run(self) -> RunInfo | Path | None:
        """Returns the chosen run, or the newest, or once the last one that ended.

        Waits `LIST_RUNS_S` if there is none.
        """
        chosen, self._chosen = self._chosen, None
        if isinstance(chosen, Path):
            self._seen |= {run.run_id for run in self._spec.list_runs()}
        if chosen is not None:
            return chosen
        runs = [run for run in self._spec.list_runs() if run.run_id not in self._seen]
        if runs:
            return runs[0]
        self._post(Waiting(str(self._spec.run_directory()), self._spec.job, self._spec.why()))
        self._post_output()
        if not self._showed_ended and self._follows_new:
            self._showed_ended = True
            return next(iter(self._spec.list_ended()), None)
        self._stopped.wait(LIST_RUNS_S)
        return None

    def _read_ended(self, path: Path) -> None:
        """Shows an ended run's recording until another run starts or is chosen."""
        try:
            frames, ended_s = iter(Recording(path)), path.stat().st_mtime
        except (UsageError, OSError):  # deleted meanwhile
            self._go_back(path)
            return
        self._post(Attached(rundir.run_of(path), ended_s=ended_s))
        while not self._stopped.is_set() and (batch := list(islice(frames, BATCH))):
            self._post_frames(batch)
        self._post(Over())
        self._wait_for_another()

    def _go_back(self, missing: Path) -> None:
        """Chooses the live run again that was shown when an ended one was chosen."""
        before = next((run for run in self._spec.list_runs() if run.run_id == self._shown), None)
        if before is not None and self._chosen is None:
            self._chosen = before
            self._post(Note(f"{rundir.run_of(missing)} cannot be read: older recordings of ended runs are removed"))

    def _read(self, endpoint: str, name: str, run: RunInfo | None) -> None:
        self._shown, self._order = name, None
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
        """Posts frames until the run's goodbye (True), or until another is chosen or this one is gone (False)."""
        look_at, trouble = time.monotonic() + LIST_RUNS_S, ""
        ordered: StackOrder | None = None
        while not self._stopped.is_set() and self._chosen is None:
            if self._order is not ordered:
                ordered = self._order
                self._pass_on(ordered, source)
            frames = source.read(POLL_S, BATCH)
            self._post_frames(frames)
            self._post_output()
            if source.trouble != trouble:
                trouble = source.trouble
                self._post(Trouble(trouble))
            while source.notes:
                self._post(Note(source.notes.pop(0)))
            if any(isinstance(message, Bye) and message.rank is None for message, _ in frames) or source.over:
                return not trouble
            if not frames and run is not None and time.monotonic() > look_at:
                look_at = time.monotonic() + LIST_RUNS_S
                if self._has_successor(run):
                    return False
        return False

    def _pass_on(self, order: StackOrder | None, source: Source) -> None:
        try:
            source.order_stacks(order)
        except UsageError as error:
            if order is not None:
                self._post(Missed(f"{error.message}: {error.hint}"))

    def _has_successor(self, run: RunInfo) -> bool:
        """Returns whether this run's collector vanished without a goodbye and another run has started."""
        runs = {other.run_id for other in self._spec.list_runs()} if self._follows_new else set()
        return run.run_id not in runs and bool(runs - self._seen)

    def _wait_for_another(self) -> None:
        """Waits until a run is chosen or, unless one was asked for by name, a new one starts."""
        while not self._stopped.is_set() and self._chosen is None:
            if self._follows_new and any(run.run_id not in self._seen for run in self._spec.list_runs()):
                return
            self._post_output()
            self._stopped.wait(LIST_RUNS_S)

    def _post_output(self) -> None:
        """Posts what the job has printed meanwhile."""
        if self._tail is None:
            return
        before, lines = self._tail.unfinished, self._tail.lines()
        if lines or self._tail.unfinished != before:
            self._post(Output(lines, self._tail.unfinished))
