"""How far the stamps of a group's ranks may be off against each other, and what can be said all the same.

A rank's own error comes from a GPU that stamps in place of the host's clock. A clock's error is that of its offset. It
is the same for all stamps of that clock: it cancels between its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ddpwatch.analysis.clocks import Clock, Shift

Shifts = Mapping[int, Shift]  # by rank; empty if all ranks stamp with one clock
NO_SHIFTS: Shifts = {}
_NEVER = 1 << 70  # beyond any stamp
_ONE_CLOCK = Shift(("", ""), ("", ""), 0, 0)


def on_one_time_line(ranks: Collection[int], shifts: Shifts) -> bool:
    """Returns whether all these ranks, which stamp with several clocks, are on a common time line."""
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
        found = {rank: shifts.get(rank, _ONE_CLOCK) for rank in own}
        self._clocks = {shift.clock: shift.error for shift in found.values()}
        self._rows = [(rank, error, found[rank].clock, found[rank].error) for rank, error in own.items()]
        self.ranks = {rank: error + of_clock for rank, error, _, of_clock in self._rows}
        self.joint = _largest_two(own.values())
        if len(self._clocks) > 1:
            self.joint += _largest_two(self._clocks.values())

    def may_be_last(self, stamps: Sequence[int]) -> tuple[int, ...]:
        """Returns the ranks whose stamp may be the last, given one per rank."""
        latest: dict[Clock, int] = {}  # per clock, a time on it before which no rank can have been last
        for (_, own, clock, _), at in zip(self._rows, stamps, strict=True):
            if at - own > latest.get(clock, -_NEVER):
                latest[clock] = at - own
        of_all = max([at - self._clocks[clock] for clock, at in latest.items()])
        rows = zip(self._rows, stamps, strict=True)
        return tuple(
            [
                rank
                for (rank, own, clock, of_clock), at in rows
                if at + own >= latest[clock] and at + own + of_clock >= of_all
            ]
        )


def _largest_two(errors: Iterable[int]) -> int:
    return sum(sorted(errors)[-2:])
