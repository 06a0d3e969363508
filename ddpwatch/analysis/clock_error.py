"""How far the stamps of a group's ranks may be off against each other, and what can be said all the same.

A rank's own error comes from a GPU that stamps in place of the host's clock. A clock's error is that of its offset. It
is the same for all stamps of that clock: it cancels between its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ddpwatch.analysis.clocks import Clock, Shift

Shifts = Mapping[int, Shift]  # by rank; empty if all ranks stamp with one clock
NO_SHIFTS: Shifts = {}
_ONE_CLOCK = Shift(("", ""), ("", ""), 0, 0)


def on_one_time_line(ranks: Collection[int], shifts: Shifts) -> bool:
    """Whether all these ranks, which stamp with several clocks, are on a common time line."""
    return all(rank in shifts for rank in ranks) and len({shifts[rank].root for rank in ranks}) == 1


class ClockErrors:
    """The errors of ranks on one time line (ns).

    Args:
        own: Per rank in ascending order, how far its stamps may be off on its own clock.
        shifts: The ranks' clocks.

    Attributes:
        ranks: Per rank, how far its stamps may be off on the time line.
        joint: How far two of the ranks may be off against each other, at most.
    """

    def __init__(self, own: Mapping[int, int], shifts: Shifts) -> None:
        self._own = own
        self._shifts = {rank: shifts.get(rank, _ONE_CLOCK) for rank in own}
        self.ranks = {rank: error + self._shifts[rank].error for rank, error in own.items()}
        clocks = {shift.clock: shift.error for shift in self._shifts.values()}
        self.joint = _largest_two(own.values()) + (_largest_two(clocks.values()) if len(clocks) > 1 else 0)

    def may_be_last(self, stamps: Sequence[int]) -> tuple[int, ...]:
        """The ranks whose stamp may be the last, given one per rank."""
        latest: dict[Clock, int] = {}  # per clock, a time on it before which no rank can have been last
        for (rank, own), at in zip(self._own.items(), stamps, strict=True):
            clock = self._shifts[rank].clock
            latest[clock] = max(latest.get(clock, at - own), at - own)
        errors = {shift.clock: shift.error for shift in self._shifts.values()}
        of_all = max(at - errors[clock] for clock, at in latest.items())
        found = []
        for (rank, own), at in zip(self._own.items(), stamps, strict=True):
            shift = self._shifts[rank]
            if at + own >= latest[shift.clock] and at + own + shift.error >= of_all:
                found.append(rank)
        return tuple(found)


def _largest_two(errors: Iterable[int]) -> int:
    return sum(sorted(errors)[-2:])
