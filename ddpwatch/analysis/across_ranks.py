"""One step across ranks: who launched a bucket late, who waited for it, and how long the transfer itself took.

A raw collective duration is never called network time: on the first rank most of it is waiting for the last one. Only
ranks that share one clock can be compared (see `ddpwatch.analysis.clocks.same_clock`).

A job of a thousand ranks sends a thousand frames per step. So the class computes each rank's facts once, compares ranks
column by column, and keeps the frames of old steps encoded, in a tenth of the memory.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from operator import sub
from typing import NamedTuple, TypeVar, cast

from ddpwatch.analysis.intervals import Intervals, total_within
from ddpwatch.analysis.step import BucketKey, StepFigures, bucket_keys, figures
from ddpwatch.messages import Message, Step, decode, encode
from ddpwatch.sampling.levels import is_counted, is_timed

METRICS = ("late", "wait", "step", "exposed", "overlap", "data", "between")
_LATEST_NS = 1 << 62  # every stamp is below

_Stamp = TypeVar("_Stamp", int, int | None)


# -- one rank ------------------------------------------------------------------------------------------------


class RankFacts(NamedTuple):
    """One rank's share of a step: its figures, and its buckets in launch order.

    Attributes:
        keys: The buckets.
        launch, done: Per bucket, absolute (ns); ``done`` is None where the completion was not measured.
        exposed: Per bucket, how much of [launch, done] was exposed (ns); None where that is not known.
        cost: The probe's own time as a share of the step; None for a step without duration.
    """

    figures: StepFigures
    keys: tuple[BucketKey, ...]
    launch: Sequence[int]
    done: Sequence[int | None]
    exposed: tuple[int | None, ...]
    cost: float | None


def rank_facts(step: Step, found: StepFigures) -> RankFacts:
    """Computes one rank's share of a step from its figures."""
    start = step.start_ns
    return RankFacts(
        figures=found,
        keys=bucket_keys(step),
        launch=array("q", [start + launch for launch in step.comm_launch]),
        done=_absolute(step.comm_done, start),
        exposed=_exposed(step.comm_launch, step.comm_done, found.exposed),
        cost=(step.own_ns + step.sender_ns) / step.duration_ns if step.duration_ns else None,
    )


def _absolute(done: Sequence[int | None], start: int) -> Sequence[int | None]:
    if None in done:
        return tuple(None if end is None else start + end for end in done)
    return array("q", [start + end for end in cast("Sequence[int]", done)])


def _exposed(launch: Sequence[int], done: Sequence[int | None], exposed: Intervals) -> tuple[int | None, ...]:
    """How much of each bucket's [launch, done] is exposed. Most buckets end before the first exposed interval."""
    first = exposed[0][0] if exposed else math.inf
    buckets = zip(launch, done, strict=True)
    return tuple(
        [None if end is None else 0 if end <= first else total_within(exposed, start, end) for start, end in buckets]
    )


# -- ranks compared ------------------------------------------------------------------------------------------


class BucketSkew(NamedTuple):
    """The launches of one bucket, compared over the ranks (ns).

    Attributes:
        first, last: Earliest and latest launch, absolute.
        last_rank: The rank that launched last.
        transfer: Latest completion after the latest launch; None if a completion was not measured.
    """

    first: int
    last: int
    last_rank: int
    transfer: int | None


class LaunchSkew(NamedTuple):
    """How far the launches of a step's buckets lie apart (ns).

    Attributes:
        buckets: The buckets that every rank launched, in launch order of the lowest rank.
        late: Per rank, its largest delay after the first launch of a bucket.
        wait: Per rank, its longest wait for the last launch of a bucket.
    """

    buckets: dict[BucketKey, BucketSkew]
    late: dict[int, int]
    wait: dict[int, int]


NO_SKEW = LaunchSkew({}, {}, {})


def launch_skew(facts: Mapping[int, RankFacts]) -> LaunchSkew:
    """Compares the buckets that every rank launched; empty for a single rank."""
    keys = _common_keys(facts)
    if len(facts) < 2 or not keys:
        return NO_SKEW
    ranks = sorted(facts)
    launches = {rank: _aligned(facts[rank].launch, facts[rank], keys) for rank in ranks}
    columns = list(zip(*launches.values(), strict=True))
    first, last = list(map(min, columns)), list(map(max, columns))
    last_ranks = [ranks[column.index(at)] for column, at in zip(columns, last, strict=True)]
    rows = map(BucketSkew, first, last, last_ranks, _transfers(facts, keys, last))
    return LaunchSkew(
        buckets=dict(zip(keys, rows, strict=True)),
        late={rank: max(map(sub, row, first)) for rank, row in launches.items()},
        wait={rank: max(map(sub, last, row)) for rank, row in launches.items()},
    )


def _common_keys(facts: Mapping[int, RankFacts]) -> tuple[BucketKey, ...]:
    """The keys that all ranks have, in launch order of the lowest rank."""
    if not facts:
        return ()
    distinct = {id(fact.keys): fact.keys for fact in facts.values()}
    lowest = facts[min(facts)].keys
    if len(distinct) == 1:
        return lowest
    shared = set(lowest).intersection(*distinct.values())
    return tuple(key for key in lowest if key in shared)


def _aligned(column: Sequence[_Stamp], fact: RankFacts, keys: tuple[BucketKey, ...]) -> Sequence[_Stamp]:
    """One of a rank's columns, reduced to the given buckets in their order."""
    if fact.keys == keys:
        return column
    positions = {key: position for position, key in enumerate(fact.keys)}
    return [column[positions[key]] for key in keys]


def _transfers(
    facts: Mapping[int, RankFacts], keys: tuple[BucketKey, ...], last: Sequence[int]
) -> Sequence[int | None]:
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
        comparable: Whether its ranks share one clock.
        counted: Whether statistics include it: on no rank was it warm-up, aborted or unwatched.
        timed: Whether its collectives were timed on every rank.
        ranks: The ranks' frames.
        longest_ns: Duration on the slowest rank.
        start_ns: Earliest start on any rank.
        end_ns: Latest end on any rank.
    """

    def __init__(self, step: int, comparable: bool = True) -> None:
        self.step = step
        self.comparable = comparable
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
        if step.rank in self._frames:
            self._exclude(step.rank)
        self._include(step)
        self._frames[step.rank] = step
        self._skew = self._most_exposed = None
        self._packed = self._forgotten = False
        self._rows.clear()

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
            found = self._facts[rank] = rank_facts(self.ranks[rank], self._figures[rank])
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
            self._skew = launch_skew(self.all_facts()) if self.comparable else NO_SKEW
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
