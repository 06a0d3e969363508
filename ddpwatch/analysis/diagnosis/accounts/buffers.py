"""Waits for DDP's broadcast of buffers, at the start of a forward: for whom, and how long.

Rank 0 sends its buffers on, so ranks that come before it wait for it. With Gloo, it also waits for those to which it
sends. A rank that waits there launches its buckets late, but is not late itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.step import buffer_waits
from ddpwatch.common.intervals import Intervals, intersect, subtract, total, total_within

NOBODY = -1  # waited for whichever of several ranks was last: their clocks do not show which


class BufferWait(NamedTuple):
    """One rank's waits for buffers in a step. Times are absolute (ns).

    Attributes:
        awaited: Whom it waited for: the rank that reached the broadcast last before this one went on. Itself if it
            waited for nobody, or if nobody can be compared with it; `NOBODY` if clocks do not show who that was.
        came: When ``awaited`` reached the broadcast.
        times: When this rank waited.
    """

    awaited: int
    came: int
    times: Intervals

    def split(self, exposed: Intervals) -> tuple[int, int, Intervals]:
        """Splits exposed communication: waits for another rank, transfer of buffers (ns), and the rest."""
        inside = intersect(exposed, self.times)
        waited = total_within(inside, self.times[0][0], self.came)
        return waited, total(inside) - waited, subtract(exposed, self.times)

    def explains(self, late_ns: int) -> bool:
        """Returns whether the wait is most of what the rank is late by."""
        return 2 * (self.came - self.times[0][0]) >= late_ns > 0


def waits_for_buffers(across: StepAcrossRanks) -> dict[int, BufferWait]:
    """Returns the waits per rank. Of a step, only the first broadcast is compared; what others take is transfer."""
    waits: dict[int, Intervals] = {}
    waiting = [(rank, facts) for rank, facts in across.all_facts().items() if facts.waits]
    for rank, facts in waiting:
        if times := buffer_waits(across.ranks[rank]):
            waits[rank] = [(facts.origin + since, facts.origin + until) for since, until in times]
    if not waits:
        return {}
    found = {rank: BufferWait(rank, times[0][0], times) for rank, times in waits.items()}
    peers, error = across.skew.peers, across.skew.error  # of one group, on one time line
    for group in {id(ranks): ranks for ranks in peers.values()}.values():
        came = sorted((waits[rank][0][0], -rank) for rank in group if rank in waits)
        for rank in group:
            if rank in waits and peers[rank] is group:
                went_on = waits[rank][0][1]
                at, awaited = came[bisect_right(came, (went_on, 0)) - 1]
                candidates = bisect_right(came, (went_on + error, 0)) - bisect_left(came, (at - error, -math.inf))
                sure = not error or candidates == 1
                found[rank] = BufferWait(-awaited if sure else NOBODY, at, waits[rank])
    return found
