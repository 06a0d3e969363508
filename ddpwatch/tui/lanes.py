"""The timeline's model: one step over all ranks, on one axis where the ranks' clocks allow it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpwatch.analysis.steps import StepFigures
from ddpwatch.messages import Step
from ddpwatch.state import StepView

MOST_COMM_ROWS = 3


@dataclass(frozen=True, slots=True)
class Bar:
    """One bucket on the axis; ``end`` is None where its completion was not measured. ``position`` is launch order."""

    position: int
    index: int
    nbytes: int
    start: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Lane:
    """One rank in the timeline. ``offset_ns`` is its step's start on the common axis."""

    rank: int
    offset_ns: int
    step: Step
    figures: StepFigures

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


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step over its ranks.

    Attributes:
        aligned: Whether the ranks share one axis; otherwise each begins at its own start.
        missing: Ranks that have not sent this step.
        comm_rows: Rows that a rank's buckets need so that none covers another, at most `MOST_COMM_ROWS`.
    """

    step: int
    lanes: tuple[Lane, ...]
    aligned: bool
    length_ns: int
    missing: tuple[int, ...] = ()
    comm_rows: int = 1

    @property
    def status(self) -> str:
        """What to say of the step: "" for an ordinary one, else warm-up, aborted, shadow or not synced."""
        found = {lane.step.status for lane in self.lanes} - {"ok"}
        if not found and any(not lane.step.synced for lane in self.lanes):
            return "not synced"
        return ", ".join(sorted("warm-up" if status == "warmup" else status for status in found))


def timeline_of(view: StepView, ranks: Iterable[int], comm_rows: int = 1) -> Timeline:
    """A step's lanes. ``comm_rows`` is what other steps needed, so that the rows stay where they are."""
    origin = min(step.start_ns for step in view.ranks.values()) if view.comparable else None
    lanes = tuple(
        Lane(rank, 0 if origin is None else step.start_ns - origin, step, view.figures[rank])
        for rank, step in sorted(view.ranks.items())
    )
    needed = max((len(lane.stacked()) for lane in lanes), default=1)
    return Timeline(
        step=view.step,
        lanes=lanes,
        aligned=view.comparable,
        length_ns=max([lane.offset_ns + lane.step.duration_ns for lane in lanes] + [1]),
        missing=tuple(rank for rank in ranks if rank not in view.ranks),
        comm_rows=min(max(needed, comm_rows), MOST_COMM_ROWS),
    )
