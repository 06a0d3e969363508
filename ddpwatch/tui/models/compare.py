"""The Compare view's model: the baseline, read in the background, and the run compared with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from ddpwatch.analysis.compare import Difference, FigureChange, RunSeries, changes, compare, setup_of
from ddpwatch.analysis.digest import share_of
from ddpwatch.analysis.estimate import Estimate, Estimator, StepShare
from ddpwatch.analysis.figures import phases_figures
from ddpwatch.analysis.run import Run
from ddpwatch.common.text import UNKNOWN
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.tui.text import shorten_name
from ddpwatch.viewer.state import StepAcrossRanks
from ddpwatch.wire.messages import Hello
from ddpwatch.wire.transport import Frame

BASELINE_STEPS = 500
MOST_OFFERED = 100
LIVE_STEPS = 200
RANK_STEPS_PER_CALL = 1024  # worked out at once, so that a large job does not stop the screen
THIS_RUN = "this run"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing the run with the baseline.

    Attributes:
        baseline, run: What holds for all steps of both.
        changes: What changed between them, by figure.
        difference: The verdict.
        steps: Step time of both in ms, oldest first.
    """

    baseline: Estimate
    run: Estimate
    changes: dict[str, FigureChange | None]
    difference: Difference
    steps: tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class CompareModel:
    """What the view draws.

    Attributes:
        name: The baseline's name; empty if there is none.
        failure: Why the baseline cannot be read.
        reading: Steps of the baseline read so far; None once all are.
        steps: Steps of the run that count so far.
        result: The newest comparison.
        setups: What both ran on, as (what, baseline, run).
        directory, offered: Where recordings were looked for, and their names, newest first, while there is no baseline.
    """

    name: str = ""
    failure: str = ""
    reading: int | None = None
    steps: int = 0
    result: Comparison | None = None
    setups: Sequence[tuple[str, str, str]] = ()
    directory: str = ""
    offered: Sequence[str] = ()


def recordings_in(directory: Path) -> list[str]:
    """Returns the names of the directory's recordings, newest first."""
    try:
        found = sorted(directory.glob("*.mcap"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return [path.name for path in found[:MOST_OFFERED]]


@dataclass
class NewestSteps(RunSeries):
    """The newest steps of a run, and what each adds to the estimates."""

    shares: list[StepShare] = field(default_factory=list)

    def add_step(self, across: StepAcrossRanks) -> None:
        super().add_step(across)
        if across.ordinary and len(across):
            self.shares.append(across.share or share_of(across))

    def keep(self, steps: int) -> None:
        super().keep(steps)
        del self.shares[:-steps]

    def estimate(self) -> Estimate:
        """Returns what holds for all of them, as ``ddpwatch compare`` shows it; texts say these means."""
        estimator = Estimator()
        for share in self.shares:
            estimator.add_share(share)
        found = estimator.estimate()
        self.shown, self.shown_overlap = phases_figures(found), found.overlap
        return found


class Baseline:
    """A recording, read in a thread, which then compares runs with it.

    Attributes:
        name: A short name for the screen.
        version: Grows with every change of what follows.
        steps: How many of its steps are read so far.
        ready: Whether all are.
        failure: Why it cannot be read; empty if it can.
        hello: The hello of its lowest rank.
        result: The newest comparison.
        busy: Whether a comparison is under way.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = shorten_name(path.stem, 40) or str(path)
        self.version = self.steps = 0
        self.ready = self.busy = False
        self.failure = ""
        self.hello: Hello | None = None
        self.result: Comparison | None = None
        self._series = NewestSteps(self.name)
        self._runs: queue.SimpleQueue[NewestSteps | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name="ddpwatch-baseline", daemon=True)

    def start(self) -> None:
        """Starts to read."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end."""
        self._stopped.set()
        self._runs.put(None)

    def request(self, run: NewestSteps) -> None:
        """Requests a comparison with a run. Only while ready and not busy."""
        self.busy = True
        self._runs.put(deepcopy(run))

    def _guarded(self) -> None:
        try:
            self._read()
            self._compare()
        except DdpwatchError as error:
            self.failure = str(error)
        except Exception as error:  # a file may hold anything, and nothing else reports what ends a thread
            self.failure = f"{self.path}: {type(error).__name__}: {error}"
        self.busy = False
        self.version += 1

    def _read(self) -> None:
        """Reads the newest steps."""
        recording = Recording(self.path)
        first, last = recording.steps or (0, 0)
        frames = recording.select(Selection(first=max(first, last - BASELINE_STEPS + 1)))
        for across in Run(source=str(self.path)).steps(self._noting_hello(frames)):
            if self._stopped.is_set():
                return
            self._series.add_step(across)
            self._series.keep(BASELINE_STEPS)
            self.steps, self.version = len(self._series.step), self.version + 1
        if not self.steps:
            raise UsageError(f"{self.path}: it holds no complete step", "record a longer run")
        self.ready = True
        self.version += 1

    def _noting_hello(self, frames: Iterable[Frame]) -> Iterable[Frame]:
        for message, envelope in frames:
            if isinstance(message, Hello) and (self.hello is None or message.rank <= self.hello.rank):
                self.hello = message
            yield message, envelope

    def _compare(self) -> None:
        while (run := self._runs.get()) is not None and not self._stopped.is_set():
            self._series.setup = setup_of(self.hello)
            self.result = Comparison(
                self._series.estimate(),
                run.estimate(),
                changes(self._series, run),
                compare(self._series, run),
                (self._series.step, run.step),
            )
            self.busy = False
            self.version += 1


class LiveSeries:
    """The newest steps of the run shown, added as they arrive.

    Attributes:
        newest: Number of the last step added; -1 before the first.
    """

    def __init__(self) -> None:
        self.series = NewestSteps(THIS_RUN)
        self.newest = -1

    def update(self, steps: Sequence[StepAcrossRanks], ranks: int) -> bool:
        """Adds the steps (oldest first) that all ranks have sent. Returns False if some are left for the next call."""
        budget = RANK_STEPS_PER_CALL
        for step in steps[-LIVE_STEPS:]:
            if step.step <= self.newest or len(step) < ranks:
                continue
            if budget <= 0:
                return False
            self.series.add_step(step)
            self.newest, budget = step.step, budget - len(step)
        self.series.keep(LIVE_STEPS)
        return True


def setups(baseline: Hello | None, run: Hello | None) -> list[tuple[str, str, str]]:
    """Returns what both ran on, as (what, baseline, run). Of DDP's flags only those that differ."""
    a, b = _setup(baseline), _setup(run)
    names = [name for name in dict.fromkeys([*a, *b]) if _is_listed(name, a, b)]
    return [(name, a.get(name, UNKNOWN), b.get(name, UNKNOWN)) for name in names]


def _is_listed(name: str, a: dict[str, str], b: dict[str, str]) -> bool:
    return not name.startswith("ddp ") or (bool(a) and bool(b) and a.get(name) != b.get(name))


def _setup(hello: Hello | None) -> dict[str, str]:
    return {shorten_name(name, 28): shorten_name(value, 32) for name, value in setup_of(hello).items()}
