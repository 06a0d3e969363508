"""What a collective does while it is in flight on a rank: it waits for the last rank's launch, then data travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import LaunchSkew, RankFacts
from ddpwatch.analysis.step import starts_of
from ddpwatch.common.intervals import Intervals, intersect, subtract
from ddpwatch.wire.messages import Step


class Flight(NamedTuple):
    """One collective of one rank (ns from the start of the rank's step).

    Attributes:
        start: Its start, which is its launch where the start is not known.
        transfer: The last launch on any rank, but not before ``start`` or after ``done``. Until then the collective
            waits.
        done: Its completion.
        last_rank: The rank that launched last; None if ranks cannot be compared, or several may have been last. Then
            ``transfer`` is ``start``.
    """

    start: int
    transfer: int
    done: int
    last_rank: int | None

    @property
    def wait_ns(self) -> int:
        """How long it waits."""
        return self.transfer - self.start


def flights(step: Step, facts: RankFacts, skew: LaunchSkew) -> list[Flight | None]:
    """Returns a rank's collectives in launch order; None for one whose completion was not measured.

    Args:
        step: The rank's step.
        facts: The rank's share of it.
        skew: The launches of that step, compared over the ranks.
    """
    buckets = map(skew.buckets.get, facts.keys)
    columns = zip(buckets, facts.launch, step.comm_launch, starts_of(step), step.comm_done, strict=True)
    found: list[Flight | None] = []
    for bucket, launched, launch, start, done in columns:
        if done is None:
            found.append(None)
        elif bucket is None or bucket.last_rank is None:
            found.append(Flight(start, start, done, None))
        else:
            last = launch + bucket.last - launched
            transfer = start if last < start or done < start else done if last > done else last
            found.append(Flight(start, transfer, done, bucket.last_rank))
    return found


def split_exposed(exposed: Intervals, collectives: Sequence[Flight | None]) -> list[tuple[int, int, int | None]]:
    """Divides exposed communication into (start, end, the rank waited for); None while data travels, or if not known.

    A rank waits while any of its collectives does, even if data of an earlier one travels: however fast that is, the
    rank cannot go on before the last one has launched. Of several that wait, the one launched last decides for whom.

    Args:
        exposed: Of a rank's step.
        collectives: Of the same step, in launch order.
    """
    found: list[tuple[int, int, int | None]] = []
    rest = exposed
    for flight in reversed(collectives):
        if flight is not None and flight.wait_ns:
            waits = [(flight.start, flight.transfer)]
            found += [(start, end, flight.last_rank) for start, end in intersect(rest, waits)]
            rest = subtract(rest, waits)
    return sorted(found + [(start, end, None) for start, end in rest], key=lambda stretch: stretch[0])
