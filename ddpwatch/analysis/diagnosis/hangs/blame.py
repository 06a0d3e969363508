"""Who holds up the others when a group of ranks stands still. The rules are in docs/diagnosis.md, "Hangs"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddpwatch.analysis.diagnosis.hangs.call_stack import CallStack
from ddpwatch.sampling.stillness import AWAITED_NS, DATA_NS, LASTING_NS, START_NS, STILL_NS, Stillness
from ddpwatch.wire.messages import Beat, Bye

# Why ranks are blamed: they have issued fewer collectives, do something else than to wait, send nothing, have finished
# early. Or nobody is to blame: each waits in another group, or none is behind.
Why = Literal["behind", "elsewhere", "silent", "finished", "crossed", "unknown"]
_WAITING = ("", "sync")  # phases in which a rank may wait for others; "" is a bare step
_BETWEEN_STEPS = ("input", "between")
_LONG = ("save", "compile", "validation")  # may hold the GIL, and with it the heartbeat

GroupKey = tuple[int, ...]
Counts = Mapping[GroupKey, int]


@dataclass(slots=True)
class RankLife:
    """The signs of life of one rank.

    Attributes:
        received_ns: When its newest heartbeat came.
        seen_ns: When anything came.
        stepped_ns: When its newest step came.
        bye_ns: When its goodbye came.
        stack: Its newest stack.
    """

    rank: int
    stillness: Stillness = field(default_factory=Stillness)
    received_ns: int = 0
    seen_ns: int = 0
    stepped_ns: int = 0
    bye: Bye | None = None
    bye_ns: int = 0
    stack: CallStack | None = None

    @property
    def beat(self) -> Beat | None:
        """Its newest heartbeat."""
        return self.stillness.beat

    @property
    def phase(self) -> str:
        """Where it was at its newest heartbeat."""
        return "" if self.beat is None else self.beat.phase

    @property
    def activity(self) -> str:
        """What it did besides."""
        return "" if self.beat is None else self.beat.activity

    @property
    def ended_ns(self) -> int:
        """When it ended, as a receive time: its newest heartbeat maps its own clock, which may be another host's."""
        if self.bye is None or self.beat is None:
            return self.bye_ns
        return min(self.received_ns + self.bye.at_ns - self.beat.at_ns, self.bye_ns)

    def clock_ns(self, now_ns: int) -> int:
        """Returns what time it is on the rank's clock."""
        return 0 if self.beat is None else self.beat.at_ns + max(0, now_ns - self.received_ns)

    def silent_ns(self, now_ns: int) -> int:
        """Returns how long nothing has come, if that is too long; else 0."""
        silent_ns = now_ns - self.seen_ns
        usual_ns = STILL_NS if self.beat is not None and self.beat.step else START_NS
        return silent_ns if self.bye is None and silent_ns > usual_ns else 0

    def stands_still(self, now_ns: int) -> bool:
        """Returns whether it does not go on, or sends nothing."""
        return self.stillness.stands_still or self.silent_ns(now_ns) > 0

    @property
    def fresh_stack(self) -> CallStack | None:
        """Its newest stack, if it was taken since the rank has been standing still."""
        return None if self.stack is None or self.stack.at_ns < self.stillness.since_ns else self.stack

    def waits_for_nobody(self) -> bool:
        """Returns whether no bucket is in flight, and its stack is in no collective, as far as both can be seen."""
        stack, beat = self.fresh_stack, self.beat
        return stack is not None and beat is not None and not stack.in_collective and not beat.in_flight

    def lasts_too_long(self, now_ns: int) -> bool:
        """Returns whether that is longer than what it does explains."""
        if not self.silent_ns(now_ns):
            return self.stillness.lasts_too_long
        return self.activity not in _LONG or self.clock_ns(now_ns) - self.stillness.since_ns > LASTING_NS


@dataclass(frozen=True, slots=True)
class Blame:
    """Whom the others wait for.

    Attributes:
        ranks: Whose doing it is; empty if that is unknown.
        waiting: All others.
        issued: How many collectives each has issued in the group that shows who is behind.
    """

    why: Why
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    issued: Mapping[int, int] = field(default_factory=dict)


def counts_of(beat: Beat | None, groups: GroupKey) -> Counts:
    """Returns how many collectives a rank has issued in each group; before `Beat.issued_in`, in all of its groups."""
    if beat is None:
        return {}
    if beat.issued_in:
        return {(group,): count for group, count in beat.issued_in}
    return {} if beat.issued is None else {groups: beat.issued}


def blame(lives: Sequence[RankLife], counts: Mapping[int, Counts], now_ns: int) -> Blame | None:
    """Returns who holds up ranks that depend on each other; None if they do not hang, or not yet.

    Args:
        lives: The ranks that have not ended.
        counts: What each has issued.
        now_ns: The receive time of the newest frame.
    """
    if not lives or not all(life.stands_still(now_ns) for life in lives):
        return None
    found = behind(counts)
    silent = _silent(lives, now_ns)
    if silent is not None and (found is None or found[0] == "crossed" or found[1] & silent[1]):
        found = silent  # a rank that waits sends heartbeats
    found = found or _elsewhere(lives)
    if found is None:
        return _unknown(lives, counts, now_ns)
    why, ranks, issued = found
    if not all(life.lasts_too_long(now_ns) for life in lives if life.rank in ranks):
        return None
    if why == "crossed":
        return Blame(why, (), tuple(life.rank for life in lives))
    return Blame(why, tuple(sorted(ranks)), tuple(life.rank for life in lives if life.rank not in ranks), issued)


Found = tuple[Why, set[int], Mapping[int, int]]


def behind(counts: Mapping[int, Counts]) -> Found | None:
    """Returns those who have issued the fewest collectives in a group, and wait for nobody in another."""
    issued = _by_group(counts)
    behind: dict[int, Mapping[int, int]] = {}
    ahead: set[int] = set()
    for by_rank in issued:
        fewest = min(by_rank.values())
        if fewest < max(by_rank.values()):
            behind.update((rank, by_rank) for rank, count in by_rank.items() if count == fewest)
            ahead.update(rank for rank, count in by_rank.items() if count > fewest)
    if not behind:
        return None
    ranks = behind.keys() - ahead
    return ("behind", ranks, behind[min(ranks)]) if ranks else ("crossed", set(behind), {})


def is_behind(own: Counts, other: Counts) -> bool:
    """Returns whether one of two ranks is: it has issued fewer in a group of both, and more in none."""
    fewer = False
    for group, count in own.items():
        seen = other.get(group, count)
        if count > seen:
            return False
        fewer = fewer or count < seen
    return fewer


def _by_group(counts: Mapping[int, Counts]) -> Iterable[Mapping[int, int]]:
    issued: dict[GroupKey, dict[int, int]] = {}
    for rank, groups in counts.items():
        for group, count in groups.items():
            issued.setdefault(group, {})[rank] = count
    return issued.values()


def _elsewhere(lives: Sequence[RankLife]) -> Found | None:
    """Returns those who are not in a phase in which ranks wait, if others are."""
    if len(lives) == 1 and lives[0].phase in _BETWEEN_STEPS:
        return None
    ranks = {life.rank for life in lives if life.phase not in _WAITING}
    return ("elsewhere", ranks, {}) if ranks and (len(ranks) < len(lives) or len(lives) == 1) else None


def _silent(lives: Sequence[RankLife], now_ns: int) -> Found | None:
    ranks = {life.rank for life in lives if life.silent_ns(now_ns)}
    return ("silent", ranks, {}) if ranks and (len(ranks) < len(lives) or len(lives) == 1) else None


def _unknown(lives: Sequence[RankLife], counts: Mapping[int, Counts], now_ns: int) -> Blame | None:
    """Blames nobody. Between the steps, ranks may well do things that ddpwatch does not know of."""
    if not all(life.lasts_too_long(now_ns) for life in lives):
        return None
    idle = all(life.phase in _BETWEEN_STEPS or life.activity == "data" for life in lives)
    still_ns = min(life.stillness.still_ns for life in lives)
    if idle and (len(lives) == 1 or still_ns <= (AWAITED_NS if _never_meet(lives, counts) else DATA_NS)):
        return None
    if still_ns <= LASTING_NS and all(life.phase in _BETWEEN_STEPS and life.waits_for_nobody() for life in lives):
        return None  # they generate, say
    return Blame("unknown", (), tuple(life.rank for life in lives))


def _never_meet(lives: Sequence[RankLife], counts: Mapping[int, Counts]) -> bool:
    """Returns whether all ranks of the same groups wait in collectives, and not all in the same one."""
    called = {"" if life.fresh_stack is None else life.fresh_stack.collective for life in lives}
    groups = {frozenset(counts[life.rank]) for life in lives}
    return "" not in called and len(called) > 1 and len(groups) == 1 and frozenset() not in groups
