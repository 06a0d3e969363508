"""The newest steps collective by collective: when each was launched and done, which rank came last, what was exposed.

A row is one of DDP's buckets; with FSDP2, a use of a parameter group; or a place in the job's own code that issues
collectives, mostly several a step. Those of one role are one row: groups that do the same on other ranks.

Times in ns. ready, launch and done count from the start of the rank's first backward, where others than DDP communicate
of its first forward. They and exposed are medians over the ranks of a step, then over the steps. Of several collectives
in a step, a place's bytes are the sum; transfer, wait and exposed how long any of them took that. ``docs/metrics.md``
defines transfer, wait and busbw.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple, cast

import numpy as np

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.groups import Role, RoleOf
from ddpwatch.analysis.launch_skew import BucketSkew, common_keys, the_only
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.analysis.step import BACKWARD_GATHER, USE_NAMES, BucketKey, BucketKeys, first_compute, starts_of
from ddpwatch.common.intervals import Intervals, total, total_within, union
from ddpwatch.common.statistics import p50
from ddpwatch.wire.messages import ALL_REDUCE, OWN_COLLECTIVES, CollectiveOp, LayoutKind

Bucket = tuple[int, int, str, Role]  # module, index, use, of which groups
_USES = ("", *USE_NAMES)
_Sized = tuple[BucketSkew, int]  # with its bytes
_Stamps = tuple[int, int, "int | None", "int | None", int]  # bytes, start, done, ready, launch of one collective
_RankRow = tuple["float | None", ...]  # see `_of_rank`
MOST_NAMED = 4  # ranks that may have been last
WORK_PER_CALL = 1024  # steps times ranks computed in one call, so that a large job does not freeze the screen


class BucketStep(NamedTuple):
    """One bucket in one step, over its ranks.

    ``per_step`` is how often it is communicated, ``wait`` the longest of any rank; ``busbw`` in bytes/s. ``last_ranks``
    may have launched last: of several collectives, the one that was waited for longest.
    """

    per_step: float
    nbytes: int | None
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
    """One bucket over the newest steps that have it: so many are ``steps``.

    ``name`` is that of a bucket's largest parameter, of a parameter group, or of a place that issues collectives.
    ``last_share`` says how often one of ``last_ranks`` launched last (0 to 1).
    """

    kind: LayoutKind
    module: int
    index: int
    use: str
    role: Role
    name: str
    per_step: float | None
    nbytes: int | None
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
        return self.module, self.index, self.use, self.role


class BucketTable:
    """Keeps its rows per step; each call computes some of the missing ones, newest first."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[Bucket, BucketStep]] = {}
        self._ranks: dict[int, int] = {}
        self._epochs: dict[int, int] = {}

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
            self._epochs[across.step] = epoch_of(across)
            budget -= len(across)
        self._ranks, self._epochs = (
            {step: one for step, one in known.items() if step in wanted} for known in (self._ranks, self._epochs)
        )
        return True

    def rows(self, layouts: Layouts) -> list[BucketSummary]:
        """Returns the buckets of the newest layouts, each over all steps that have it.

        They come by module, index and use; places that issue collectives by what they cost.
        """
        newest = newest_layouts((self._epochs[step], rows) for step, rows in self.steps.items())
        found = {b for step, rows in self.steps.items() for b in rows if self._epochs[step] == newest[b[0]]}
        return sorted([self._row(bucket, layouts) for bucket in sorted(found, key=_place)], key=_costliest)

    def history(self, bucket: Bucket) -> list[tuple[int, BucketStep]]:
        """Returns one bucket step by step, oldest first."""
        return [(step, rows[bucket]) for step, rows in sorted(self.steps.items()) if bucket in rows]

    def _row(self, bucket: Bucket, layouts: Layouts) -> BucketSummary:
        found = [step for _, step in self.history(bucket)]
        last = (step.last_ranks for step in found if step.last_ranks)
        placed = [step for step in found if step.done is not None] or found  # of others, only the launch is known
        last_ranks, last_share = most_often_last(Counter(r if len(r) <= MOST_NAMED else () for r in last))
        module, index, use, _ = bucket
        return BucketSummary(
            layouts.kind(module, use),
            *bucket,
            layouts.bucket_layer(index, module=module),
            per_step=p50(step.per_step for step in found),
            nbytes=found[-1].nbytes,
            ready=p50(step.ready for step in placed),
            launch=p50(step.launch for step in placed),
            done=p50(step.done for step in placed),
            transfer=p50(step.transfer for step in found),
            wait=p50(step.wait for step in found),
            exposed=p50(step.exposed for step in found),
            busbw=p50(step.busbw for step in found),
            last_ranks=last_ranks,
            last_share=last_share,
            steps=len(found),
        )


def _costliest(row: BucketSummary) -> tuple[int, float]:
    return row.module, cost_order(row.kind, row.exposed, row.wait)


def cost_order(kind: LayoutKind, exposed: float | None, wait: float | None) -> float:
    """Returns what sorts places that issue collectives, the costliest first, and leaves all else in its order."""
    return -(exposed if exposed is not None else wait or 0) if kind == "call" else 0


def epoch_of(across: StepAcrossRanks) -> int:
    """Returns the number of the layouts that a step's buckets are of."""
    return max(step.epoch for step in across.ranks.values())


def newest_layouts(steps: Iterable[tuple[int, Iterable[Bucket]]]) -> dict[int, int]:
    """Returns the number of each module's newest layout, of steps given by their layouts' number and their buckets."""
    newest: dict[int, int] = {}
    for epoch, buckets in steps:
        newest |= {module: max(newest.get(module, 0), epoch) for module, *_ in buckets}
    return newest


def _place(bucket: Bucket) -> tuple[int, int, int, Role]:
    """Returns where a bucket stands in a table: a parameter group is gathered before it is reduced."""
    module, index, use, role = bucket
    return module, index, _USES.index(use), role


def most_often_last(counts: Counter[tuple[int, ...]]) -> tuple[tuple[int, ...], float | None]:
    """Returns the ranks of which most often one was last, and in what share of the steps; none if that cannot be said.

    ``counts`` has () for more than `MOST_NAMED` ranks.
    """
    ranks, count = next(iter(counts.most_common(1)), ((), 0))
    return (ranks, count / counts.total()) if ranks else ((), None)


def busbw(nbytes: int, transfer_ns: float | None, ranks: int, op: CollectiveOp = ALL_REDUCE) -> float | None:
    """Returns bus bandwidth in bytes/s after nccl-tests; None without bytes or without a transfer.

    That is bytes / transfer times (n-1)/n, and twice that for an all-reduce, which moves everything twice. A broadcast
    and a reduce move all of the bytes once.
    """
    if not nbytes or not transfer_ns or transfer_ns < 0 or ranks < 2:
        return None
    whole = 1 if op in ("broadcast", "reduce") else (ranks - 1) / ranks
    return nbytes / transfer_ns * 1e9 * (2 if op == ALL_REDUCE else 1) * whole


def bus_bandwidths(
    across: StepAcrossRanks, compared: Mapping[BucketKey, BucketSkew] | None = None
) -> dict[BucketKey, float | None]:
    """Returns the `busbw` of every compared bucket of a step, or of some of them."""
    compared = across.skew.buckets if compared is None else compared
    return {key: _busbw(compared[key], nbytes, key) for key, nbytes in _sizes(across, compared).items()}


def _busbw(skew: BucketSkew | None, nbytes: int, key: BucketKey) -> float | None:
    return None if skew is None else busbw(nbytes, skew.transfer, skew.ranks, _op(key[4]))


def _sizes(across: StepAcrossRanks, compared: Collection[BucketKey]) -> dict[BucketKey, int]:
    """Returns the bytes of some of a step's buckets: those on the lowest rank of its group."""
    found: dict[BucketKey, int] = {}
    for rank in sorted(across.members):
        if len(found) == len(compared):
            break
        for key, nbytes in zip(across.facts_of(rank).keys, across.ranks[rank].comm_bytes, strict=False):
            if key not in found and key in compared:
                found[key] = nbytes
    return found


def _op(use: str) -> CollectiveOp:
    return "all_gather" if use == BACKWARD_GATHER else cast("CollectiveOp", use or ALL_REDUCE)


class BucketColumns(NamedTuple):
    """The buckets of one step, and per bucket what `BucketStep` has."""

    buckets: tuple[Bucket, ...]
    per_step: Sequence[float]
    nbytes: Sequence[int | None]
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
    buckets = () if keys is None else _buckets_of(keys, tuple(map(across.role_of, keys.groups)))
    if keys is None or keys.mixed or len(set(buckets)) < len(keys):
        return _summed_columns(across)
    steps, ranks = [across.ranks[rank] for rank in facts], facts.values()
    origins = list(map(first_compute, steps))
    since = [fact.origin + origin for fact, origin in zip(ranks, origins, strict=True)]
    skews = list(map(across.skew.buckets.get, keys))
    sizes = across.ranks[min(facts)].comm_bytes
    return BucketColumns(
        buckets,
        [1] * len(keys),
        [nbytes or None for nbytes in steps[-1].comm_bytes],
        _medians([step.comm_ready for step in steps], origins),
        [at or 0.0 for at in _medians([fact.launch for fact in ranks], since)],
        _medians([fact.done for fact in ranks], since),
        [None if skew is None else skew.transfer for skew in skews],
        [None if skew is None else _waited(skew) for skew in skews],
        _medians([fact.exposed for fact in ranks]),
        [_busbw(skew, nbytes, key) for skew, nbytes, key in zip(skews, sizes, keys, strict=True)],
        [() if skew is None else skew.last_ranks for skew in skews],
    )


def _summed_columns(across: StepAcrossRanks) -> BucketColumns:
    """Returns the same for ranks that launched different buckets, or one of them several times."""
    rows: dict[Bucket, list[_RankRow]] = {}
    for rank, step in across.ranks.items():
        facts, own = across.facts_of(rank), dict[Bucket, list[_Stamps]]()
        stamps = zip(step.comm_bytes, starts_of(step), step.comm_done, step.comm_ready, step.comm_launch, strict=True)
        for key, row in zip(facts.keys, stamps, strict=True):
            own.setdefault(_bucket(key, across.role_of), []).append(row)
        for bucket, found in own.items():
            whole = bucket[0] == OWN_COLLECTIVES  # a bucket has a size, however often it is reduced
            origin = first_compute(step, own=whole)
            rows.setdefault(bucket, []).append(_of_rank(found, facts.figures.exposed, origin, whole))
    skews = _skews(across)
    summed = [_over_ranks(ranks, skews.get(bucket, ()), _op(bucket[2])) for bucket, ranks in rows.items()]
    return BucketColumns(tuple(rows), *(zip(*summed, strict=True) if summed else repeat((), len(BucketStep._fields))))


def _of_rank(collectives: Sequence[_Stamps], exposed: Intervals, origin: int, whole: bool) -> _RankRow:
    """Returns one rank's collectives of a bucket: count, bytes, exposed, and medians of ready, launch and done."""
    sizes, starts, done, *stamps = zip(*collectives, strict=True)
    flown = None if None in done else union(zip(starts, cast("tuple[int, ...]", done), strict=True))
    return (
        len(collectives),
        sum(sizes) if whole else max(sizes),
        None if flown is None else sum(total_within(exposed, start, end) for start, end in flown),
        *(p50(_since(origin, column)) for column in (*stamps, done)),
    )


def _over_ranks(ranks: Sequence[_RankRow], skews: Sequence[_Sized], op: CollectiveOp) -> BucketStep:
    """Returns a bucket of the ranks that launched it, and of its collectives that could be compared."""
    per_step, nbytes, exposed, ready, launch, done = map(p50, zip(*ranks, strict=True))
    step = BucketStep(
        per_step or 0, int(nbytes or 0) or None, ready, launch or 0.0, done, None, None, exposed, None, ()
    )
    if not skews:
        return step
    longest = max((skew for skew, _ in skews), key=_waited)
    transfers = [None if skew.transfer is None else (skew.last, skew.last + skew.transfer) for skew, _ in skews]
    transfer = None if None in transfers else total(union(filter(None, transfers)))
    return step._replace(
        transfer=transfer,
        wait=total(union((skew.first, skew.last) for skew, _ in skews)),
        busbw=busbw(sum(nbytes for _, nbytes in skews), transfer, longest.ranks, op),
        last_ranks=longest.last_ranks if longest.last > longest.first else (),
    )


def _skews(across: StepAcrossRanks) -> dict[Bucket, list[_Sized]]:
    """Returns each bucket's compared collectives, with their bytes, in the group whose ranks waited longest."""
    found: dict[Bucket, dict[int, list[_Sized]]] = {}
    sizes = _sizes(across, across.skew.buckets)
    for key, skew in across.skew.buckets.items():
        of_bucket = found.setdefault(_bucket(key, across.role_of), {})
        of_bucket.setdefault(key[3], []).append((skew, sizes[key]))
    return {bucket: max(groups.values(), key=_all_waited) for bucket, groups in found.items()}


def _all_waited(skews: Sequence[_Sized]) -> int:
    return sum(_waited(skew) for skew, _ in skews)


def _waited(skew: BucketSkew) -> int:
    return skew.last - skew.first


@lru_cache(maxsize=256)
def _buckets_of(keys: BucketKeys, roles: tuple[Role, ...]) -> tuple[Bucket, ...]:
    """Returns the buckets with these keys, whose groups have these roles."""
    of_group = dict(zip(keys.groups, roles, strict=True))
    return tuple(_bucket(key, of_group.__getitem__) for key in keys)


def _bucket(key: BucketKey, role_of: RoleOf) -> Bucket:
    return key[0], key[1], key[4], role_of(key[3])


def _medians(columns: Sequence[Sequence[int | None]], origins: Sequence[int] = ()) -> list[float | None]:
    """Returns per bucket the median over the ranks, of a column per rank, which counts from the rank's origin."""
    try:
        known = [array("q", cast("Sequence[int]", column)) for column in columns]  # takes no None
    except TypeError:
        return _known_medians(columns, origins)
    if len(known) < 3:
        both = origins[0] + origins[-1] if origins else 0
        return [(a + b - both) / 2 for a, b in zip(known[0], known[-1], strict=True)]
    rows = np.frombuffer(b"".join(known), np.int64).reshape(len(known), len(known[0])).T
    ordered = np.sort(rows - np.array(origins) if origins else rows)
    half, odd = divmod(len(columns), 2)
    middle: list[float | None] = (ordered[:, half] if odd else (ordered[:, half - 1] + ordered[:, half]) / 2).tolist()
    return middle


def _known_medians(columns: Sequence[Sequence[int | None]], origins: Sequence[int]) -> list[float | None]:
    """Returns the same of what is known."""
    if all(column.count(None) == len(column) for column in columns):
        return [None] * len(columns[0])
    if origins:
        columns = list(map(_since, origins, columns))
    return [p50(values) for values in zip(*columns, strict=True)]


def _since(origin: int, column: Sequence[int | None]) -> Sequence[int | None]:
    return [None if at is None else at - origin for at in column]
