"""One step of all its ranks: their frames, their figures, and their launches compared.

A job of a thousand ranks sends a thousand frames per step. So the class computes each rank's facts once, and keeps the
frames of old steps encoded, in a tenth of the memory. `ddpwatch.analysis.launch_skew` compares the ranks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from operator import attrgetter
from typing import cast

from ddpwatch.analysis.clock_error import NO_SHIFTS, Shifts, on_one_time_line
from ddpwatch.analysis.estimate import StepShare
from ddpwatch.analysis.groups import Members, RoleOf, no_role
from ddpwatch.analysis.launch_skew import (
    NO_SKEW,
    BucketSkew,
    LaunchSkew,
    RankFacts,
    launch_skew,
    nobody_known,
    rank_facts,
)
from ddpwatch.analysis.step import StepFigures, figures
from ddpwatch.common.units import FOREVER_NS
from ddpwatch.sampling.levels import FULL, ORDINARY, is_counted, is_timed
from ddpwatch.wire.messages import Message, Step, decode, encode

__all__ = ["METRICS", "NO_SKEW", "BucketSkew", "LaunchSkew", "RankFacts", "StepAcrossRanks"]

METRICS = ("late", "wait", "step", "exposed", "overlap", "data", "between")


class _Frames(Mapping[int, Step]):
    """The ranks' frames, decoded on access where they are packed.

    Attributes:
        packed: Whether some may be.
    """

    __slots__ = ("_frames", "packed")

    def __init__(self, frames: dict[int, Step | bytes]) -> None:
        self._frames = frames
        self.packed = False

    def __getitem__(self, rank: int) -> Step:
        frame = self._frames[rank]
        if isinstance(frame, bytes):
            message: Message = decode(frame)
            assert isinstance(message, Step)
            return message
        return frame

    def __iter__(self) -> Iterator[int]:
        return iter(self._frames)

    def values(self) -> ValuesView[Step]:
        """Returns the values, without a look-up per rank as long as nothing is packed."""
        return super().values() if self.packed else cast("ValuesView[Step]", self._frames.values())

    def items(self) -> ItemsView[int, Step]:
        return super().items() if self.packed else cast("ItemsView[int, Step]", self._frames.items())

    def __len__(self) -> int:
        return len(self._frames)


class _Figures(Mapping[int, StepFigures]):
    """The ranks' figures, computed on the first access."""

    __slots__ = ("_frames", "known")

    def __init__(self, frames: Mapping[int, Step]) -> None:
        self._frames = frames
        self.known: dict[int, StepFigures] = {}

    def __getitem__(self, rank: int) -> StepFigures:
        found = self.known.get(rank)
        if found is None:
            found = self.known[rank] = figures(self._frames[rank])
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)

    def values(self) -> ValuesView[StepFigures]:
        """Returns the values, without a look-up per rank once all are known."""
        return self.known.values() if self._all_known() else super().values()

    def items(self) -> ItemsView[int, StepFigures]:
        return self.known.items() if self._all_known() else super().items()

    def _all_known(self) -> bool:
        return len(self.known) == len(self._frames) and list(self.known) == list(self._frames)


class StepAcrossRanks:
    """One step of all ranks that have sent it.

    Attributes:
        step: Its number.
        comparable: Whether all its ranks share one time line.
        members_of: The members of a group, None if they are not known.
        role_of: What a group is for.
        shifts: Per rank what puts its stamps onto the time line; empty if all ranks stamp with one clock, or if nothing
            is known of their clocks.
        counted: Whether statistics include it: on no rank was it warm-up, aborted or bare.
        ordinary: Whether its duration holds for others: it was neither warm-up nor aborted or unresolved on any rank.
        timed: Whether its collectives were timed on every rank.
        reduced: Whether gradients were reduced on every rank.
        ranks: The ranks' frames.
        longest_ns: Duration on the slowest rank.
        start_ns: Earliest start on any rank, on the time line.
        end_ns: Latest end on any rank, on the time line.
        share: What it adds to the estimates; None until the diagnosis has split it.
    """

    def __init__(
        self, step: int, comparable: bool = True, members: Members = nobody_known, roles: RoleOf = no_role
    ) -> None:
        self.step = step
        self.comparable = comparable
        self.members_of = members
        self.role_of = roles
        self.shifts: Shifts = NO_SHIFTS
        self.counted = self.ordinary = self.timed = self.reduced = True
        self.start_ns, self.end_ns, self.longest_ns = FOREVER_NS, 0, 0
        self._frames: dict[int, Step | bytes] = {}
        self._as_sent: dict[int, bytes] = {}  # of decoded ones
        self._facts: dict[int, RankFacts] = {}
        self._skew: LaunchSkew | None = None
        self._rows: dict[str, array[float]] = {}
        self._packed = self._forgotten = False
        self._most_exposed: float | None = None
        self.share: StepShare | None = None
        self.ranks = _Frames(self._frames)
        self._figures = _Figures(self.ranks)

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def figures(self) -> Mapping[int, StepFigures]:
        """The ranks' figures, computed on the first access."""
        return self._figures

    @property
    def full(self) -> bool:
        """Whether it counts and its collectives were timed, on all ranks so far."""
        return self.counted and self.timed and bool(self._frames)

    @property
    def members(self) -> KeysView[int]:
        """The ranks that have sent the step."""
        return self._frames.keys()

    def add_step(self, step: Step, frame: bytes = b"") -> None:
        """Adds one rank's step; it replaces an earlier one of that rank. Drops what was compared before.

        ``frame`` is the step as it was sent, where that is known: then it need not be encoded again.
        """
        if self.shifts:  # they were those of other frames
            self.align(NO_SHIFTS)
        if step.rank in self._frames:
            self._exclude(step.rank)
        self._include(step)
        self._frames[step.rank] = step
        self._as_sent[step.rank] = frame
        self._skew = self._most_exposed = self.share = None
        self._packed = self._forgotten = False
        self._rows.clear()

    def align(self, shifts: Shifts) -> None:
        """Puts its ranks, which stamp with several clocks, onto a common time line, as far as that is known."""
        self.shifts = shifts
        self.comparable = on_one_time_line(self._frames, shifts)
        self._facts.clear()
        self._skew, self._forgotten = None, False
        self._rows.clear()
        self.start_ns, self.end_ns = FOREVER_NS, 0
        for rank, frame in self.ranks.items():
            start = frame.start_ns + self._offset_of(rank)
            self.start_ns, self.end_ns = min(self.start_ns, start), max(self.end_ns, start + frame.duration_ns)

    def start_of(self, rank: int) -> int:
        """Returns when a rank's step started, on the time line (ns)."""
        return self.ranks[rank].start_ns + self._offset_of(rank)

    def _offset_of(self, rank: int) -> int:
        return self.shifts[rank].offset if rank in self.shifts else 0

    def _include(self, step: Step) -> None:
        start, duration = step.start_ns, step.duration_ns
        if start < self.start_ns:
            self.start_ns = start
        if start + duration > self.end_ns:
            self.end_ns = start + duration
        if duration > self.longest_ns:
            self.longest_ns = duration
        if step.status != FULL:
            self.counted = self.counted and is_counted(step.status)
            self.timed = self.timed and is_timed(step.status)
            if step.status not in ORDINARY:
                self.ordinary = False
        self.reduced = self.reduced and step.reduced

    def _exclude(self, rank: int) -> None:
        self._facts.pop(rank, None)
        self._figures.known.pop(rank, None)
        self.counted = self.ordinary = self.timed = self.reduced = True
        self.start_ns, self.end_ns, self.longest_ns = FOREVER_NS, 0, 0
        for other, frame in self.ranks.items():
            if other != rank:
                self._include(frame)

    def facts_of(self, rank: int) -> RankFacts:
        """Returns one rank's share, computed on the first call."""
        found = self._facts.get(rank)
        if found is None:
            offset = self._offset_of(rank) if self.shifts else 0
            found = self._facts[rank] = rank_facts(self.ranks[rank], self._figures[rank], offset)
        return found

    def all_facts(self) -> dict[int, RankFacts]:
        """Returns every rank's share."""
        if len(self._facts) < len(self._frames):
            self._find_facts()
        return self._facts

    def _find_facts(self) -> None:
        """Computes what is missing."""
        facts, known = self._facts, self._figures.known
        for rank, frame in self.ranks.items():
            if rank in facts:
                continue
            if (found := known.get(rank)) is None:
                found = known[rank] = figures(frame)
            facts[rank] = rank_facts(frame, found, self._offset_of(rank) if self.shifts else 0)

    @property
    def skew(self) -> LaunchSkew:
        """Launches compared over the ranks; empty where they cannot be compared."""
        if self._skew is None:
            known = self.comparable or self.shifts
            self._skew = launch_skew(self.all_facts(), self.members_of, self.shifts) if known else NO_SKEW
        return self._skew

    def late_ns(self, rank: int) -> int | None:
        """Returns the rank's largest delay; None if there is nothing to compare."""
        return self.skew.late.get(rank)

    def wait_ns(self, rank: int) -> int | None:
        """Returns the rank's longest wait for others; None if there is nothing to compare."""
        return self.skew.wait.get(rank)

    def row(self, metric: str) -> array[float]:
        """Returns one of `METRICS` for every rank, in the order of the ranks: ns (overlap: a ratio), NaN if unknown."""
        if metric not in self._rows:
            known: Sequence[float | None]
            ranks = sorted(self._frames)
            if metric in ("late", "wait"):
                known = list(map(getattr(self.skew, metric).get, ranks))
            else:
                known = [_READERS[metric](found) for found in map(self.figures.__getitem__, ranks)]
            self._rows[metric] = array("d", [math.nan if value is None else value for value in known])
        return self._rows[metric]

    @property
    def most_exposed_ns(self) -> float | None:
        """The largest exposed time of any rank; None if it was not measured on any."""
        if self._most_exposed is None:
            self._most_exposed = max((value for value in self.row("exposed") if value == value), default=math.nan)
        return None if math.isnan(self._most_exposed) else self._most_exposed

    def pack(self) -> bool:
        """Keeps the frames encoded from now on; returns whether they were not."""
        if self._packed:
            return False
        self._packed = self.ranks.packed = True
        for rank, frame in self._frames.items():
            if not isinstance(frame, bytes):
                self._frames[rank] = self._as_sent.get(rank) or encode(frame)
        self._as_sent.clear()
        return True

    def detached(self) -> StepAcrossRanks:
        """Returns a copy for another thread: it has the same frames, and nothing is worked out."""
        copy = StepAcrossRanks(self.step, self.comparable, self.members_of, self.role_of)
        copy.shifts, copy.counted, copy.timed, copy.reduced = self.shifts, self.counted, self.timed, self.reduced
        copy.start_ns, copy.end_ns, copy.longest_ns = self.start_ns, self.end_ns, self.longest_ns
        copy.share, copy.ordinary = self.share, self.ordinary
        copy._frames.update(self._frames)
        copy._as_sent.update(self._as_sent)
        copy.ranks.packed = self.ranks.packed
        return copy

    def unpack(self) -> None:
        """Keeps the frames decoded."""
        self._frames.update(self.ranks)
        self.ranks.packed = False

    def forget_facts(self) -> bool:
        """Keeps only what `row` returns, and the rest is computed again on demand; returns whether it did not yet."""
        if self._forgotten:
            return False
        self._forgotten = True
        if self.counted:  # of others, nothing is worked out unless somebody looks
            for metric in METRICS:
                self.row(metric)
        self._facts.clear()
        self._figures.known.clear()
        self._skew = None
        return True


_READERS: dict[str, Callable[[StepFigures], float | None]] = {
    "step": attrgetter("step_ns"),
    "exposed": attrgetter("exposed_ns"),
    "overlap": attrgetter("overlap"),
    "data": lambda figures: figures.phases_ns.get("data"),
    "between": lambda figures: figures.phases_ns.get("between"),
}
