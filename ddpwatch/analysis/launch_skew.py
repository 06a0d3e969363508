"""The launches of one step compared over its ranks: who launched a bucket late, who waited, how long the transfer took.

A raw collective duration is never called network time: on the first rank most of it is waiting for the last one. Only
ranks of one group are compared, if all of its members have sent the step and share a time line: a last rank that nobody
watches would look like a long transfer. Ranks share a time line if they stamp with one clock, or if the offsets of
their clocks are bounded (`ddpwatch.analysis.clocks`). Then what is compared has an error.

A rank's facts are computed once, and ranks compared column by column, as a job may have a thousand of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ddpwatch.analysis.clock_error import NO_SHIFTS, ClockErrors, Shifts, on_one_time_line
from ddpwatch.analysis.groups import Members
from ddpwatch.analysis.step import BucketKey, BucketKeys, StepFigures, bucket_keys, buffer_waits, starts_of
from ddpwatch.common.intervals import Intervals, total_within
from ddpwatch.wire.messages import DEFAULT_GROUP, Step

Stamps = npt.NDArray[np.int64]
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
        origin: When the step started, on the common time line (ns).
        waits: When it waited for a collective before it launched others, from the step's start: with FSDP2 for
            parameters, with DDP for buffers. Other waits of DDP's come after the launches.
    """

    figures: StepFigures
    keys: BucketKeys
    seqs: tuple[int | None, Sequence[int]]
    launch: array[int]
    start: array[int]
    done: Sequence[int | None]
    exposed: tuple[int | None, ...]
    cost: float | None
    clock_error: int
    origin: int
    waits: Intervals


def rank_facts(step: Step, found: StepFigures, offset: int = 0) -> RankFacts:
    """Computes one rank's share of a step from its figures. ``offset`` puts it onto the common time line (ns)."""
    origin, starts, unknown = step.start_ns + offset, step.comm_launch, _unknown(len(step.comm_done))
    done = _absolute(step.comm_done, origin)
    launch = start = array("q", [origin + at for at in starts])
    if step.comm_start:
        starts = starts_of(step)
        start = array("q", [origin + at for at in starts])
    return RankFacts(
        found,
        bucket_keys(step),
        (step.comm_first_seq, step.comm_seq),
        launch,
        start,
        done,
        unknown if done is unknown else _exposed(starts, step.comm_done, found.exposed),
        (step.own_ns + step.sender_ns) / step.duration_ns if step.duration_ns else None,
        step.clock_error_ns or 0,
        origin,
        found.exposed if step.comm_wait_begin else buffer_waits(step),
    )


def _absolute(done: Sequence[int | None], start: int) -> Sequence[int | None]:
    if None not in done:
        return array("q", [start + end for end in cast("Sequence[int]", done)])
    if done.count(None) == len(done):
        return _unknown(len(done))
    return tuple([None if end is None else start + end for end in done])


@lru_cache(maxsize=256)
def _unknown(count: int) -> tuple[None, ...]:
    """Returns the column of a rank whose completions were not measured, as in most steps."""
    return (None,) * count


def _exposed(starts: Sequence[int], done: Sequence[int | None], exposed: Intervals) -> tuple[int | None, ...]:
    """Returns how much of each bucket's [start, done] is exposed.

    Most buckets end before the first exposed interval.
    """
    first = exposed[0][0] if exposed else math.inf
    buckets = zip(starts, done, strict=True)
    return tuple(
        [None if end is None else 0 if end <= first else total_within(exposed, start, end) for start, end in buckets]
    )


def common_keys(facts: Iterable[RankFacts]) -> BucketKeys | None:
    """Returns the buckets of ranks that all launched alike; None if they did not, or without a rank."""
    found = None
    for fact in facts:
        if fact.keys is not found:
            if found is not None:
                return None
            found = fact.keys
    return found


def least_exposed(facts: Collection[RankFacts]) -> dict[BucketKey, int]:
    """Returns per bucket what is exposed on the rank that waits least, as that is its transfer (ns).

    Nothing of ranks that did not all launch alike. What is not known, as of some of the job's own, counts as 0.
    """
    if not (keys := common_keys(facts)):
        return {}
    columns = zip(*[fact.exposed for fact in facts], strict=True)
    return dict(zip(keys, [min([ns or 0 for ns in column]) for column in columns], strict=True))


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
    """Returns the only rank; None if there are several, or none."""
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
    """Returns the members of a group, where no rank has named any."""
    return None


def launch_skew(
    facts: Mapping[int, RankFacts], members: Members = nobody_known, shifts: Shifts = NO_SHIFTS
) -> LaunchSkew:
    """Compares the buckets that every rank of their group launched; empty for a single rank.

    The default group, if its members are not known, has all ranks of ``facts``. Any other group is then left out.
    """
    groups: Sequence[int]
    if (common := common_keys(facts.values())) is not None:
        groups = common.groups
    else:
        distinct = {id(fact.keys): fact.keys for fact in facts.values()}
        groups = list(dict.fromkeys(group for keys in distinct.values() for group in keys.groups))
    if len(groups) == 1:
        return _group_skew(facts, groups[0], members, shifts)
    skews = [_group_skew(facts, group, members, shifts) for group in groups]
    found = LaunchSkew({}, {}, {}, {}, {}, max((skew.error for skew in skews), default=0))
    for group, skew in zip(groups, skews, strict=True):
        found.buckets.update(skew.buckets)
        found.errors.update(skew.errors)
        for rank in skew.late:
            found.late[rank] = max(found.late.get(rank, 0), skew.late[rank])
            found.wait[rank] = max(found.wait.get(rank, 0), skew.wait[rank])
            if rank not in found.peers or facts[rank].keys[0][3] == group:
                found.peers[rank] = skew.peers[rank]
    return found


def _group_skew(facts: Mapping[int, RankFacts], group: int, members: Members, shifts: Shifts) -> LaunchSkew:
    """Compares the buckets of one group; empty if a member has not sent the step, or is on another time line."""
    known = members(group)
    if known is None and group == DEFAULT_GROUP:
        known = tuple(sorted(facts))
    if known is None or len(known) < 2 or not all(map(facts.__contains__, known)):
        return NO_SKEW
    if shifts and not on_one_time_line(known, shifts):
        return NO_SKEW
    if len(known) < len(facts):
        facts = {rank: facts[rank] for rank in known}
    keys = _common_keys(facts, group)
    return _skew_of(facts, keys, shifts) if keys else NO_SKEW


def _skew_of(facts: Mapping[int, RankFacts], keys: tuple[BucketKey, ...], shifts: Shifts) -> LaunchSkew:
    """Compares two ranks or more."""
    ranks = tuple(sorted(facts))
    found = [facts[rank] for rank in ranks]
    launches = _matrix([fact.launch for fact in found], found, keys)
    first, last = np.minimum.reduce(launches), np.maximum.reduce(launches)  # over the ranks
    last_ranks: list[tuple[int, ...]] = [(ranks[place],) for place in launches.argmax(axis=0).tolist()]
    transfers = _transfers(found, keys, _last_starts(found, keys, last))
    errors, error = dict[int, int](), 0
    if shifts or any(map(_clock_error, found)):
        known = ClockErrors({rank: facts[rank].clock_error for rank in ranks}, shifts)
        errors, error = known.ranks, known.joint
        last_ranks = [known.may_be_last(column) for column in launches.T.tolist()]
        transfers = [None if transfer is None or transfer <= error else transfer for transfer in transfers]
    rows = map(BucketSkew, first.tolist(), last.tolist(), last_ranks, repeat(len(ranks)), transfers)
    return LaunchSkew(
        dict(zip(keys, rows, strict=True)),
        dict(zip(ranks, np.maximum.reduce(launches - first, axis=1).tolist(), strict=True)),
        dict(zip(ranks, np.maximum.reduce(last - launches, axis=1).tolist(), strict=True)),
        dict.fromkeys(ranks, ranks),
        errors,
        error,
    )


_clock_error = attrgetter("clock_error")


def _common_keys(facts: Mapping[int, RankFacts], group: int) -> tuple[BucketKey, ...]:
    """Returns the group's keys that all ranks have for the same collectives, in launch order of the lowest rank."""
    lowest = facts[min(facts)]
    keys, seqs = lowest.keys, lowest.seqs
    if False not in [fact.keys is keys and fact.seqs == seqs for fact in facts.values()]:
        return keys.compared if keys.groups == (group,) else _of_group(keys.compared, group)
    shared = set(_numbered_keys(lowest)).intersection(*map(_numbered_keys, facts.values()))
    same = {key for key, seq in _numbered_keys(lowest) if (key, seq) in shared}
    return _of_group(tuple(key for key in keys.compared if key in same), group)


def _of_group(keys: tuple[BucketKey, ...], group: int) -> tuple[BucketKey, ...]:
    return tuple(key for key in keys if key[3] == group)


def _numbered_keys(fact: RankFacts) -> list[tuple[BucketKey, int | None]]:
    """Returns the keys with the sequence numbers of their collectives, where they are known."""
    first, offsets = fact.seqs
    if first is None or not offsets:
        return [(key, None) for key in fact.keys]
    return [(key, first + offset) for key, offset in zip(fact.keys, offsets, strict=True)]


def _matrix(columns: Sequence[array[int]], found: Sequence[RankFacts], keys: tuple[BucketKey, ...]) -> Stamps:
    """Returns a row per rank of one of their columns, reduced to the given buckets in their order."""
    if False in [fact.keys is keys for fact in found]:
        columns = [array("q", _aligned(column, fact, keys)) for column, fact in zip(columns, found, strict=True)]
    return np.frombuffer(b"".join(columns), np.int64).reshape(len(found), len(keys))


def _aligned(column: Sequence[_Stamp], fact: RankFacts, keys: tuple[BucketKey, ...]) -> Sequence[_Stamp]:
    """Returns one of a rank's columns, reduced to the given buckets in their order."""
    if fact.keys is keys or fact.keys == keys:
        return column
    positions = {key: position for position, key in enumerate(fact.keys)}
    return [column[positions[key]] for key in keys]


def _last_starts(found: Sequence[RankFacts], keys: tuple[BucketKey, ...], launches: Stamps) -> Stamps:
    """Returns per bucket the latest start, which is the latest launch where no start is known."""
    if False not in [fact.start is fact.launch for fact in found]:
        return launches
    starts: Stamps = np.maximum.reduce(_matrix([fact.start for fact in found], found, keys))
    return starts


def _transfers(found: Sequence[RankFacts], keys: tuple[BucketKey, ...], last: Stamps) -> list[int | None]:
    rows = [fact.done for fact in found]
    if False not in [isinstance(row, array) for row in rows]:
        done = np.maximum.reduce(_matrix(cast("list[array[int]]", rows), found, keys))
        transfers: list[int | None] = (done - last).tolist()
        return transfers
    if any(row is _unknown(len(row)) for row in rows):
        return [None] * len(keys)
    columns = zip(*[_aligned(fact.done, fact, keys) for fact in found], strict=True)
    return [
        None if None in done else max(cast("tuple[int, ...]", done)) - at
        for done, at in zip(columns, last.tolist(), strict=True)
    ]
