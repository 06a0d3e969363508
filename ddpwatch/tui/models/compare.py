"""The Compare view's model: a recording read in the background, and what the run shown is compared with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpwatch.analysis.compare import Change, Difference, RunSeries, changes, compare, figures_of
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.export.tables import steps_of
from ddpwatch.messages import Hello
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.state import StepAcrossRanks
from ddpwatch.transport import Frame
from ddpwatch.tui.text import UNKNOWN, clean, number

BASELINE_STEPS = 500
LIVE_STEPS = 200
WORK_OF_A_CALL = 1024  # steps times ranks worked out at once, so that a large job does not stop the screen
HERE = "this run"


@dataclass(frozen=True, slots=True)
class Compared:
    """The run shown against the baseline.

    Attributes:
        baseline, run: Figures of both (see `figures_of`).
        changes: What changed between them.
        difference: That in words.
        steps: Step time of both in ms, oldest first.
    """

    baseline: dict[str, Any]
    run: dict[str, Any]
    changes: dict[str, Change | None]
    difference: Difference
    steps: tuple[Sequence[float], Sequence[float]]


class Baseline:
    """A recording, read in a thread of its own, which then compares with it whatever it is handed.

    Attributes:
        name: What it is called.
        version: Grows with whatever changes below.
        steps: How many of its steps are read so far.
        ready: All of them.
        failure: Why it cannot be read; empty if it can.
        hello: Who its lowest rank is.
        compared: The newest answer.
        busy: An answer is being worked out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = clean(path.stem, 40) or str(path)
        self.version = self.steps = 0
        self.ready = self.busy = False
        self.failure = ""
        self.hello: Hello | None = None
        self.compared: Compared | None = None
        self._series = RunSeries(self.name)
        self._handed: queue.SimpleQueue[RunSeries | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name="ddpwatch-baseline", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def stop(self) -> None:
        """Lets the thread end by itself."""
        self._stopped.set()
        self._handed.put(None)

    def hand(self, series: RunSeries) -> None:
        """Has a run compared. Only while ready and not busy."""
        self.busy = True
        self._handed.put(deepcopy(series))

    def _guarded(self) -> None:
        try:
            self._read()
            self._answer()
        except DdpwatchError as error:
            self.failure = str(error)
        except Exception as error:  # a file may hold anything, and a thread has nobody else to tell
            self.failure = f"{self.path}: {type(error).__name__}: {error}"
        self.busy = False
        self.version += 1

    def _read(self) -> None:
        """Takes its newest steps."""
        recording = Recording(self.path)
        first, last = recording.steps or (0, 0)
        frames = recording.select(Selection(first=max(first, last - BASELINE_STEPS + 1)))
        for group in steps_of(self._noted(frames)):
            if self._stopped.is_set():
                return
            self._series.add(group)
            self._series.keep(BASELINE_STEPS)
            self.steps, self.version = len(self._series.step), self.version + 1
        if not self.steps:
            raise UsageError(f"{self.path}: no whole step is in it", "record a longer run")
        self.ready = True
        self.version += 1

    def _noted(self, frames: Iterable[Frame]) -> Iterable[Frame]:
        for message, envelope in frames:
            if isinstance(message, Hello) and (self.hello is None or message.rank <= self.hello.rank):
                self.hello = message
            yield message, envelope

    def _answer(self) -> None:
        while (series := self._handed.get()) is not None and not self._stopped.is_set():
            self.compared = Compared(
                figures_of(self._series),
                figures_of(series),
                changes(self._series, series),
                compare(self._series, series),
                (self._series.step, series.step),
            )
            self.busy = False
            self.version += 1


class LiveSeries:
    """The newest steps of the run shown, worked out as they come.

    Attributes:
        newest: Number of the last step taken; -1 before the first.
    """

    def __init__(self) -> None:
        self.series = RunSeries(HERE)
        self.newest = -1

    def update(self, views: Sequence[StepAcrossRanks], ranks: int) -> bool:
        """Takes the steps that all ranks have sent (oldest first). False if some are left for the next call."""
        budget = WORK_OF_A_CALL
        for view in views[-LIVE_STEPS:]:
            if view.step <= self.newest or len(view) < ranks:
                continue
            if budget <= 0:
                return False
            self.series.add(view)
            self.newest, budget = view.step, budget - len(view)
        self.series.keep(LIVE_STEPS)
        return True


def setups(baseline: Hello | None, run: Hello | None) -> list[tuple[str, str, str]]:
    """What both ran on, as (what, baseline, run); of DDP's flags those that differ."""
    a, b = _setup(baseline), _setup(run)
    return [(name, a.get(name, UNKNOWN), b.get(name, UNKNOWN)) for name in dict.fromkeys([*a, *b]) if _told(name, a, b)]


def _told(name: str, a: dict[str, str], b: dict[str, str]) -> bool:
    return not name.startswith("ddp ") or (bool(a) and bool(b) and a.get(name) != b.get(name))


def _setup(hello: Hello | None) -> dict[str, str]:
    if hello is None:
        return {}
    flags = {f"ddp {clean(name, 24)}": clean(str(value), 24) for name, value in sorted(hello.ddp.items())}
    return {
        "ranks": str(hello.world_size),
        "device": clean(hello.device_name or hello.device_kind, 32),
        "backend": clean(hello.backend, 16),
        "torch": clean(hello.torch, 24),
        "model": f"{clean(hello.module, 24)}, {number(hello.parameters / 1e6)} M parameters",
        "timing": clean(hello.timing_source, 24),
        **flags,
    }
