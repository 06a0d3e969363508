"""Who held up the others in a stall of which no launches are known: by the step's ends, or by heartbeats meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.hangs.blame import Counts, behind, counts_of
from ddpwatch.analysis.groups import Groups
from ddpwatch.sampling.stillness import SILENT_NS
from ddpwatch.wire.messages import Beat, Step

_Beat = tuple[int, Beat]  # and when it was, since the step started (ns)


class HeldUp:
    """Keeps the ranks' newest heartbeats.

    Args:
        groups: Their process groups, kept up to date by the caller.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._beats: dict[int, deque[Beat]] = {}

    def add_beat(self, beat: Beat) -> None:
        """Takes a rank's next heartbeat."""
        if beat.rank not in self._beats:
            # Per rank, the newest: about eight seconds; of what lasts longer, the hang says who it was
            self._beats[beat.rank] = deque(maxlen=16)
        self._beats[beat.rank].append(beat)

    def by(self, across: StepAcrossRanks, excess_ns: int) -> int | None:
        """Returns the rank that the others waited for in a step; None if nothing shows it.

        Args:
            across: The step.
            excess_ns: How much longer than usual it took.
        """
        if len(across) < 2:
            return None
        found = _by_ends(across, excess_ns) if across.comparable else None
        return self._by_beats(across, across.longest_ns - excess_ns, excess_ns) if found is None else found

    def _by_beats(self, across: StepAcrossRanks, usual_ns: int, excess_ns: int) -> int | None:
        """Returns who had issued fewer collectives than all others, a usual step before or overdue, or sent nothing."""
        beats = {rank: self._beats_in(step) for rank, step in across.ranks.items()}
        for which in (-1, 0):  # by its last heartbeat, or its first
            slow = self._behind({rank: found[which][1] for rank, found in beats.items() if found})
            if slow is None:
                continue
            left = across.ranks[slow].duration_ns - excess_ns // 2  # then, half of the stall is still to come
            for at, beat in beats[slow]:
                before = _before(beats, slow, at - usual_ns)
                if 2 * usual_ns <= at <= left and self._level(meanwhile := _before(beats, slow, at + usual_ns)):
                    before = meanwhile  # overdue: it is late itself, and the others could not but wait for the rest
                if self._behind({slow: beat, **before}) == slow:
                    return slow
        silent = [
            rank
            for rank, step in across.ranks.items()
            if step.duration_ns >= SILENT_NS + 2 * usual_ns
            and not any(usual_ns <= at <= step.duration_ns - usual_ns for at, _ in beats[rank])
        ]
        return silent[0] if len(silent) == 1 else None

    def _beats_in(self, step: Step) -> list[_Beat]:
        """Returns a rank's heartbeats in a step; times since it started, so that hosts' clocks do not matter."""
        beats = ((beat.at_ns - step.start_ns, beat) for beat in self._beats.get(step.rank, ()))
        return [(at, beat) for at, beat in beats if 0 <= at <= step.duration_ns]

    def _level(self, beats: Mapping[int, Beat]) -> bool:
        """Returns whether all have issued as many collectives, by one heartbeat of each."""
        return bool(beats) and behind(self._counts(beats)) is None

    def _counts(self, beats: Mapping[int, Beat]) -> dict[int, Counts]:
        return {rank: counts_of(beat, self._groups.of_rank(rank)) for rank, beat in beats.items()}

    def _behind(self, beats: Mapping[int, Beat]) -> int | None:
        """Returns the rank that has issued the fewest collectives, by one heartbeat of each."""
        shown = behind(self._counts(beats))
        return next(iter(shown[1])) if shown is not None and shown[0] == "behind" and len(shown[1]) == 1 else None


def _before(beats: Mapping[int, Sequence[_Beat]], rank: int, before_ns: int) -> dict[int, Beat]:
    """Returns the newest heartbeat of each other rank before some time; none if that is not known of all."""
    others = {other: [beat for at, beat in found if at <= before_ns] for other, found in beats.items() if other != rank}
    return {other: found[-1] for other, found in others.items()} if all(others.values()) else {}


def _by_ends(across: StepAcrossRanks, excess_ns: int) -> int | None:
    """Returns the rank that ended the step last by half of the stall, or else started it last by that.

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
