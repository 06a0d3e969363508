"""Recordings in Python: ``from ddpwatch.recording import open_recording``. See ``docs/recordings.md``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ddpwatch.errors import UsageError
from ddpwatch.export.tables import (
    TABLES,
    BucketRow,
    DeviceRow,
    MarkRow,
    RankRow,
    StepRow,
    bucket_rows,
    columns,
    device_rows,
    groups,
    mark_rows,
    rank_rows,
    rows,
    step_rows,
)
from ddpwatch.messages import Layout
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection, selection_of
from ddpwatch.report.build import report_of_recording
from ddpwatch.transport import Frame

StrPath = str | os.PathLike[str]


class OpenedRecording:
    """A recording, or a selected part of it. Every method makes a pass over the file and keeps nothing.

    Iterators are read in one go; for data in memory take `columns`.

    Attributes:
        recording: The reader below.
    """

    def __init__(self, recording: Recording, selection: Selection) -> None:
        self.recording = recording
        self._selection = selection

    def select(self, steps: str | None = None, ranks: str | None = None) -> OpenedRecording:
        """A part of what is selected here: ``steps`` as ``"100:200"``, ``ranks`` as ``"0,4-7"``; found by the index.

        Raises:
            UsageError: One of them is not understood.
        """
        return OpenedRecording(self.recording, self._selection.narrowed(selection_of(steps, ranks)))

    @property
    def metadata(self) -> dict[str, str]:
        """What the recorder wrote about the run."""
        return dict(self.recording.metadata)

    @property
    def step_range(self) -> tuple[int, int] | None:
        """First and last step number of the file, read from its index."""
        return self.recording.steps

    def frames(self) -> Iterator[Frame]:
        """The raw messages with their receive time, in the order in which they were received."""
        return self.recording.select(self._selection)

    def steps(self) -> Iterator[StepRow]:
        """The figures of every step of every rank."""
        return (row for group in groups(self.frames(), self._ranks) for row in step_rows(group))

    def buckets(self) -> Iterator[BucketRow]:
        """The figures of every bucket of every step of every rank."""
        return (row for group in groups(self.frames(), self._ranks) for row in bucket_rows(group))

    def ranks(self) -> list[RankRow]:
        """Who the ranks are, and how they ended."""
        return rank_rows(self.frames())

    def devices(self) -> Iterator[DeviceRow]:
        """The samples of GPUs and hosts."""
        return device_rows(self.frames())

    def marks(self) -> Iterator[MarkRow]:
        """The marks."""
        return mark_rows(self.frames())

    def layouts(self) -> list[Layout]:
        """The bucket layouts, as the ranks told them."""
        return [message for message, _ in self.frames() if isinstance(message, Layout)]

    def columns(self, table: str) -> dict[str, list[object]]:
        """A table as columns: ``pandas.DataFrame(opened.columns("steps"))``, and likewise polars and pyarrow.

        Args:
            table: ``steps``, ``buckets``, ``ranks``, ``devices`` or ``marks``.

        Raises:
            UsageError: There is no such table.
        """
        if table not in TABLES:
            raise UsageError(f"there is no table {table!r}", f"there are {', '.join(TABLES)}")
        return columns(rows(self.frames(), table, self._ranks), TABLES[table])

    def metrics(self) -> dict[str, Any]:
        """The report, with the keys of ``ddpwatch report --json``."""
        return report_of_recording(self.recording, self._selection)

    @property
    def _ranks(self) -> int | None:
        return None if self._selection.ranks is None else len(self._selection.ranks)


def open_recording(
    path: StrPath | Iterable[StrPath], *, steps: str | None = None, ranks: str | None = None
) -> OpenedRecording:
    """Opens a recording: a file, a directory with one file per rank, or several of these. Takes no time on any size.

    Args:
        path: Where it is.
        steps: Only these, e.g. ``"100:200"``: as in Python up to but not including the second.
        ranks: Only these, e.g. ``"0,4-7"``.

    Raises:
        UsageError: A file is no recording or too new, or a selection is not understood.
    """
    source = Path(path) if isinstance(path, str) else path
    return OpenedRecording(Recording(source), selection_of(steps, ranks))
