"""One step over all ranks that have sent it, worked out rank by rank as frames come, and kept small once it is old.

A job of a thousand ranks sends a thousand frames per step. So each rank's share is worked out once, what is compared
over ranks is done on columns, and a step that is no longer new keeps its frames encoded (a tenth of the memory).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import sub

from ddpwatch.analysis.intervals import Intervals
from ddpwatch.analysis.ranks import BucketFigures, BucketKey, bucket_figures
from ddpwatch.analysis.step import StepFigures, figures
from ddpwatch.messages import COUNTED, Message, Step, decode, encode

METRICS = ("late", "wait", "step", "exposed", "overlap", "input")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank contributes to a step. ``launch`` and ``done`` are absolute (ns), in launch order, as ``keys``.

    Attributes:
        done: None if the completion of a bucket was not measured.
        exposed: How much of each bucket's [launch, done] was exposed; empty likewise.
        cost: Time of our own as a share of the step.
    """

    figures: StepFigures
    keys: tuple[BucketKey, ...]
    launch: array[int]
    done: array[int] | None
    exposed: tuple[int, ...]
    cost: float | None


def rank_facts(step: Step) -> RankFacts:
    """Works out one rank's step."""
    found, start = figures(step), step.start_ns
    done = [end for end in step.bucket_done if end is not None]
    measured = len(done) == len(step.bucket_done)
    return RankFacts(
        figures=found,
        keys=_keys(tuple(step.bucket_module), tuple(step.bucket_index)),
        launch=array("q", [start + launch for launch in step.bucket_launch]),
        done=array("q", [start + end for end in done]) if measured else None,
        exposed=_bucket_exposed(step.bucket_launch, done, found.exposed) if measured else (),
        cost=(step.own_ns + step.sender_ns) / step.duration_ns if step.duration_ns else None,
    )


@lru_cache(maxsize=256)
def _keys(modules: tuple[int, ...], indices: tuple[int, ...]) -> tuple[BucketKey, ...]:
    """Module, index and which launch of that bucket in the step; one object for equal columns."""
    seen: dict[tuple[int, int], int] = {}
    keys = []
    for bucket in zip(modules, indices, strict=True):
        turn = seen[bucket] = seen.get(bucket, -1) + 1
        keys.append((*bucket, turn))
    return tuple(keys)


def _bucket_exposed(launch: list[int], done: list[int], exposed: Intervals) -> tuple[int, ...]:
    sums = [0] * len(launch)
    for start, end in exposed:
        for position, (begin, finish) in enumerate(zip(launch, done, strict=True)):
            if begin < end and finish > start:
                sums[position] += min(end, finish) - max(start, begin)
    return tuple(sums)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Launches of a step's buckets compared over its ranks (ns); columns in launch order of the lowest rank.

    Attributes:
        first, last: Earliest and latest launch per bucket, absolute.
        last_rank: Which rank that was.
        transfer: Latest completion after the latest launch; None where a completion was not measured.
        late, wait: Per rank its largest over the buckets.
    """

    keys: tuple[BucketKey, ...] = ()
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    last_rank: tuple[int, ...] = ()
    transfer: tuple[int | None, ...] = ()
    late: Mapping[int, int] = field(default_factory=dict)
    wait: Mapping[int, int] = field(default_factory=dict)


def arrivals(facts: Mapping[int, RankFacts]) -> Arrivals:
    """Compares the buckets that every rank launched."""
    keys = _common(facts)
    if len(facts) < 2 or not keys:
        return Arrivals()
    ranks = sorted(facts)
    launches = {rank: _picked(facts[rank], keys, facts[rank].launch) for rank in ranks}
    dones = [_picked(fact, keys, fact.done) for fact in facts.values() if fact.done is not None]
    columns = list(zip(*launches.values(), strict=True))
    first, last = tuple(map(min, columns)), tuple(map(max, columns))
    ends = list(map(max, zip(*dones, strict=True))) if len(dones) == len(facts) else None
    return Arrivals(
        keys=keys,
        first=first,
        last=last,
        last_rank=tuple(ranks[column.index(at)] for column, at in zip(columns, last, strict=True)),
        transfer=tuple(map(sub, ends, last)) if ends is not None else (None,) * len(keys),
        late={rank: max(map(sub, row, first)) for rank, row in launches.items()},
        wait={rank: max(map(sub, last, row)) for rank, row in launches.items()},
    )


def _common(facts: Mapping[int, RankFacts]) -> tuple[BucketKey, ...]:
    """The keys that all ranks have, in the order of the lowest rank."""
    kinds = {id(fact.keys): fact.keys for fact in facts.values()}
    if not facts:
        return ()
    lowest = facts[min(facts)].keys
    if len(kinds) == 1:
        return lowest
    shared = set(lowest).intersection(*kinds.values())
    return tuple(key for key in lowest if key in shared)


def _picked(fact: RankFacts, keys: tuple[BucketKey, ...], column: array[int]) -> array[int]:
    if fact.keys == keys:
        return column
    place = {key: position for position, key in enumerate(fact.keys)}
    return array("q", [column[place[key]] for key in keys])


class _Frames(Mapping[int, Step]):
    """The ranks' frames; packed ones are decoded when they are looked at."""

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
    def __init__(self, view: StepAcrossRanks) -> None:
        self._view = view

    def __getitem__(self, rank: int) -> StepFigures:
        return self._view.facts_of(rank).figures

    def __iter__(self) -> Iterator[int]:
        return iter(self._view.ranks)

    def __len__(self) -> int:
        return len(self._view.ranks)


class StepAcrossRanks:
    """One step over all ranks that have sent it.

    Attributes:
        step: Its number.
        comparable: Whether its ranks stamp with one clock.
        counted: Whether it belongs into statistics: neither warm-up, aborted nor unwatched on any rank.
        shadow: Whether a rank left its collectives untimed, or was not watched at all.
        ranks: The ranks' frames.
        longest_ns: Duration on the slowest rank.
        start_ns: Earliest start on any rank.
        end_ns: Latest end on any rank.
    """

    def __init__(self, step: int, comparable: bool) -> None:
        self.step = step
        self.comparable = comparable
        self.counted = True
        self.shadow = False
        self.longest_ns = self.start_ns = self.end_ns = 0
        self._frames: dict[int, Step | bytes] = {}
        self._facts: dict[int, RankFacts] = {}
        self._arrivals: Arrivals | None = None
        self._rows: dict[str, array[float]] = {}
        self._packed = self._forgotten = False
        self._most_exposed: float | None = None
        self.ranks: Mapping[int, Step] = _Frames(self._frames)

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def figures(self) -> Mapping[int, StepFigures]:
        """Figures per rank, worked out when first asked for. Not kept: a cycle would outlive the step by far."""
        return _Figures(self)

    @property
    def full(self) -> bool:
        """Whether its collectives were timed, on all ranks so far."""
        return self.counted and not self.shadow and bool(self._frames)

    @property
    def members(self) -> KeysView[int]:
        """The ranks that have sent the step."""
        return self._frames.keys()

    def add(self, step: Step) -> None:
        """Takes one rank's step; what was compared before is forgotten."""
        self.start_ns = min(self.start_ns, step.start_ns) if self._frames else step.start_ns
        self.end_ns = max(self.end_ns, step.start_ns + step.duration_ns)
        self.longest_ns = max(self.longest_ns, step.duration_ns)
        self.counted = self.counted and step.status in COUNTED
        self.shadow = self.shadow or step.status in ("shadow", "unwatched")
        self._frames[step.rank] = step
        self._facts.pop(step.rank, None)
        self._arrivals = None
        self._packed = self._forgotten = False
        self._most_exposed = None
        self._rows.clear()

    def facts_of(self, rank: int) -> RankFacts:
        """One rank's share, worked out when first asked for."""
        found = self._facts.get(rank)
        if found is None:
            found = self._facts[rank] = rank_facts(self.ranks[rank])
        return found

    def all_facts(self) -> dict[int, RankFacts]:
        """Every rank's share."""
        for rank in self._frames:
            self.facts_of(rank)
        return self._facts

    @property
    def arrivals(self) -> Arrivals:
        """Launches compared over the ranks; empty where they cannot be compared."""
        if self._arrivals is None:
            self._arrivals = arrivals(self.all_facts()) if self.comparable else Arrivals()
        return self._arrivals

    @property
    def buckets(self) -> list[BucketFigures]:
        """Buckets compared over all ranks here, in full; empty where their clocks are not comparable."""
        return bucket_figures(self.ranks) if self.comparable and len(self._frames) > 1 else []

    def late_ns(self, rank: int) -> int | None:
        """How late the rank was at worst, None if there is nothing to compare."""
        return self.arrivals.late.get(rank)

    def wait_ns(self, rank: int) -> int | None:
        """How long the rank waited for others at worst, None if there is nothing to compare."""
        return self.arrivals.wait.get(rank)

    def row(self, metric: str) -> array[float]:
        """One of `METRICS` for every rank, in the order of the ranks: ns (overlap: a ratio), NaN if unknown."""
        if metric not in self._rows:
            read = _READERS[metric]
            values = (read(self, rank) for rank in sorted(self._frames))
            self._rows[metric] = array("d", [math.nan if value is None else value for value in values])
        return self._rows[metric]

    @property
    def most_exposed_ns(self) -> float | None:
        """The most that was exposed on one rank; None if it was not measured on any."""
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
        """Keeps of the figures only what `row` gives; the rest is worked out again when asked for."""
        if self._forgotten:
            return
        self._forgotten = True
        for metric in METRICS:
            self.row(metric)
        self._facts.clear()
        self._arrivals = None


_READERS: dict[str, Callable[[StepAcrossRanks, int], float | None]] = {
    "late": StepAcrossRanks.late_ns,
    "wait": StepAcrossRanks.wait_ns,
    "step": lambda view, rank: view.figures[rank].step_ns,
    "exposed": lambda view, rank: view.figures[rank].exposed_ns,
    "overlap": lambda view, rank: view.figures[rank].overlap,
    "input": lambda view, rank: view.figures[rank].phases_ns.get("input"),
}
