"""Who held up the others in a stall of which no launches are known: by the step's ends, or by heartbeats meanwhile."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.hangs.blame import Counts, behind, counts_of
from ddpwatch.analysis.diagnosis.hangs.stall import EARLY, Stall, TimedBeat
from ddpwatch.analysis.groups import Groups
from ddpwatch.sampling.stillness import SILENT_NS
from ddpwatch.wire.messages import Beat

_PHASES = {  # of a pause, by what heartbeats say
    "data": "data", "save": "checkpoint", "compile": "compilation", "validation": "validation", "input": "between",
}  # fmt: skip


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

    def by(self, across: StepAcrossRanks, excess_ns: int, gaps: Mapping[int, int]) -> int | None:
        """Returns the rank that the others waited for in a step; None if nothing shows it.

        Args:
            across: The step.
            excess_ns: How much longer than usual it took.
            gaps: How much lies between a rank's step before and this one, if something does: not in the others' steps.
        """
        if len(across) < 2:
            return None
        missing = _missing(across)
        ends = {rank: ns + across.ranks[rank].duration_ns for rank, ns in missing.items()}
        # The others can only end a step without a rank after its last collective
        found = _last_by(ends, across, excess_ns / 2)
        if found is not None:
            return found
        late = [rank for rank, ns in missing.items() if ns - gaps.get(rank, 0) >= excess_ns / 2]
        if len(late) == 1:
            return late[0]
        beats = self._beats_in(across)
        if (found := self._by_beats(across, beats, excess_ns)) is not None:
            return found
        slow = [
            rank
            for rank, seen in beats.items()
            if not any(missing.get(rank, 0) < at < excess_ns / 2 for at in _began(seen))
        ]
        if len(slow) != 1:  # else, the others are in theirs, and wait
            return None
        between = [gaps.get(slow[0], 0), *(at for at, beat in beats[slow[0]] if beat.phase == "input")]
        return slow[0] if max(between) >= excess_ns * EARLY else None

    def stall(self, across: StepAcrossRanks, excess_ns: int) -> Stall:
        """Returns what heartbeats show together of a step that took so much longer than usual."""
        return Stall(self._beats_in(across), self._groups, excess_ns)

    def doing(self, across: StepAcrossRanks, ranks: Sequence[int], excess_ns: int) -> str:
        """Returns what ranks did in a stall: a phase, by their heartbeats. Empty if these are not of one mind."""
        beats, found = self._beats_in(across), set()
        for rank in ranks:
            seen = [beat.activity or beat.phase for at, beat in beats[rank] if at >= excess_ns * EARLY]
            phases = Counter(_PHASES.get(name, "") for name in seen)
            found.add(max(phases, key=phases.__getitem__, default=""))
        return found.pop() if len(found) == 1 else ""

    def _by_beats(
        self, across: StepAcrossRanks, beats: Mapping[int, Sequence[TimedBeat]], excess_ns: int
    ) -> int | None:
        """Returns who had issued fewer collectives than all others, a usual step before or overdue, or sent nothing."""
        usual_ns, late = across.longest_ns - excess_ns, _missing(across)
        for which in (-1, 0):  # by its last heartbeat, or its first
            slow = self._behind({rank: found[which][1] for rank, found in beats.items() if found})
            if slow is None:
                continue
            left = (
                across.ranks[slow].duration_ns + late.get(slow, 0) - excess_ns // 2
            )  # then, half of the stall is still to come
            for at, beat in beats[slow]:
                before = _before(beats, slow, at - usual_ns)
                if 2 * usual_ns <= at <= left and self._level(meanwhile := _before(beats, slow, at)):
                    before = meanwhile  # overdue: it is late itself, and the others could not but wait for the rest
                if self._behind({slow: beat, **before}) == slow:
                    return slow
        silent = [
            rank
            for rank, step in across.ranks.items()
            if (end := step.duration_ns + late.get(rank, 0)) >= SILENT_NS + 2 * usual_ns
            and not any(usual_ns <= at <= end - usual_ns for at, _ in beats[rank])
        ]
        return silent[0] if len(silent) == 1 else None

    def _beats_in(self, across: StepAcrossRanks) -> dict[int, list[TimedBeat]]:
        """Returns the heartbeats of each rank in a step; times since it started, so that hosts' clocks do not matter.

        Of ranks that started it later than others, where that is known: since these did.
        """
        missing, found = _missing(across), {}
        for rank, step in across.ranks.items():
            start = step.start_ns - missing.get(rank, 0)
            beats = ((beat.at_ns - start, beat) for beat in self._beats.get(rank, ()))
            found[rank] = [(at, beat) for at, beat in beats if 0 <= at <= step.start_ns + step.duration_ns - start]
        return found

    def _level(self, beats: Mapping[int, Beat]) -> bool:
        """Returns whether all have issued as many collectives, by one heartbeat of each."""
        return bool(beats) and behind(self._counts(beats)) is None

    def _counts(self, beats: Mapping[int, Beat]) -> dict[int, Counts]:
        return {rank: counts_of(beat, self._groups.of_rank(rank)) for rank, beat in beats.items()}

    def _behind(self, beats: Mapping[int, Beat]) -> int | None:
        """Returns the rank that has issued the fewest collectives, by one heartbeat of each."""
        shown = behind(self._counts(beats))
        return next(iter(shown[1])) if shown is not None and shown[0] == "behind" and len(shown[1]) == 1 else None


def _before(beats: Mapping[int, Sequence[TimedBeat]], rank: int, before_ns: int) -> dict[int, Beat]:
    """Returns the newest heartbeat of each other rank before some time; none if that is not known of all."""
    others = {other: [beat for at, beat in found if at <= before_ns] for other, found in beats.items() if other != rank}
    return {other: found[-1] for other, found in others.items()} if all(others.values()) else {}


def _missing(across: StepAcrossRanks) -> dict[int, int]:
    """Returns how much later than the first rank each started a step; empty if that is not known (ns)."""
    starts = {rank: across.start_of(rank) for rank in across.ranks} if across.comparable else {}
    return {rank: start - min(starts.values()) for rank, start in starts.items()}


def _began(beats: Sequence[TimedBeat]) -> list[int]:
    """Returns by when a rank's forward had started, by each heartbeat that shows it.

    Where bare steps start before their forward does, as in a loop without a wrapper, that is when the step started.
    """
    in_step = [(at, beat) for at, beat in beats if beat.phase != "input"]
    return [at - beat.at_ns + beat.since_ns if beat.phase in ("", "forward") else at for at, beat in in_step]


def _last_by(at: Mapping[int, int], across: StepAcrossRanks, by_ns: float) -> int | None:
    """Returns the rank that is later than all others by so much."""
    if not at:
        return None
    last, before = sorted(at, key=at.__getitem__, reverse=True)[:2]
    error = sum(across.shifts[rank].error for rank in (last, before) if rank in across.shifts)
    return last if at[last] - at[before] - error >= by_ns else None
