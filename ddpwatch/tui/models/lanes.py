"""The timeline's model: one step over all ranks, on one axis where the ranks' clocks allow it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from ddpwatch.analysis.step import StepFigures
from ddpwatch.messages import Mark, Step
from ddpwatch.sampling.levels import FULL, status_name
from ddpwatch.state import StepAcrossRanks

MOST_COMM_ROWS = 3
_LOOKED_AT = 32  # ranks that say how many comm rows are needed


@dataclass(slots=True)  # not frozen: hundreds are made per frame
class Bar:
    """One bucket on the axis; ``end`` is None where its completion was not measured. ``position`` is launch order."""

    position: int
    index: int
    nbytes: int
    start: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Lane:
    """One rank in the timeline.

    Attributes:
        offset_ns: Its step's start on the common axis.
        marks: Its marks within the step, as (name, kind, start, end or None), offsets from the step's start.
    """

    rank: int
    offset_ns: int
    step: Step
    figures: StepFigures
    marks: tuple[tuple[str, str, int, int | None], ...] = ()

    def bars(self) -> list[Bar]:
        """The buckets in launch order."""
        step, offset = self.step, self.offset_ns
        columns = zip(step.bucket_index, step.bucket_bytes, step.bucket_launch, step.bucket_done, strict=True)
        return [
            Bar(position, index, size, offset + launch, None if done is None else offset + done)
            for position, (index, size, launch, done) in enumerate(columns)
        ]

    def stacked(self) -> list[list[Bar]]:
        """The bars on as few rows as let none cover another, in launch order."""
        rows: list[list[Bar]] = []
        for bar in self.bars():
            free = next((row for row in rows if row[-1].end is None or row[-1].end <= bar.start), None)
            if free is None:
                rows.append([bar])
            else:
                free.append(bar)
        return rows


class Lanes(Sequence[Lane]):
    """The lanes of some ranks of a step; each is made when it is looked at.

    Args:
        view: The step.
        ranks: Which ranks, in order.
        origin_ns: Where the common axis begins; None if every rank begins at its own start.
        marks: The run's marks.
    """

    def __init__(
        self, view: StepAcrossRanks, ranks: Sequence[int], origin_ns: int | None, marks: Iterable[Mark] = ()
    ) -> None:
        self.ranks = ranks
        self._view = view
        self._origin_ns = origin_ns
        self._marks: dict[int, list[Mark]] = {}
        for mark in marks:
            self._marks.setdefault(mark.rank, []).append(mark)
        self._made: dict[int, Lane] = {}

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> Lane: ...
    @overload
    def __getitem__(self, index: slice) -> list[Lane]: ...
    def __getitem__(self, index: int | slice) -> Lane | list[Lane]:
        """Lanes by position."""
        if isinstance(index, slice):
            return [self.of(rank) for rank in self.ranks[index]]
        return self.of(self.ranks[index])

    def of(self, rank: int) -> Lane:
        """A rank's lane."""
        if rank not in self._made:
            step = self._view.ranks[rank]
            offset = 0 if self._origin_ns is None else step.start_ns - self._origin_ns
            marks = self._marks_of(step) if rank in self._marks else ()
            self._made[rank] = Lane(rank, offset, step, self._view.figures[rank], marks)
        return self._made[rank]

    def _marks_of(self, step: Step) -> tuple[tuple[str, str, int, int | None], ...]:
        found = []
        for mark in self._marks[step.rank]:
            start = mark.start_ns - step.start_ns
            end = None if mark.end_ns is None else mark.end_ns - step.start_ns
            if start < step.duration_ns and (start if end is None else end) >= 0:
                found.append((mark.name, mark.kind, start, end))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step over its ranks.

    Attributes:
        aligned: Whether the ranks share one axis; otherwise each begins at its own start.
        missing: Ranks that have not sent this step.
        comm_rows: Rows that a rank's buckets need so that none covers another, at most `MOST_COMM_ROWS`.
        status: What to say of the step: "" for an ordinary one, else warm-up, aborted, shadow or not synced.
    """

    step: int
    lanes: Lanes
    aligned: bool
    length_ns: int
    missing: tuple[int, ...] = ()
    comm_rows: int = 1
    status: str = ""


def timeline_of(
    view: StepAcrossRanks,
    ranks: Iterable[int],
    comm_rows: int = 1,
    shown: Collection[int] | None = None,
    marks: Iterable[Mark] = (),
) -> Timeline:
    """A step's lanes.

    Args:
        view: The step.
        ranks: All ranks of the run.
        comm_rows: What other steps needed, so that the rows stay where they are.
        shown: The ranks to show; None for all.
        marks: The run's marks.
    """
    wanted = [rank for rank in sorted(view.members) if shown is None or rank in shown]
    lanes = Lanes(view, wanted, view.start_ns if view.comparable else None, marks)
    if comm_rows < MOST_COMM_ROWS:
        comm_rows = max(comm_rows, *(len(lane.stacked()) for lane in lanes[:_LOOKED_AT]), 1)
    return Timeline(
        step=view.step,
        lanes=lanes,
        aligned=view.comparable,
        length_ns=max(view.end_ns - view.start_ns if view.comparable else view.longest_ns, 1),
        missing=tuple(rank for rank in ranks if rank not in view.members),
        comm_rows=min(comm_rows, MOST_COMM_ROWS),
        status=_status(view, lanes),
    )


def _status(view: StepAcrossRanks, lanes: Lanes) -> str:
    found = {lane.step.status for lane in (lanes[:_LOOKED_AT] if view.counted else lanes)} - {FULL}
    if not found and any(not lane.step.synced for lane in lanes[:_LOOKED_AT]):
        return "not synced"
    return ", ".join(sorted(map(status_name, found)))
