"""The newest steps bucket by bucket: when each was ready, launched and done, which rank came last, what was exposed.

Times in ns. ready, launch and done count from the start of the rank's first backward, with FSDP2 of its first forward.
They and exposed are medians over the ranks of a step, then over the steps. ``docs/metrics.md`` defines transfer, wait
and busbw. FSDP2 has a parameter group in place of a bucket, and a row for each use of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.launch_skew import BucketSkew, common_keys, the_only
from ddpwatch.analysis.step import USE_NAMES, BucketKey, first_compute
from ddpwatch.common.statistics import p50
from ddpwatch.wire.messages import ALL_REDUCE, CollectiveOp

Bucket = tuple[int, int, str]  # module, index, use
NO_KEY: BucketKey = (-1, -1, -1, -1, "")
_USES = ("", *USE_NAMES)
_Stamps = tuple["int | None", ...]  # ready, launch, done, exposed
MOST_NAMED = 4  # ranks that may have been last
WORK_PER_CALL = 1024  # steps times ranks computed in one call, so that a large job does not freeze the screen


class BucketStep(NamedTuple):
    """One bucket in one step, over its ranks.

    ``wait`` is the longest of any rank; ``busbw`` in bytes/s; ``last_ranks`` may have launched last.
    """

    nbytes: int
    ready: float | None
    launch: float
    done: float | None
    transfer: float | None
    wait: float | None
    exposed: float | None
    busbw: float | None
    last_ranks: tuple[int, ...]

    @property
    def last_rank(self) -> int | None:
        """The rank that launched last; None if that is not certain."""
        return the_only(self.last_ranks)


@dataclass(frozen=True, slots=True)
class BucketSummary:
    """One bucket over the newest steps. ``last_share`` says how often one of ``last_ranks`` launched last (0 to 1)."""

    module: int
    index: int
    use: str
    nbytes: int
    ready: float | None
    launch: float | None
    done: float | None
    transfer: float | None
    wait: float | None
    exposed: float | None
    busbw: float | None
    last_ranks: tuple[int, ...]
    last_share: float | None
    steps: int

    @property
    def bucket(self) -> Bucket:
        """Which one it is."""
        return self.module, self.index, self.use


class BucketTable:
    """Keeps its rows per step; each call computes some of the missing ones, newest first."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[Bucket, BucketStep]] = {}
        self._ranks: dict[int, int] = {}

    def update(self, newest: Sequence[StepAcrossRanks]) -> bool:
        """Takes the newest steps (oldest first); returns whether the table has all of them now."""
        wanted = {across.step for across in newest}
        self.steps = {step: rows for step, rows in self.steps.items() if step in wanted}
        budget = WORK_PER_CALL
        for across in reversed(newest):
            if across.step in self.steps and self._ranks.get(across.step) == len(across):
                continue
            if budget <= 0:
                return False
            self.steps[across.step], self._ranks[across.step] = bucket_steps(across), len(across)
            budget -= len(across)
        self._ranks = {step: count for step, count in self._ranks.items() if step in wanted}
        return True

    def rows(self) -> list[BucketSummary]:
        """Returns the buckets of the newest step, by module, index and use, each over all steps that have it."""
        if not self.steps:
            return []
        return [self._row(bucket) for bucket in sorted(self.steps[max(self.steps)], key=_place)]

    def history(self, bucket: Bucket) -> list[tuple[int, BucketStep]]:
        """Returns one bucket step by step, oldest first."""
        return [(step, rows[bucket]) for step, rows in sorted(self.steps.items()) if bucket in rows]

    def _row(self, bucket: Bucket) -> BucketSummary:
        found = [step for _, step in self.history(bucket)]
        last = (step.last_ranks for step in found if step.last_ranks)
        last_ranks, last_share = most_often_last(Counter(r if len(r) <= MOST_NAMED else () for r in last))
        return BucketSummary(
            *bucket,
            nbytes=found[-1].nbytes,
            ready=p50(step.ready for step in found),
            launch=p50(step.launch for step in found),
            done=p50(step.done for step in found),
            transfer=p50(step.transfer for step in found),
            wait=p50(step.wait for step in found),
            exposed=p50(step.exposed for step in found),
            busbw=p50(step.busbw for step in found),
            last_ranks=last_ranks,
            last_share=last_share,
            steps=len(found),
        )


def _place(bucket: Bucket) -> tuple[int, int, int]:
    """Returns where a bucket stands in a table: a parameter group is gathered before it is reduced."""
    module, index, use = bucket
    return module, index, _USES.index(use)


def most_often_last(counts: Counter[tuple[int, ...]]) -> tuple[tuple[int, ...], float | None]:
    """Returns the ranks of which most often one was last, and in what share of the steps; none if that cannot be said.

    ``counts`` has () for more than `MOST_NAMED` ranks.
    """
    ranks, count = next(iter(counts.most_common(1)), ((), 0))
    return (ranks, count / counts.total()) if ranks else ((), None)


def busbw(nbytes: int, transfer_ns: float | None, ranks: int, op: CollectiveOp = ALL_REDUCE) -> float | None:
    """Returns bus bandwidth in bytes/s after nccl-tests; None without a transfer.

    That is bytes / transfer times (n-1)/n, and twice that for an all-reduce, which moves everything twice.
    """
    if not transfer_ns or transfer_ns < 0 or ranks < 2:
        return None
    return nbytes / transfer_ns * 1e9 * (2 if op == ALL_REDUCE else 1) * (ranks - 1) / ranks


def bus_bandwidths(across: StepAcrossRanks) -> dict[BucketKey, float | None]:
    """Returns the `busbw` of every compared bucket of a step.

    Sizes are those on the lowest rank of the bucket's group.
    """
    compared, found = across.skew.buckets, dict[BucketKey, float | None]()
    for rank in sorted(across.members):
        if len(found) == len(compared):
            break
        step = across.ranks[rank]
        rows = zip(across.facts_of(rank).keys, step.comm_bytes, step.comm_op or repeat(ALL_REDUCE), strict=False)
        for key, nbytes, op in rows:
            if key not in found and (skew := compared.get(key)) is not None:
                found[key] = busbw(nbytes, skew.transfer, skew.ranks, op)
    return found


class BucketColumns(NamedTuple):
    """The buckets of one step, and per bucket what `BucketStep` has."""

    buckets: tuple[Bucket, ...]
    nbytes: Sequence[int]
    ready: Sequence[float | None]
    launch: Sequence[float]
    done: Sequence[float | None]
    transfer: Sequence[float | None]
    wait: Sequence[float | None]
    exposed: Sequence[float | None]
    busbw: Sequence[float | None]
    last_ranks: Sequence[tuple[int, ...]]


def bucket_steps(across: StepAcrossRanks) -> dict[Bucket, BucketStep]:
    """Computes the buckets of one step."""
    buckets, *columns = bucket_columns(across)
    return dict(zip(buckets, map(BucketStep, *columns), strict=True))


def bucket_columns(across: StepAcrossRanks) -> BucketColumns:
    """Returns the same, column by column."""
    facts = across.all_facts()
    keys = common_keys(facts.values())
    if keys is None or keys.repeated:
        return _uneven_columns(across)
    steps = [across.ranks[rank] for rank in facts]
    origins = list(map(first_compute, steps))
    stamps, count = _medians([[*step.comm_ready, *step.comm_launch] for step in steps], origins), len(keys)
    done, exposed = _medians([step.comm_done for step in steps], origins), _medians(list(map(_exposed, facts.values())))
    medians = stamps[:count], stamps[count:], done, exposed
    skew, buckets = across.skew, _buckets_of(keys)
    if len(skew.buckets) < count or len(keys.groups) > 1:
        return _columns(across, buckets, steps[-1].comm_bytes, medians, keys)
    first = across.ranks[min(facts)]
    skews, ops = list(skew.buckets.values()), first.comm_op or repeat(ALL_REDUCE)
    rows = zip(first.comm_bytes, skews, ops, strict=False)
    bandwidths = [busbw(nbytes, one.transfer, one.ranks, op) for nbytes, one, op in rows]
    return _compared(buckets, steps[-1].comm_bytes, medians, skews, bandwidths)


def _uneven_columns(across: StepAcrossRanks) -> BucketColumns:
    """Returns the same for ranks that launched different buckets, or one of them twice."""
    rows: dict[Bucket, list[_Stamps]] = {}
    sizes: dict[Bucket, int] = {}
    for rank, step in across.ranks.items():
        buckets, origin = list(map(_bucket, across.facts_of(rank).keys)), first_compute(step)
        stamps = zip(
            *(_since(origin, column) for column in (step.comm_ready, step.comm_launch, step.comm_done)),
            across.facts_of(rank).exposed,
            strict=True,
        )
        for bucket, row in zip(buckets, stamps, strict=True):
            rows.setdefault(bucket, []).append(row)
        sizes |= zip(buckets, step.comm_bytes, strict=True)
    worst = _worst(across.skew.buckets)
    medians = [[p50(column) for column in zip(*of_bucket, strict=True)] for of_bucket in rows.values()]
    by_figure = list(zip(*medians, strict=True)) or [()] * 4
    keys = [worst.get(bucket, NO_KEY) for bucket in rows]
    return _columns(across, tuple(rows), [sizes[bucket] for bucket in rows], by_figure, keys)


@lru_cache(maxsize=256)
def _buckets_of(keys: tuple[BucketKey, ...]) -> tuple[Bucket, ...]:
    return tuple(map(_bucket, keys))


def _columns(
    across: StepAcrossRanks,
    buckets: tuple[Bucket, ...],
    sizes: Sequence[int],
    medians: Sequence[Sequence[float | None]],
    keys: Sequence[BucketKey],
) -> BucketColumns:
    """Adds what comes of comparing the ranks, of the buckets with these keys."""
    bandwidths, skews = bus_bandwidths(across), list(map(across.skew.buckets.get, keys))
    return _compared(buckets, sizes, medians, skews, list(map(bandwidths.get, keys)))


def _compared(
    buckets: tuple[Bucket, ...],
    sizes: Sequence[int],
    medians: Sequence[Sequence[float | None]],
    skews: Sequence[BucketSkew | None],
    bandwidths: Sequence[float | None],
) -> BucketColumns:
    """Returns each bucket's size, medians (ready, launch, done, exposed), and what comparing the ranks gives."""
    ready, launch, done, exposed = medians
    return BucketColumns(
        buckets,
        sizes,
        ready,
        [at or 0.0 for at in launch],
        done,
        [None if skew is None else skew.transfer for skew in skews],
        [None if skew is None else skew.last - skew.first for skew in skews],
        exposed,
        bandwidths,
        [() if skew is None else skew.last_ranks for skew in skews],
    )


def _worst(compared: Mapping[BucketKey, BucketSkew]) -> dict[Bucket, BucketKey]:
    """Returns of each bucket the group whose ranks waited longest, in the first backward of the step."""
    found: dict[Bucket, BucketKey] = {}
    for key, skew in compared.items():
        before = compared.get(found.get(_bucket(key), key), skew)
        if key[2] == 0 and skew.last - skew.first >= before.last - before.first:
            found[_bucket(key)] = key
    return found


def _bucket(key: BucketKey) -> Bucket:
    return key[0], key[1], key[4]


def _since(origin: int, column: Sequence[int | None]) -> Sequence[int | None]:
    if None in column:
        return [None if at is None else at - origin for at in column]
    return [at - origin for at in cast("Sequence[int]", column)]


def _medians(columns: Sequence[Sequence[int | None]], origins: Sequence[int] = ()) -> list[float | None]:
    """Returns per bucket the median over the ranks, of a column per rank, which counts from the rank's origin."""
    unknown = [column.count(None) for column in columns]
    if min(unknown) == len(columns[0]):
        return [None] * len(columns[0])
    if len(columns) > 2 and not any(unknown):
        rows = np.array(columns, np.int64).T
        ordered = np.sort(rows - np.array(origins) if origins else rows)
        half, odd = divmod(len(columns), 2)
        middle: list[float | None] = (
            ordered[:, half] if odd else (ordered[:, half - 1] + ordered[:, half]) / 2
        ).tolist()
        return middle
    if origins:
        columns = list(map(_since, origins, columns))
    if any(unknown):
        return [p50(values) for values in zip(*columns, strict=True)]
    one, other = cast("Sequence[Sequence[int]]", (columns[0], columns[-1]))  # two ranks, or one
    return [(a + b) / 2 for a, b in zip(one, other, strict=True)]


_exposed = attrgetter("exposed")
