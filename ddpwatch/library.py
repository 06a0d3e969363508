"""Recordings in Python: ``from ddpwatch import open_recording``. See ``docs/recordings.md``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ddpwatch.analysis.run import diagnosed
from ddpwatch.errors import UsageError
from ddpwatch.export.tables import (
    TABLES,
    CollectiveRow,
    DeviceRow,
    MarkRow,
    RankRow,
    StepRow,
    collective_rows,
    columns,
    device_rows,
    mark_rows,
    rank_rows,
    rows,
    step_rows,
    steps_of,
)
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection, selection_of
from ddpwatch.report.build import report_of_recording
from ddpwatch.wire.messages import Layout
from ddpwatch.wire.transport import Frame

StrPath = str | os.PathLike[str]


class OpenedRecording:
    """A recording, or a selected part of it. Every method reads the file once and keeps nothing in memory.

    Iterators can be read once; for data in memory call `columns`.

    Attributes:
        recording: The underlying reader.
    """

    def __init__(self, recording: Recording, selection: Selection) -> None:
        self.recording = recording
        self._selection = selection

    def select(self, steps: str | None = None, ranks: str | None = None) -> OpenedRecording:
        """Narrows the selection: ``steps`` as ``"100:200"``, ``ranks`` as ``"0,4-7"``. The index finds them fast.

        Raises:
            UsageError: One of them cannot be parsed.
        """
        return OpenedRecording(self.recording, self._selection.narrowed(selection_of(steps, ranks)))

    @property
    def metadata(self) -> dict[str, str]:
        """The run's metadata, as recorded."""
        return dict(self.recording.metadata)

    @property
    def step_range(self) -> tuple[int, int] | None:
        """First and last step number in the file, from its index."""
        return self.recording.steps

    def frames(self) -> Iterator[Frame]:
        """Yields the raw messages with their receive time, in the order in which they were received."""
        return self.recording.select(self._selection)

    def steps(self) -> Iterator[StepRow]:
        """Yields the figures of every step of every rank."""
        return (row for across in steps_of(self.frames(), self._ranks) for row in step_rows(across))

    def collectives(self) -> Iterator[CollectiveRow]:
        """Yields the figures of every collective of every step of every rank: DDP's buckets, or what else there is."""
        return (row for across in steps_of(self.frames(), self._ranks) for row in collective_rows(across))

    def ranks(self) -> list[RankRow]:
        """Returns the ranks, and how they ended."""
        return rank_rows(self.frames())

    def devices(self) -> Iterator[DeviceRow]:
        """Yields the samples of GPUs and hosts."""
        return device_rows(self.frames())

    def marks(self) -> Iterator[MarkRow]:
        """Yields the marks."""
        return mark_rows(self.frames())

    def layouts(self) -> list[Layout]:
        """Returns the bucket layouts that the ranks sent."""
        return [message for message, _ in self.frames() if isinstance(message, Layout)]

    def incidents(self) -> list[dict[str, Any]]:
        """Returns what went wrong, worst first: the rows of ``incidents`` in ``ddpwatch report --json``."""
        return [row.as_json() for row in diagnosed(self.frames(), self._ranks).incidents()]

    def lost(self) -> dict[str, Any]:
        """Returns where the rank-time went: ``lost`` of ``ddpwatch report --json``."""
        return diagnosed(self.frames(), self._ranks).lost().as_json()

    def columns(self, table: str) -> dict[str, list[object]]:
        """Returns a table as columns, e.g. for ``pandas.DataFrame(opened.columns("steps"))``, polars or pyarrow.

        Args:
            table: ``steps``, ``collectives``, ``ranks``, ``devices``, ``marks`` or ``incidents``.

        Raises:
            UsageError: There is no such table.
        """
        if table not in TABLES:
            raise UsageError(f"there is no table {table!r}", f"there are {', '.join(TABLES)}")
        return columns(rows(self.frames(), table, self._ranks), TABLES[table])

    def metrics(self) -> dict[str, Any]:
        """Returns the report, with the keys of ``ddpwatch report --json``."""
        return report_of_recording(self.recording, self._selection).as_json()

    @property
    def _ranks(self) -> int | None:
        return None if self._selection.ranks is None else len(self._selection.ranks)


def open_recording(
    path: StrPath | Iterable[StrPath], *, steps: str | None = None, ranks: str | None = None
) -> OpenedRecording:
    """Opens a recording: a file, a directory with one file per rank, or several of these. Fast at any size.

    Args:
        path: Of the recording.
        steps: Only these, e.g. ``"100:200"``; as in Python without the last one.
        ranks: Only these, e.g. ``"0,4-7"``.

    Raises:
        UsageError: A file is not a recording or too new, or a selection cannot be parsed.
    """
    source = Path(path) if isinstance(path, str) else path
    return OpenedRecording(Recording(source), selection_of(steps, ranks))
