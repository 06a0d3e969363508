"""Who held up the others in a stall of which no launches are known: by the step's ends, or by heartbeats meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.blame import behind, counts_of
from ddpwatch.analysis.groups import Groups
from ddpwatch.messages import Beat

KEEP_BEATS = 16  # per rank, the newest: about eight seconds; of what lasts longer, the hang says who it was
SILENT_NS = 1_500_000_000  # two heartbeats are missing then


class HeldUp:
    """Keeps the ranks' newest heartbeats.

    Args:
        groups: Their process groups, kept up to date by the caller.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._beats: dict[int, deque[Beat]] = {}

    def beat(self, beat: Beat) -> None:
        """Takes a rank's next heartbeat."""
        if beat.rank not in self._beats:
            self._beats[beat.rank] = deque(maxlen=KEEP_BEATS)
        self._beats[beat.rank].append(beat)

    def by(self, across: StepAcrossRanks, excess_ns: int) -> int | None:
        """The rank that the others waited for in a step; None if nothing shows it.

        Args:
            across: The step.
            excess_ns: How much longer than usual it took.
        """
        if len(across) < 2:
            return None
        found = _by_ends(across, excess_ns) if across.comparable else None
        return self._by_beats(across, across.longest_ns - excess_ns) if found is None else found

    def _by_beats(self, across: StepAcrossRanks, usual_ns: int) -> int | None:
        """Who had issued the fewest collectives all the time, or sent nothing.

        What ranks do at a step's usual pace, before and after the stall, does not count.
        """
        first: dict[int, Beat] = {}
        last: dict[int, Beat] = {}
        silent: list[int] = []
        for rank, step in across.ranks.items():
            since, until = step.start_ns + usual_ns, step.start_ns + step.duration_ns - usual_ns
            beats = [beat for beat in self._beats.get(rank, ()) if since <= beat.at_ns <= until]
            if beats:
                first[rank], last[rank] = beats[0], beats[-1]
            elif until - since >= SILENT_NS:
                silent.append(rank)
            else:
                return None
        slow = self._behind(first)
        if slow is not None or len(silent) != 1:
            return slow if slow == self._behind(last) else None
        return silent[0]

    def _behind(self, beats: Mapping[int, Beat]) -> int | None:
        found = behind({rank: counts_of(beat, self._groups.of_rank(rank)) for rank, beat in beats.items()})
        if found is None or found[0] != "behind" or len(found[1]) != 1:
            return None
        return next(iter(found[1]))


def _by_ends(across: StepAcrossRanks, excess_ns: int) -> int | None:
    """The rank that ended the step last by half of the stall, or else started it last by that.

    The others can only end a step without a rank after its last collective, and only wait for one that is not there.
    """
    starts = {rank: across.start_of(rank) for rank in across.ranks}
    ends = {rank: starts[rank] + step.duration_ns for rank, step in across.ranks.items()}
    for at in (ends, starts):
        last, before = sorted(at, key=at.__getitem__, reverse=True)[:2]
        error = sum(across.shifts[rank].error for rank in (last, before) if rank in across.shifts)
        if at[last] - at[before] - error >= excess_ns / 2:
            return last
    return None
