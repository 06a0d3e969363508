"""One pause, or several that are the same one again: of the same ranks, for the same reason, as long."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ddpwatch.analysis.diagnosis.accounts.accounts import AccountKey
from ddpwatch.analysis.diagnosis.causes.devices import Denied, DeviceCause
from ddpwatch.analysis.diagnosis.hangs.call_stack import shared_site
from ddpwatch.analysis.diagnosis.hangs.stall import EARLY, NOT_SEEN, Worked
from ddpwatch.analysis.diagnosis.incident import Incident

KEEP_STRUCK = 512  # newest, of a pause that recurs
KEEP_STACKS = 64  # newest
ALIKE = 4  # times as long, at most, are pauses that recur as one
REGULAR_AFTER = 2  # distances, to call a pause regular
LATE_AGAIN = 2  # times the longest distance so far: what has not come again by then is over
FEWEST_BEHIND = 2  # stalls in which heartbeats show the same rank behind, and never another one
VAGUE = frozenset({"", "between"})  # phases in which something else may have been that heartbeats missed


@dataclass(slots=True)
class Pause:
    """A pause, or one that recurs. Times in ns.

    Attributes:
        until: The last step that it struck.
        count: How many it struck.
        starts: The first of these, each time that it came; the newest.
        times: How often it came.
        cost_ns: Of those in watched steps. Of others, it is estimated (`whole_cost_ns`).
        seen_ns, unseen_ns: How long a rank's marks lasted in watched steps, and in others.
        unseen_cost_ns: What others waited at most in those.
        span_ns: From start to end of the step of a stall; of one that recurs, from its first to its newest step.
        common_ns: How long all ranks pause alike, where this is how much longer one of them does; else 0.
        unusual: Whether it is beyond the tail of the job's other steps.
        denied: Whether the machine did not let the job run for most of it.
        incident: Once somebody asked, until it strikes again.
        behind: In how many stalls that seemed to be of all ranks heartbeats showed which one behind.
        shared: What these stalls cost (ns), by what they were taken for.
        own: What those that paused spent in stalls without a mark (ns), by the account that has it.
        stacks: Where ranks were: the calls of each stack, of which the newest are kept.
        untimed: In how many stalls no launch shows how long others waited.
        taken: What they were said to wait in these for the one rank that was named (ns), by what that was taken for.
        worked: How long the others did something of their own in a stall of that kind.
        alike_ns: What all ranks took alike where launches show it, which is not in the cost: a sum, as that differs.
        parts_ns: The longest there: of what one rank took longer, and of what all took alike.
    """

    ranks: tuple[int, ...]
    phase: str
    since: int
    count: int = 0
    longest_ns: int = 0
    excess_ns: int = 0
    cost_ns: int = 0
    ranks_in_run: int = 1
    bare: bool = False
    seen_ns: int = 0
    unseen_ns: int = 0
    unseen_cost_ns: int = 0
    span_ns: tuple[int, int] = (0, 0)
    device: DeviceCause | Denied | None = None
    common_ns: int = 0
    unusual: bool = True
    denied: bool = False
    incident: Incident | None = None
    until: int = 0
    times: int = 0
    starts: deque[int] = field(default_factory=lambda: deque(maxlen=KEEP_STRUCK))
    behind: Counter[int] = field(default_factory=Counter)
    shared: Counter[AccountKey] = field(default_factory=Counter)
    own: Counter[AccountKey] = field(default_factory=Counter)
    stacks: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    untimed: int = 0
    taken: Counter[AccountKey] = field(default_factory=Counter)
    worked: Worked = NOT_SEEN
    alike_ns: int = 0
    parts_ns: tuple[int, int] = (0, 0)

    def add_step(self, step: int, excess_ns: int, cost_ns: int) -> None:
        """Takes one step that it struck."""
        self.starts.append(step)
        self.until = step
        self.times += 1
        self.count += 1
        self.longest_ns = max(self.longest_ns, excess_ns)
        self.excess_ns += excess_ns
        self.cost_ns += cost_ns
        self.incident = None

    def add_alike(self, excess_ns: int, alike_ns: int) -> None:
        """Takes what launches show of the newest step that it struck: how much of its excess all ranks took alike."""
        self.alike_ns += alike_ns
        self.parts_ns = max(self.parts_ns[0], excess_ns - alike_ns), max(self.parts_ns[1], alike_ns)

    def add_mark(self, step: int, ns: int, cost_ns: int, *, seen: bool) -> None:
        """Takes what a rank's mark says, and what others waited for it."""
        self.add_step(step, ns, cost_ns if seen else 0)
        if seen:
            self.seen_ns += ns
        else:
            self.unseen_ns += ns
            self.unseen_cost_ns += cost_ns

    @property
    def is_marked(self) -> bool:
        """True if marks show it."""
        return bool(self.seen_ns or self.unseen_ns)

    @property
    def whole_cost_ns(self) -> int:
        """In a bare step, a mark costs as much of its length as in watched ones."""
        if self.ranks:  # it does not wait for itself, where it seemed to be one of all
            return self._cost_ns() - self.shared.total() // self.ranks_in_run
        return self._cost_ns()

    def _cost_ns(self) -> int:
        if not self.seen_ns:
            return self.cost_ns + self.unseen_cost_ns
        return self.cost_ns * (self.seen_ns + self.unseen_ns) // self.seen_ns

    @property
    def waited_ns(self) -> float:
        """The time (ns) that each rank waited for it, or was in it."""
        return self.whole_cost_ns / max(1, self.ranks_in_run - len(self.ranks))

    @property
    def own_ns(self) -> int:
        """How long all take alike in a stall whose launches do not show it, by who was seen not to wait yet, or to."""
        at_least, at_most = self.worked
        own = at_least if at_most is None else at_most
        is_known = self.ranks and self.untimed and min(at_least, own) >= EARLY * self.longest_ns
        return min(own, self.longest_ns) if is_known else 0

    @property
    def is_alone(self) -> bool:
        """Whether the others waited for most of it, or nothing says that they did not."""
        return not self.common_ns and 2 * (self.worked.at_most or 0) < self.longest_ns

    def apart(self) -> list[Pause]:
        """Returns it; where others did as much for a while, what one rank took longer, and what all did alike."""
        own, (longest, common) = self.own_ns, self.parts_ns
        untimed = own * self.untimed
        if not (alike := untimed + self.alike_ns):
            return [self]
        if own:
            longest, common = max(longest, self.longest_ns - own), max(common, own)
        cost = max(0, self.whole_cost_ns - untimed * (self.ranks_in_run - len(self.ranks)))
        rest = replace(self, shared=Counter(), seen_ns=0, unseen_ns=0, unseen_cost_ns=0, incident=None)
        rest = replace(rest, untimed=0, alike_ns=0)
        return [
            replace(rest, cost_ns=cost, longest_ns=longest, common_ns=common),
            replace(rest, cost_ns=alike * self.ranks_in_run, longest_ns=common, ranks=(), device=None, worked=NOT_SEEN),
        ]

    def waited(self) -> list[tuple[int, AccountKey]]:
        """Returns how long others waited in stalls that seemed to be of all, and how long they did not in others (ns).

        The latter is negative. Each with what it was taken for.
        """
        if not self.ranks:
            return []
        share = self.apart()[0].whole_cost_ns / max(1, self.whole_cost_ns)
        found = [(int((ns - ns // self.ranks_in_run) * share), key) for key, ns in self.shared.items()]
        return [*found, *((-int(ns * (1 - share)), key) for key, ns in self.taken.items() if self.own_ns)]

    def spent(self) -> list[tuple[int, AccountKey]]:
        """Returns how long ranks were in its stalls, without those that waited (ns), by what accounts take that for."""
        also = [(-ns, key) for ns, key in self.waited() if ns < 0]  # what the others did as well
        found = [*also, *((ns, key) for key, ns in self.own.items())]
        return [(ns, key) for ns, key in found if key[0] not in ("pause", "input")]  # which say it already

    @property
    def recurs(self) -> bool:
        """True if it comes again and again, by the job's own doing."""
        return self.times > REGULAR_AFTER and not self.denied

    def is_like(self, ns: float) -> bool:
        """Returns whether one of that length is one of it: short ones and long ones recur by themselves."""
        mean = self.excess_ns / self.count if self.count else ns
        return mean / ALIKE <= ns <= ALIKE * mean

    def keeps_time(self, step: int, ns: int) -> bool:
        """Returns whether one at that step, and so long, makes it come every so many steps, or lets it be so."""
        return self.is_like(ns) and _period(sorted([*self.starts, step])) is not None

    def is_again(self, other: Pause) -> bool:
        """Returns whether another one is this one again: as long, of the same ranks, for the same reason.

        One of which it is not known whose it was is, if it comes when this is due. Those that the machine is to blame
        for need not be alike.
        """
        if self.ranks == other.ranks and self.denied and other.denied:
            return True
        alike = self.phase == other.phase or not VAGUE.isdisjoint((self.phase, other.phase))
        if not (alike and self.is_like(other.longest_ns)):
            return False
        if self.ranks == other.ranks and (other.ranks or other.phase):
            return True
        return not (self.ranks and other.ranks) and _period(sorted([*self.starts, *other.starts])) is not None

    def is_due(self, step: int) -> bool:
        """Returns whether it recurs, and may come again: the time for that is not long over."""
        if not self.recurs:
            return False
        longest = max(after - before for before, after in pairwise(self.starts))
        return step - self.until <= LATE_AGAIN * longest

    @property
    def period(self) -> int | None:
        """Every how many steps it comes, where that is regular."""
        return None if self.denied else _period(self.starts)

    @property
    def site(self) -> str:
        """The place in the code where the rank was; of a pause of all, where all were, as far as that is known."""
        found = [calls for rank, calls in self.stacks if not self.ranks or rank in self.ranks]
        newest = found[-1][-1] if found and self.ranks else ""
        return shared_site(found) or newest

    def _always_behind(self) -> tuple[int, ...]:
        """Returns the rank that the others waited for, by what is known of its stalls together."""
        enough = self.behind.total() >= max(FEWEST_BEHIND, self.times / 4)
        return tuple(self.behind) if enough and len(self.behind) == 1 else ()

    @property
    def gain(self) -> float | None:
        """The share by which a step would be shorter without those that recur; None if it does not recur."""
        took = self.span_ns[1] - self.span_ns[0]
        if not self.recurs or took <= 0:
            return None
        return self.waited_ns * (self.times - 1) / self.times / took

    def _own_if_of(self, ranks: tuple[int, ...]) -> Counter[AccountKey]:
        """Returns what these ranks spent in it: of a stall that seemed to be of all, their part."""
        if self.ranks or not ranks:
            return self.own
        return Counter({key: ns // self.ranks_in_run for key, ns in self.own.items()})

    def _phase_with(self, other: Pause, again: bool) -> str:
        """Returns the phase of both: where the others waited is not that of a rank that they waited for."""
        waited = "exposed_comm" if self.ranks or other.ranks else None
        own, theirs = ("" if phase == waited else phase for phase in (self.phase, other.phase))
        if own == theirs or not again:
            return own if own == theirs else ""
        return (theirs or own) if own in VAGUE else own

    def merge(self, other: Pause, *, again: bool) -> None:
        """Takes another one of the same ranks, perhaps in another phase: it came again, or has gone on."""
        self.phase = self._phase_with(other, again)
        known = again and other.since in self.starts  # a mark has shown a part of it
        if again:
            self.device = self.device and other.device  # not what was the cause only once
        if again and not known:
            self.starts = deque(sorted([*self.starts, *other.starts]), maxlen=KEEP_STRUCK)
            self.times += other.times
        self.count += 0 if known else other.count
        self.since, self.until = min(self.since, other.since), max(self.until, other.until)
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        self.excess_ns += other.excess_ns
        self.cost_ns += other.cost_ns
        self.shared = self.shared + other.shared
        self.untimed += other.untimed if again else 0
        self.taken = self.taken + other.taken
        shown = [one for one in (self.worked.at_most, other.worked.at_most) if one is not None]
        self.worked = Worked(max(self.worked.at_least, other.worked.at_least), min(shown, default=None))
        self.alike_ns += other.alike_ns
        self.parts_ns = max(self.parts_ns[0], other.parts_ns[0]), max(self.parts_ns[1], other.parts_ns[1])
        self.behind = self.behind + other.behind + Counter(dict.fromkeys(other.ranks, FEWEST_BEHIND))
        ranks = self.ranks or self._always_behind()
        self.own = self._own_if_of(ranks) + other._own_if_of(ranks)
        self.ranks = ranks
        self.stacks = [*self.stacks, *other.stacks][-KEEP_STACKS:]
        self.span_ns = min(self.span_ns[0], other.span_ns[0]), max(self.span_ns[1], other.span_ns[1])
        self.unusual = self.unusual or other.unusual
        self.denied = self.denied and other.denied
        self.incident = None


def with_pause(found: Sequence[Pause], pause: Pause) -> list[Pause]:
    """Returns the pauses and one more, which may be one of them again.

    With that, it may show whose another one was that seemed to be of all ranks.
    """
    known = next((known for known in found if known.is_again(pause)), None)
    if known is None:
        return [*found, pause]
    both = _joined(known, pause)
    others = [one for one in found if both.ranks and not one.ranks and one is not known]
    unowned = next((one for one in others if one.is_again(both)), None)
    both = both if unowned is None else _joined(both, unowned)
    return [both if one is known else one for one in found if one is not unowned]


def _joined(before: Pause, after: Pause) -> Pause:
    both = replace(before, starts=deque(before.starts, maxlen=KEEP_STRUCK))
    both.merge(after, again=True)
    return both


def _period(steps: Sequence[int]) -> int | None:
    """Returns the distance of steps, if it is always the same, but for some steps that are missing."""
    gaps = [after - before for before, after in pairwise(steps)]
    shortest = min(gaps, default=0)
    regular = len(steps) > REGULAR_AFTER and shortest > 0 and not any(gap % shortest for gap in gaps)
    return shortest if regular and 2 * gaps.count(shortest) > len(gaps) else None
