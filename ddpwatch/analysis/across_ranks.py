"""One step across ranks: who launched a bucket late, who waited for it, and how long the transfer itself took.

A raw collective duration is never called network time: on the first rank most of it is waiting for the last one. Only
ranks of one group are compared, if all of its members have sent the step and share a time line: a last rank that nobody
watches would look like a long transfer. Ranks share a time line if they stamp with one clock, or if the offsets of
their clocks are bounded (`ddpwatch.analysis.clocks`). Then what is compared has an error, which is said.

A job of a thousand ranks sends a thousand frames per step. So the class computes each rank's facts once, compares ranks
column by column, and keeps the frames of old steps encoded, in a tenth of the memory.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from itertools import repeat
from operator import sub
from typing import NamedTuple, TypeVar, cast

from ddpwatch.analysis.clock_error import NO_SHIFTS, ClockErrors, Shifts, on_one_time_line
from ddpwatch.analysis.groups import Members
from ddpwatch.analysis.intervals import Intervals, total_within
from ddpwatch.analysis.step import BucketKey, StepFigures, bucket_keys, figures, starts_of
from ddpwatch.messages import DEFAULT_GROUP, Message, Step, decode, encode
from ddpwatch.sampling.levels import is_counted, is_timed

METRICS = ("late", "wait", "step", "exposed", "overlap", "data", "between")
_LATEST_NS = 1 << 62  # every stamp is below

_Stamp = TypeVar("_Stamp", int, int | None)


# -- one rank ------------------------------------------------------------------------------------------------


class RankFacts(NamedTuple):
    """One rank's share of a step: its figures, and its buckets in launch order.

    Attributes:
        keys: The buckets.
        seqs: Sequence number of the first bucket's collective in its group (None if the group does not count), and per
            bucket the difference to it.
        launch, start, done: Per bucket, on the common time line (ns); ``start`` is the launch where it is not known
            when the wire was free, ``done`` None where the completion was not measured.
        exposed: Per bucket, how much of [start, done] was exposed (ns); None where that is not known.
        cost: The probe's own time as a share of the step; None for a step without duration.
        clock_error: How far the stamps may be off on the rank's own clock, which a GPU does not stamp with (ns).
    """

    figures: StepFigures
    keys: tuple[BucketKey, ...]
    seqs: tuple[int | None, tuple[int, ...]]
    launch: Sequence[int]
    start: Sequence[int]
    done: Sequence[int | None]
    exposed: tuple[int | None, ...]
    cost: float | None
    clock_error: int = 0


def rank_facts(step: Step, found: StepFigures, offset: int = 0) -> RankFacts:
    """Computes one rank's share of a step from its figures; ``offset`` (ns) puts it onto the common time line."""
    start = step.start_ns + offset
    launch = array("q", [start + launch for launch in step.comm_launch])
    return RankFacts(
        figures=found,
        keys=bucket_keys(step),
        seqs=(step.comm_first_seq, tuple(step.comm_seq)),
        launch=launch,
        start=array("q", [start + at for at in starts_of(step)]) if step.comm_start else launch,
        done=_absolute(step.comm_done, start),
        exposed=_exposed(starts_of(step), step.comm_done, found.exposed),
        cost=(step.own_ns + step.sender_ns) / step.duration_ns if step.duration_ns else None,
        clock_error=step.clock_error_ns or 0,
    )


def _absolute(done: Sequence[int | None], start: int) -> Sequence[int | None]:
    if None in done:
        return tuple(None if end is None else start + end for end in done)
    return array("q", [start + end for end in cast("Sequence[int]", done)])


def _exposed(starts: Sequence[int], done: Sequence[int | None], exposed: Intervals) -> tuple[int | None, ...]:
    """How much of each bucket's [start, done] is exposed. Most buckets end before the first exposed interval."""
    first = exposed[0][0] if exposed else math.inf
    buckets = zip(starts, done, strict=True)
    return tuple(
        [None if end is None else 0 if end <= first else total_within(exposed, start, end) for start, end in buckets]
    )


# -- ranks compared ------------------------------------------------------------------------------------------


class BucketSkew(NamedTuple):
    """The launches of one bucket, compared over the ranks (ns).

    Attributes:
        first, last: Earliest and latest launch, on the common time line.
        last_ranks: The ranks that may have launched last: one, unless others are within the error.
        ranks: How many ranks the group has.
        transfer: Latest completion after the latest start; None if a completion was not measured, or if the error is
            as large.
    """

    first: int
    last: int
    last_ranks: tuple[int, ...]
    ranks: int
    transfer: int | None

    @property
    def last_rank(self) -> int | None:
        """The rank that launched last; None if that is not certain."""
        return the_only(self.last_ranks)


def the_only(ranks: Sequence[int]) -> int | None:
    """The only rank; None if there are several, or none."""
    return ranks[0] if len(ranks) == 1 else None


class LaunchSkew(NamedTuple):
    """How far the launches of a step's buckets lie apart (ns).

    Attributes:
        buckets: The buckets that every rank of their group launched, in launch order of the group's lowest rank.
        late: Per rank, its largest delay after the first launch of a bucket.
        wait: Per rank, its longest wait for the last launch of a bucket.
        peers: Per rank, the ranks that it is compared with in the group of its first bucket, and itself.
        errors: Per rank, how far its stamps may be off on the common time line; empty on one host's clock.
        error: How far late, wait and transfer may be off.
    """

    buckets: dict[BucketKey, BucketSkew]
    late: dict[int, int]
    wait: dict[int, int]
    peers: dict[int, tuple[int, ...]]
    errors: dict[int, int]
    error: int = 0


NO_SKEW = LaunchSkew({}, {}, {}, {}, {})


def nobody_known(group: int) -> tuple[int, ...] | None:
    """The members of a group, where no rank has named any."""
    return None


def launch_skew(
    facts: Mapping[int, RankFacts], members: Members = nobody_known, shifts: Shifts = NO_SHIFTS
) -> LaunchSkew:
    """Compares the buckets that every rank of their group launched; empty for a single rank.

    The default group, if its members are not known, has all ranks of ``facts``. Any other group is then left out.
    """
    distinct = {id(fact.keys): fact.keys for fact in facts.values()}
    groups = list(dict.fromkeys(key[3] for keys in distinct.values() for key in keys))
    if len(groups) == 1:
        return _group_skew(facts, groups[0], members, shifts)
    skews = [_group_skew(facts, group, members, shifts) for group in groups]
    found = LaunchSkew({}, {}, {}, {}, {}, max((skew.error for skew in skews), default=0))
    for skew in skews:
        found.buckets.update(skew.buckets)
        found.errors.update(skew.errors)
        for rank in skew.late:
            found.late[rank] = max(found.late.get(rank, 0), skew.late[rank])
            found.wait[rank] = max(found.wait.get(rank, 0), skew.wait[rank])
            found.peers.setdefault(rank, skew.peers[rank])
    return found


def _group_skew(facts: Mapping[int, RankFacts], group: int, members: Members, shifts: Shifts) -> LaunchSkew:
    """Compares the buckets of one group; empty if a member has not sent the step, or is on another time line."""
    known = members(group)
    if known is None and group == DEFAULT_GROUP:
        known = tuple(sorted(facts))
    if known is None or len(known) < 2 or not all(rank in facts for rank in known):
        return NO_SKEW
    if shifts and not on_one_time_line(known, shifts):
        return NO_SKEW
    if len(known) < len(facts):
        facts = {rank: facts[rank] for rank in known}
    keys = _common_keys(facts, group)
    return _skew_of(facts, keys, shifts) if keys else NO_SKEW


def _skew_of(facts: Mapping[int, RankFacts], keys: tuple[BucketKey, ...], shifts: Shifts) -> LaunchSkew:
    ranks = sorted(facts)
    launches = {rank: _aligned(facts[rank].launch, facts[rank], keys) for rank in ranks}
    columns = list(zip(*launches.values(), strict=True))
    first, last = list(map(min, columns)), list(map(max, columns))
    last_ranks: list[tuple[int, ...]] = [(ranks[column.index(at)],) for column, at in zip(columns, last, strict=True)]
    transfers = _transfers(facts, keys, _last_starts(facts, keys, last))
    errors, error = dict[int, int](), 0
    if shifts or any(fact.clock_error for fact in facts.values()):
        known = ClockErrors({rank: facts[rank].clock_error for rank in ranks}, shifts)
        errors, error = known.ranks, known.joint
        last_ranks = [known.may_be_last(column) for column in columns]
        transfers = [None if transfer is None or transfer <= error else transfer for transfer in transfers]
    rows = map(BucketSkew, first, last, last_ranks, repeat(len(ranks)), transfers)
    return LaunchSkew(
        buckets=dict(zip(keys, rows, strict=True)),
        late={rank: max(map(sub, row, first)) for rank, row in launches.items()},
        wait={rank: max(map(sub, last, row)) for rank, row in launches.items()},
        peers=dict.fromkeys(ranks, tuple(ranks)),
        errors=errors,
        error=error,
    )


def _common_keys(facts: Mapping[int, RankFacts], group: int) -> tuple[BucketKey, ...]:
    """The keys of the group that all ranks have for the same collectives, in launch order of the lowest rank."""
    lowest = facts[min(facts)]
    if all(fact.keys is lowest.keys and fact.seqs == lowest.seqs for fact in facts.values()):
        return _of_group(lowest.keys, group)
    shared = set(_numbered_keys(lowest)).intersection(*map(_numbered_keys, facts.values()))
    return _of_group(tuple(key for key, seq in _numbered_keys(lowest) if (key, seq) in shared), group)


def _of_group(keys: tuple[BucketKey, ...], group: int) -> tuple[BucketKey, ...]:
    return keys if all(key[3] == group for key in keys) else tuple(key for key in keys if key[3] == group)


def _numbered_keys(fact: RankFacts) -> list[tuple[BucketKey, int | None]]:
    """The keys with the sequence numbers of their collectives, where they are known."""
    first, offsets = fact.seqs
    if first is None or not offsets:
        return [(key, None) for key in fact.keys]
    return [(key, first + offset) for key, offset in zip(fact.keys, offsets, strict=True)]


def _aligned(column: Sequence[_Stamp], fact: RankFacts, keys: tuple[BucketKey, ...]) -> Sequence[_Stamp]:
    """One of a rank's columns, reduced to the given buckets in their order."""
    if fact.keys == keys:
        return column
    positions = {key: position for position, key in enumerate(fact.keys)}
    return [column[positions[key]] for key in keys]


def _last_starts(facts: Mapping[int, RankFacts], keys: tuple[BucketKey, ...], launches: Sequence[int]) -> Sequence[int]:
    """Per bucket the latest start, which is the latest launch where no start is known."""
    if all(fact.start is fact.launch for fact in facts.values()):
        return launches
    return list(map(max, zip(*(_aligned(fact.start, fact, keys) for fact in facts.values()), strict=True)))


def _transfers(facts: Mapping[int, RankFacts], keys: tuple[BucketKey, ...], last: Sequence[int]) -> list[int | None]:
    columns = zip(*(_aligned(fact.done, fact, keys) for fact in facts.values()), strict=True)
    if None not in [fact.figures.comm_ns for fact in facts.values()]:
        return list(map(sub, map(max, cast("Iterator[tuple[int, ...]]", columns)), last))
    return [
        None if None in done else max(cast("tuple[int, ...]", done)) - at
        for done, at in zip(columns, last, strict=True)
    ]


# -- one step ------------------------------------------------------------------------------------------------


class _Frames(Mapping[int, Step]):
    """The ranks' frames, decoded on access where they are packed."""

    def __init__(self, frames: dict[int, Step | bytes]) -> None:
        self._frames = frames

    def __getitem__(self, rank: int) -> Step:
        frame = self._frames[rank]
        if isinstance(frame, bytes):
            message: Message = decode(frame)
            assert isinstance(message, Step)
            return message
        return frame

    def __iter__(self) -> Iterator[int]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)


class _Figures(Mapping[int, StepFigures]):
    """The ranks' figures, computed on the first access."""

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


class StepAcrossRanks:
    """One step of all ranks that have sent it.

    Attributes:
        step: Its number.
        comparable: Whether all its ranks share one time line.
        members_of: The members of a group, None if they are not known.
        shifts: Per rank what puts its stamps onto the time line; empty if all ranks stamp with one clock, or if nothing
            is known of their clocks.
        counted: Whether statistics include it: on no rank was it warm-up, aborted or unwatched.
        timed: Whether its collectives were timed on every rank.
        ranks: The ranks' frames.
        longest_ns: Duration on the slowest rank.
        start_ns: Earliest start on any rank, on the time line.
        end_ns: Latest end on any rank, on the time line.
    """

    def __init__(self, step: int, comparable: bool = True, members: Members = nobody_known) -> None:
        self.step = step
        self.comparable = comparable
        self.members_of = members
        self.shifts: Shifts = NO_SHIFTS
        self.counted = self.timed = True
        self.start_ns, self.end_ns, self.longest_ns = _LATEST_NS, 0, 0
        self._frames: dict[int, Step | bytes] = {}
        self._facts: dict[int, RankFacts] = {}
        self._skew: LaunchSkew | None = None
        self._rows: dict[str, array[float]] = {}
        self._packed = self._forgotten = False
        self._most_exposed: float | None = None
        self.ranks: Mapping[int, Step] = _Frames(self._frames)
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

    def add(self, step: Step) -> None:
        """Adds one rank's step; it replaces an earlier one of that rank. Drops what was compared before."""
        if self.shifts:  # they were those of other frames
            self.align(NO_SHIFTS)
        if step.rank in self._frames:
            self._exclude(step.rank)
        self._include(step)
        self._frames[step.rank] = step
        self._skew = self._most_exposed = None
        self._packed = self._forgotten = False
        self._rows.clear()

    def align(self, shifts: Shifts) -> None:
        """Puts its ranks, which stamp with several clocks, onto a common time line, as far as that is known."""
        self.shifts = shifts
        self.comparable = on_one_time_line(self._frames, shifts)
        self._facts.clear()
        self._skew, self._forgotten = None, False
        self._rows.clear()
        self.start_ns, self.end_ns = _LATEST_NS, 0
        for rank, frame in self.ranks.items():
            start = frame.start_ns + self._offset_of(rank)
            self.start_ns, self.end_ns = min(self.start_ns, start), max(self.end_ns, start + frame.duration_ns)

    def start_of(self, rank: int) -> int:
        """When a rank's step started, on the time line (ns)."""
        return self.ranks[rank].start_ns + self._offset_of(rank)

    def _offset_of(self, rank: int) -> int:
        return self.shifts[rank].offset if rank in self.shifts else 0

    def _include(self, step: Step) -> None:
        self.start_ns = min(self.start_ns, step.start_ns)
        self.end_ns = max(self.end_ns, step.start_ns + step.duration_ns)
        self.longest_ns = max(self.longest_ns, step.duration_ns)
        self.counted = self.counted and is_counted(step.status)
        self.timed = self.timed and is_timed(step.status)

    def _exclude(self, rank: int) -> None:
        self._facts.pop(rank, None)
        self._figures.known.pop(rank, None)
        self.counted = self.timed = True
        self.start_ns, self.end_ns, self.longest_ns = _LATEST_NS, 0, 0
        for other, frame in self.ranks.items():
            if other != rank:
                self._include(frame)

    def facts_of(self, rank: int) -> RankFacts:
        """One rank's share, computed on the first call."""
        found = self._facts.get(rank)
        if found is None:
            offset = self._offset_of(rank) if self.shifts else 0
            found = self._facts[rank] = rank_facts(self.ranks[rank], self._figures[rank], offset)
        return found

    def all_facts(self) -> dict[int, RankFacts]:
        """Every rank's share."""
        for rank in self._frames:
            self.facts_of(rank)
        return self._facts

    @property
    def skew(self) -> LaunchSkew:
        """Launches compared over the ranks; empty where they cannot be compared."""
        if self._skew is None:
            known = self.comparable or self.shifts
            self._skew = launch_skew(self.all_facts(), self.members_of, self.shifts) if known else NO_SKEW
        return self._skew

    def late_ns(self, rank: int) -> int | None:
        """The rank's largest delay; None if there is nothing to compare."""
        return self.skew.late.get(rank)

    def wait_ns(self, rank: int) -> int | None:
        """The rank's longest wait for others; None if there is nothing to compare."""
        return self.skew.wait.get(rank)

    def row(self, metric: str) -> array[float]:
        """One of `METRICS` for every rank, in the order of the ranks: ns (overlap: a ratio), NaN if unknown."""
        if metric not in self._rows:
            read = _READERS[metric]
            values = (read(self, rank) for rank in sorted(self._frames))
            self._rows[metric] = array("d", [math.nan if value is None else value for value in values])
        return self._rows[metric]

    @property
    def most_exposed_ns(self) -> float | None:
        """The largest exposed time of any rank; None if it was not measured on any."""
        if self._most_exposed is None:
            self._most_exposed = max((value for value in self.row("exposed") if value == value), default=math.nan)
        return None if math.isnan(self._most_exposed) else self._most_exposed

    def pack(self) -> None:
        """Keeps the frames encoded from now on."""
        if self._packed:
            return
        self._packed = True
        for rank, frame in self._frames.items():
            if not isinstance(frame, bytes):
                self._frames[rank] = encode(frame)

    def forget_facts(self) -> None:
        """Keeps only what `row` returns; everything else is computed again on demand."""
        if self._forgotten:
            return
        self._forgotten = True
        for metric in METRICS:
            self.row(metric)
        self._facts.clear()
        self._figures.known.clear()
        self._skew = None


_READERS: dict[str, Callable[[StepAcrossRanks, int], float | None]] = {
    "late": StepAcrossRanks.late_ns,
    "wait": StepAcrossRanks.wait_ns,
    "step": lambda across, rank: across.figures[rank].step_ns,
    "exposed": lambda across, rank: across.figures[rank].exposed_ns,
    "overlap": lambda across, rank: across.figures[rank].overlap,
    "data": lambda across, rank: across.figures[rank].phases_ns.get("data"),
    "between": lambda across, rank: across.figures[rank].phases_ns.get("between"),
}
