"""Finds the run that a name means, live or recorded, and reads it within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddpwatch.analysis.figures import Report
from ddpwatch.errors import UsageError
from ddpwatch.recording.names import is_path, recordings_in
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import Drawn, report_of_frames, report_of_recording
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.live_source import LiveSource, snapshot
from ddpwatch.wire.transport import Frame

LIMIT_S = 30.0  # for one answer
CHECK_FRAMES = 256  # between two looks at the clock
MOST_LISTED = 50  # recordings


@dataclass(frozen=True)
class Deadline:
    """The time by which an answer is due, on ``clock``."""

    at_s: float = field(default_factory=lambda: time.monotonic() + LIMIT_S)
    clock: Callable[[], float] = time.monotonic

    def check(self) -> None:
        """Passes if there is time left.

        Raises:
            UsageError: There is none.
        """
        if self.clock() > self.at_s:
            raise UsageError(f"not answered within {LIMIT_S:.0f} s", "ask for fewer steps, such as 1000:2000")

    def bound(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Yields the frames as long as there is time."""
        for count, frame in enumerate(frames):
            if count % CHECK_FRAMES == 0:
                self.check()
            yield frame


class BoundedRecording(Recording):
    """A recording that is read until a deadline."""

    def __init__(self, path: Path, deadline: Deadline) -> None:
        super().__init__(path)
        self._deadline = deadline

    def select(self, selection: Selection) -> Iterator[Frame]:
        return self._deadline.bound(super().select(selection))


class RecordedRun:
    """A recording."""

    kind: Literal["live", "recording"] = "recording"

    def __init__(self, path: Path, deadline: Deadline) -> None:
        self.name = str(path)
        self.recording = BoundedRecording(path, deadline)

    def frames(self) -> Iterator[Frame]:
        """Yields all frames."""
        return iter(self.recording)

    def report(self, selection: Selection, drawn: Drawn | None = None) -> Report:
        """Returns the report on the selected part."""
        return report_of_recording(self.recording, selection, drawn)

    def notes(self) -> list[str]:
        """Returns what limits the last report or frames."""
        return [*self.recording.notes, *self.recording.left_out]


class LiveRun:
    """A running job, as far as its collector retains it."""

    kind: Literal["live", "recording"] = "live"

    def __init__(self, info: RunInfo, deadline: Deadline) -> None:
        self.name = info.run_id
        self._endpoint = info.publish
        self._deadline = deadline

    def frames(self) -> Iterator[Frame]:
        """Yields what the collector retains."""
        source = LiveSource(self._endpoint)
        try:
            yield from self._deadline.bound(snapshot(source))
        finally:
            source.close()

    def report(self, selection: Selection, drawn: Drawn | None = None) -> Report:
        """Returns the report on the selected part."""
        wanted = (one for one in self.frames() if selection.wants(one[0], one[1].received_ns))
        return report_of_frames(wanted, self.name, selection, drawn)

    def notes(self) -> list[str]:
        """Returns what limits the report."""
        return ["a live run, as far as its collector retains it: the newest 512 steps of each rank at most"]


@dataclass(frozen=True)
class Runs:
    """The runs that are known here.

    Attributes:
        folders: Where recordings are looked for.
        deadline: When the answer is due.
    """

    folders: Sequence[Path]
    deadline: Deadline = field(default_factory=Deadline)

    def find(self, name: str) -> LiveRun | RecordedRun:
        """Returns the run of that name: a path, or a live run's id or its start; of the newest live run, if empty.

        Raises:
            UsageError: There is none.
        """
        if "://" in name:
            raise UsageError("runs of other machines cannot be asked here", "start it there: ssh NODE ddpwatch mcp")
        if is_path(name):
            return self.recorded(name)
        info = rundir.find(name) if name else rundir.newest_run()
        if info is None:
            raise UsageError("no live run", "list_runs shows recordings; pass the path of one as run")
        return LiveRun(info, self.deadline)

    def recorded(self, name: str) -> RecordedRun:
        """Returns the recording of that path, which may be within one of the folders.

        Raises:
            UsageError: There is none.
        """
        if not is_path(name):
            raise UsageError(f"{name!r} is no recording", "record it first: ddpwatch record -o FILE RUN")
        path = next((at for folder in (Path(), *self.folders) if (at := folder / name).exists()), Path(name))
        return RecordedRun(path, self.deadline)

    def live(self) -> list[RunInfo]:
        """Returns the live runs, newest first."""
        return rundir.live_runs()

    def recordings(self) -> list[Path]:
        """Returns recordings and directories of rank files in the folders, and what ended runs have left."""
        found = {*rundir.last_views(), *(path for one in self.folders for path in recordings_in(one.absolute()))}
        dated = sorted(((path.stat().st_mtime, path) for path in found if path.exists()), reverse=True)
        return [path for _, path in dated[:MOST_LISTED]]
