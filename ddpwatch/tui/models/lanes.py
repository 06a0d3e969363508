"""One step's lanes, one per rank, on a common axis where the offsets of their clocks are known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ddpwatch.analysis.groups import Role, outermost
from ddpwatch.analysis.step import USE_NAMES, StepFigures, named_stretches, starts_of
from ddpwatch.analysis.waiting import Flight, flights
from ddpwatch.common.text import ms
from ddpwatch.sampling.levels import FULL, status_name
from ddpwatch.tui.models.by_rank import ByRank
from ddpwatch.viewer.state import StepAcrossRanks
from ddpwatch.wire.messages import ALL_REDUCE, OWN_COLLECTIVES, Mark, Step

MAX_COMM_ROWS = 3
_AWAITED = {"sync": "its buckets", "buffers": "DDP's buffers", "data": "data"}  # by phase
MarksByRank = Mapping[int, Sequence[Mark]]
_SAMPLED_RANKS = 32  # enough to know how many comm rows are needed


@dataclass(slots=True)  # not frozen: hundreds are made per frame
class Bar:
    """One bucket on the axis.

    Attributes:
        position: Its place in launch order.
        transfer: Until then it waits for ``last_rank`` (see `Flight`).
        end: None if it was not measured.
        use: With FSDP2, what is done with a parameter group (see `USE_NAMES`); else empty.
        role: Of its group.
        own: Whether the job's own code issues it.
    """

    position: int
    index: int
    nbytes: int
    start: int
    transfer: int
    end: int | None
    last_rank: int | None
    use: str
    role: Role
    own: bool

    @property
    def label(self) -> str:
        """Its number; of the job's own, its operation."""
        return USE_NAMES[self.use or ALL_REDUCE] if self.own else str(self.index)

    @property
    def name(self) -> str:
        """The same, with FSDP2 with its use."""
        return f"{self.index} {USE_NAMES[self.use]}" if self.use and not self.own else self.label


@dataclass(frozen=True)
class Lane:
    """One rank's step.

    Attributes:
        offset_ns: The step's start on the common axis.
        across: The step on all ranks.
        marks: The rank's marks within the step.
    """

    rank: int
    offset_ns: int
    step: Step
    figures: StepFigures
    across: StepAcrossRanks
    marks: tuple[Mark, ...] = ()

    @cached_property
    def flights(self) -> Sequence[Flight | None]:
        """The collectives, in launch order."""
        return flights(self.step, self.across.facts_of(self.rank), self.across.skew)

    def on_axis(self, clock_ns: int) -> int:
        """Returns a time of the rank's clock on the common axis."""
        return self.offset_ns + clock_ns - self.step.start_ns

    def waits_for(self, phase: str) -> str:
        """Says that the rank waits in a phase, and for what; empty if it does not."""
        awaited = _AWAITED.get(phase)
        if phase == "sync" and self.step.comm_op:
            awaited = "a collective" if OWN_COLLECTIVES in self.step.comm_module else "its parameter group"
        return f"waits for {awaited}" if awaited else ""

    def stretches(self) -> list[tuple[str, int, int]]:
        """Returns the waits for data inside the step, then its spans, as (phase, start, end) from the step's start."""
        return named_stretches(self.step)

    @cached_property
    def bars(self) -> list[Bar]:
        """The buckets, in launch order."""
        at, step = self.offset_ns, self.step
        keys, role_of = self.across.facts_of(self.rank).keys, self.across.role_of
        found = []
        for position, (key, nbytes, start, flight) in enumerate(
            zip(keys, step.comm_bytes, starts_of(step), self.flights, strict=True)
        ):
            module, index, _, group, use = key
            transfer, done, last = (start, None, None) if flight is None else flight[1:]
            end = None if done is None else at + done
            role, own = role_of(group), module == OWN_COLLECTIVES
            found.append(Bar(position, index, nbytes, at + start, at + transfer, end, last, use, role, own))
        return found

    @cached_property
    def roles(self) -> list[Role]:
        """The roles of its groups, if it communicates in several: each has a row."""
        groups = self.across.facts_of(self.rank).keys.groups
        roles = sorted(set(map(self.across.role_of, groups)), key=outermost)
        return roles if len(roles) > 1 and OWN_COLLECTIVES in self.step.comm_module else []

    def stacked(self) -> list[list[Bar]]:
        """Returns the bars on the fewest rows on which none covers another, in launch order, or by role."""
        if self.roles:
            return [[bar for bar in self.bars if bar.role == role] for role in self.roles]
        rows: list[list[Bar]] = []
        for bar in self.bars:
            free = next((row for row in rows if row[-1].end is None or row[-1].end <= bar.start), None)
            if free is None:
                rows.append([bar])
            else:
                free.append(bar)
        return rows


Lanes = ByRank[Lane]


def lanes_of(step: StepAcrossRanks, ranks: Sequence[int], origin_ns: int | None, marks: MarksByRank) -> Lanes:
    """Returns the lanes of some of a step's ranks.

    Args:
        step: The step.
        ranks: The ranks, in order.
        origin_ns: The time at which the common axis starts; None if each rank starts at 0.
        marks: The run's marks by rank.
    """

    def lane(rank: int) -> Lane:
        own = step.ranks[rank]
        offset = 0 if origin_ns is None else step.start_of(rank) - origin_ns
        found = tuple(mark for mark in marks.get(rank, ()) if in_step(mark, own))
        return Lane(rank, offset, own, step.figures[rank], step, found)

    return ByRank(ranks, lane)


def picked(ranks: Sequence[int], named: Sequence[int], peers: Sequence[int], room: int) -> list[int]:
    """Picks, of more ranks than there is room for, those worth a look; empty if none is named.

    The named ones come first, in three quarters of the room, as a node's eight ranks may be. Then, evenly spaced, those
    that they are compared with, and others if there is room.

    Args:
        ranks: All ranks, in order.
        named: Those that the verdict names.
        peers: Those that it compares them with.
        room: How many fit.
    """
    known = set(ranks)
    first = [rank for rank in named if rank in known][: max(3 * room // 4, 1)]
    if not first:
        return []
    compared = known.intersection(peers).difference(named)
    spread = _spread(sorted(compared), room - len(first))
    spread += _spread(sorted(known.difference(named, compared)), room - len(first) - len(spread))
    return first + sorted(spread)


def _spread(ranks: Sequence[int], count: int) -> list[int]:
    """Picks that many of the ranks, evenly spaced."""
    count = min(count, len(ranks))
    return [ranks[index * (len(ranks) - 1) // max(count - 1, 1)] for index in range(count)]


def marks_by_rank(marks: Iterable[Mark]) -> MarksByRank:
    """Groups marks by their rank."""
    by_rank: dict[int, list[Mark]] = {}
    for mark in marks:
        by_rank.setdefault(mark.rank, []).append(mark)
    return by_rank


def in_step(mark: Mark, step: Step) -> bool:
    """Returns whether a mark and a step of the same rank overlap."""
    end_ns = mark.start_ns if mark.end_ns is None else mark.end_ns
    return end_ns >= step.start_ns and mark.start_ns < step.start_ns + step.duration_ns


@dataclass(frozen=True, slots=True)
class StepLanes:
    """One step of all its ranks.

    Attributes:
        aligned: Whether the ranks share one axis; otherwise each starts at 0.
        error_ns: How far a rank may be off on it.
        before_hang: Whether ranks have stood still since.
        missing: Ranks that have not sent this step.
        comm_rows: Rows that a rank's buckets need so that none covers another, at most `MAX_COMM_ROWS`.
        by_role: Whether these rows are those of the roles of groups.
        status: Empty for an ordinary step, else warm-up, aborted, light, bare or not synced.
    """

    step: int
    lanes: Lanes
    aligned: bool
    length_ns: int
    missing: tuple[int, ...] = ()
    comm_rows: int = 1
    by_role: bool = False
    status: str = ""
    error_ns: int = 0
    before_hang: bool = False

    @property
    def notes(self) -> str:
        """A title's notes: on a hang since, and on the ranks' clocks, if there are several."""
        hang = ", before the hang" if self.before_hang else ""
        if not self.aligned:
            return f"{hang}, each rank from its own start: clocks differ"
        return f"{hang}, clocks ±{ms(self.error_ns)} ms" if self.error_ns else hang


def step_lanes(
    step: StepAcrossRanks,
    ranks: Iterable[int],
    comm_rows: int = 1,
    shown: Collection[int] | None = None,
    marks: Iterable[Mark] = (),
) -> StepLanes:
    """Makes a step's lanes.

    Args:
        step: The step.
        ranks: All ranks of the run.
        comm_rows: The rows that other steps needed, so that nothing jumps from step to step.
        shown: The ranks to show; None for all.
        marks: The run's marks.
    """
    selected = [rank for rank in sorted(step.members) if shown is None or rank in shown]
    lanes = lanes_of(step, selected, step.start_ns if step.comparable else None, marks_by_rank(marks))
    if comm_rows < MAX_COMM_ROWS:
        comm_rows = max(comm_rows, *(len(lane.stacked()) for lane in lanes[:_SAMPLED_RANKS]), 1)
    return StepLanes(
        step=step.step,
        lanes=lanes,
        aligned=step.comparable,
        length_ns=max(step.end_ns - step.start_ns if step.comparable else step.longest_ns, 1),
        missing=tuple(rank for rank in ranks if rank not in step.members),
        comm_rows=min(comm_rows, MAX_COMM_ROWS),
        by_role=any(lane.roles for lane in lanes[:_SAMPLED_RANKS]),
        status=_status(step, lanes),
        error_ns=max((shift.error for shift in step.shifts.values()), default=0) if step.comparable else 0,
    )


def _status(step: StepAcrossRanks, lanes: Lanes) -> str:
    found = {lane.step.status for lane in (lanes[:_SAMPLED_RANKS] if step.counted else lanes)} - {FULL}
    if not found and any(not lane.step.synced for lane in lanes[:_SAMPLED_RANKS]):
        return "not synced"
    return ", ".join(sorted(map(status_name, found)))
