"""A stall by the heartbeats in it: who had issued fewer collectives, and what the others did before they waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ddpwatch.analysis.diagnosis.hangs.blame import Counts, counts_of, is_behind
from ddpwatch.analysis.diagnosis.hangs.call_stack import CallStack
from ddpwatch.analysis.groups import Groups
from ddpwatch.wire.messages import Beat

EARLY = 0.25  # of a stall: what a heartbeat shows before that may be a usual step
SAME = 0.01  # of a stall: two ranks' heartbeats that are no further apart show the same moment
TimedBeat = tuple[int, Beat]  # and when it was, since the step started (ns)


class Worked(NamedTuple):
    """The time that a stall's other ranks spent on work of their own between steps, before they waited (ns).

    Attributes:
        at_least: One was seen that did not wait, so long after the step's start, and before the stall's end; else 0.
        at_most: So long after the step's start, one was seen waiting; None if none was.
    """

    at_least: int
    at_most: int | None


NOT_SEEN: Final = Worked(0, None)


class Stall:
    """Compares the heartbeats of all ranks in a step: each with few others, as a thousand ranks have too many pairs.

    Args:
        beats: Of each rank, in order.
        groups: The ranks' process groups.
        excess_ns: How much longer than usual the step took.
    """

    def __init__(self, beats: Mapping[int, Sequence[TimedBeat]], groups: Groups, excess_ns: int) -> None:
        self._of = {rank: _by_counts(rank, seen, groups.of_rank(rank)) for rank, seen in beats.items()}
        self._excess_ns = excess_ns
        self._moment_ns = excess_ns * SAME

    def behind(self) -> int | None:
        """Returns the rank that had issued fewer collectives, well into the stall, than another one before.

        In one stall, that may be chance: it is last by less than a usual step. None if it is not known, or of several.
        """
        found, ahead = set[int](), _Ahead()
        coming = deque(sorted((one for own in self._of.values() for one in own), key=lambda one: one.first))
        late = ((self._newest(one), one) for own in self._of.values() for one in own)
        for at, own in sorted(((at, one) for at, one in late if at is not None), key=lambda pair: pair[0]):
            while coming and coming[0].first <= at + self._moment_ns:
                ahead.add_beats(coming.popleft())
            if ahead.includes_one_before(own):
                found.add(own.rank)
            if len(found) > 1:
                return None
        return found.pop() if found else None

    def worked(self, late: Collection[int], stacks: Mapping[int, CallStack], marked: Mapping[int, int]) -> Worked:
        """Returns how long the others did something of their own, before they waited for a rank.

        Args:
            late: That rank; or several, if it is not known which of them it was: then, what is sure in any case.
            stacks: Where ranks were in it.
            marked: Until when marks show a rank at work in it (ns since it started).
        """
        signs = [_Sign(at, rank, {}, True) for rank, at in marked.items()]
        signs += self._signs(stacks)
        # It may have been after they had waited
        signs = sorted((one for one in signs if self._surely(one) > 0), key=self._surely, reverse=True)
        waited = self._waits_for(next(iter(late)), stacks) if len(late) == 1 else ()
        return Worked(self._least(late, signs), min((at for at in waited if at <= self._excess_ns), default=None))

    def _newest(self, beats: _Beats) -> int | None:
        """Returns when the newest of these came that lies well into the stall."""
        within = (at for at, _ in reversed(beats.timed) if self._is_within(at))
        return next(within, None)

    def _is_within(self, at: int) -> bool:
        return self._excess_ns * EARLY <= at <= self._excess_ns

    def _surely(self, sign: _Sign) -> int:
        return min(sign.at, self._excess_ns - sign.at)

    def _signs(self, stacks: Mapping[int, CallStack]) -> Iterable[_Sign]:
        """Yields heartbeats of ranks that were between steps, perhaps at work."""
        for one in (one for own in self._of.values() for one in own):
            stack = stacks.get(one.rank)
            for at, beat in one.timed:
                if self._is_within(at) and beat.phase == "input" and not _waits(beat, stack):
                    works = stack is not None and not stack.in_collective and beat.at_ns <= stack.at_ns
                    yield _Sign(at, one.rank, one.counts, works)

    def _least(self, late: Collection[int], signs: Sequence[_Sign]) -> int:
        """Returns how long others were at work, whichever of these ranks they waited for then.

        The signs that say it for longest come first. Of one rank's, most say it for the next ranks as well.
        """
        shown = list[_Sign]()
        for rank in late:
            if not any(self._shows(sign, rank) for sign in shown):
                found = next((sign for sign in signs if self._shows(sign, rank)), None)
                if found is None:
                    return 0
                shown.append(found)
        return min(map(self._surely, shown), default=0)

    def _shows(self, sign: _Sign, rank: int) -> bool:
        """Returns whether another rank did not wait for this one then."""
        own, at, moment = self._of.get(rank, ()), sign.at, self._moment_ns
        if sign.rank == rank or any(one.last >= at - moment and is_behind(one.counts, sign.counts) for one in own):
            return False
        return sign.works or any(
            one.first <= at + moment and one.counts and sign.counts and not is_behind(one.counts, sign.counts)
            for one in own
        )

    def _waits_for(self, rank: int, stacks: Mapping[int, CallStack]) -> Iterable[int]:
        """Yields from when on another rank waited for this one."""
        for one in (one for other, seen in self._of.items() if other != rank for one in seen):
            until = max((own.last for own in self._of.get(rank, ()) if is_behind(own.counts, one.counts)), default=None)
            for at, beat in one.timed:
                if beat.phase != "input":  # it is in its step, and waits there
                    yield max(0, at - beat.at_ns + beat.since_ns)
                elif _waits(beat, stacks.get(one.rank)) or (until is not None and until >= at - self._moment_ns):
                    yield at


class _Sign(NamedTuple):
    """A rank that perhaps did not wait then, with what it had issued; or surely, if it was seen at work."""

    at: int
    rank: int
    counts: Counts
    works: bool


class _Beats(NamedTuple):
    """A rank's heartbeats, one after the other, that show the same counts."""

    rank: int
    counts: Counts
    timed: list[TimedBeat]

    @property
    def first(self) -> int:
        """The time of the first (ns since the step started)."""
        return self.timed[0][0]

    @property
    def last(self) -> int:
        """The time of the last (ns since the step started)."""
        return self.timed[-1][0]


class _Ahead:
    """The collectives that ranks have issued so far."""

    def __init__(self) -> None:
        self._all: list[_Beats] = []
        self._most: dict[tuple[int, ...], dict[int, _Beats]] = {}  # by group, of the two ranks that are ahead there

    def add_beats(self, beats: _Beats) -> None:
        """Takes what one has issued."""
        self._all.append(beats)
        for group, count in beats.counts.items():
            most = self._most.setdefault(group, {})
            if beats.rank not in most or most[beats.rank].counts[group] < count:
                most[beats.rank] = beats
            if len(most) > 2:
                del most[min(most, key=lambda rank: most[rank].counts[group])]

    def includes_one_before(self, beats: _Beats) -> bool:
        """Returns whether this rank is behind another one."""
        counts = beats.counts
        most = [(group, one) for group in counts for one in self._most.get(group, {}).values()]
        ahead = [one for group, one in most if one.rank != beats.rank and one.counts[group] > counts[group]]
        if not ahead or any(is_behind(counts, one.counts) for one in ahead):
            return bool(ahead)
        return any(one.rank != beats.rank and is_behind(counts, one.counts) for one in self._all)  # these are crossed


def _by_counts(rank: int, beats: Sequence[TimedBeat], groups: tuple[int, ...]) -> list[_Beats]:
    found, before = list[_Beats](), None
    for at, beat in beats:
        if before is None or (beat.issued, beat.issued_in) != (before.issued, before.issued_in):
            found.append(_Beats(rank, counts_of(beat, groups), []))
        found[-1].timed.append((at, beat))
        before = beat
    return found


def _waits(beat: Beat, stack: CallStack | None) -> bool:
    return stack is not None and stack.in_collective and beat.at_ns >= stack.at_ns
