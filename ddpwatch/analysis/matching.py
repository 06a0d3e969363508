"""Gives the steps of all ranks common numbers.

A rank counts its own steps. If it skips a batch, or starts to count again, its count no longer shows which of its steps
belong to those of its peers. Collectives show that: all members of a group issue them in the same order. So a rank's
step gets the number of the step in which the group's *lead*, its lowest rank that sends steps, issued the same first
collective. The lead's own count is the run's. A step whose collectives are not known (a bare one, say) is counted
on from the last matched one. A step that a rank took alone, without a collective, has no number.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from msgspec.structs import replace

from ddpwatch.analysis.groups import Members, numbered_groups
from ddpwatch.sampling.levels import is_counted
from ddpwatch.wire.messages import DEFAULT_GROUP, Step

# What is held per rank while the lead's step has not come: some steps, more where they are short, fewer where long.
FEW_STEPS, HOLD_STEPS, MOST_HELD_STEPS = 4, 64, 1024
HOLD_NS, LONG_NS = 4e9, 10e9
KEEP_NUMBERS = 4096  # per group
NumberedStep = tuple[int, Step]


class _Lead:
    """The rank that counts for a group, and what it has sent.

    Attributes:
        newest: Number of its newest step.
        numbers: Of its steps, by the sequence number of their first collective in the group.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.newest = -1
        self.numbers: OrderedDict[int, int] = OrderedDict()
        self._synced: set[int] = set()
        self._inherited = -1  # the newest sequence number of the rank that led before

    def hand_over(self, rank: int) -> None:
        """Makes another rank the lead. What it sends from before is matched like any peer's."""
        self.rank = rank
        self._inherited = next(reversed(self.numbers), -1)

    def starts_again(self, rank: int, seq: int) -> bool:
        """Returns whether the group counts from the start again, as far as its lead shows."""
        return rank == self.rank and seq > self._inherited and self.has_passed(seq)

    def note(self, number: int, seq: int | None) -> None:
        """Takes a step of the lead."""
        self.newest = max(self.newest, number)
        if seq is None or seq <= self._inherited:
            return
        if self.has_passed(seq):  # the group counts from the start again
            self.numbers.clear()
            self._synced.clear()
        self.numbers[seq] = number
        self._synced.add(number)
        if len(self.numbers) > KEEP_NUMBERS:
            self._synced.discard(self.numbers.popitem(last=False)[1])

    def has_passed(self, seq: int) -> bool:
        """Returns whether it has sent the step with that collective, or a later one."""
        return bool(self.numbers) and seq <= next(reversed(self.numbers))

    def number_of(self, seq: int, counted: int) -> int:
        """Returns the number of a peer's step with that first collective.

        If the lead's own step is bare, or lost, it lies between those that are known: there at ``counted``, if
        that is possible.
        """
        if (same := self.numbers.get(seq)) is not None:
            return same
        following = None
        for known, number in reversed(self.numbers.items()):
            if known < seq:
                at_least = max(counted, number + 1)
                return at_least if following is None else min(at_least, following - 1)
            following = number
        return counted

    def synced(self, number: int) -> bool:
        """Returns whether its step of that number is known to have had a collective."""
        return number in self._synced


class StepMatcher:
    """Numbers steps. A step whose lead has not sent its own yet is held back.

    Args:
        members: The ranks of a group, in ascending order; None if they are not known.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._leads: dict[int, _Lead] = {}
        self._groups: dict[int, int] = {}  # in which a rank issued the first collective of its newest step
        self._offsets: dict[int, int] = {}  # the run's number less the rank's own
        self._ranks: dict[int, list[int]] = {}  # by group, a heap; with some that have left it
        self._held: dict[int, deque[Step]] = {}  # of the ranks that wait for their lead
        self._gone: set[int] = set()
        self._seqs: dict[int, int | None] = {}  # of each rank's newest step: what does not count is no number

    def add_step(self, step: Step) -> list[NumberedStep]:
        """Takes one rank's next step; returns those that have a number now."""
        rank, seq = step.rank, step.comm_first_seq
        if seq is not None and seq == self._seqs.get(rank):  # a comm hook issued them in a group that is not seen
            step = replace(step, comm_first_seq=None)
        self._seqs[rank] = seq
        group = self._group_of(step)
        if group is None:
            return [(step.step, step)]
        if self._groups.get(rank) != group or rank in self._gone:
            heappush(self._ranks.setdefault(group, []), rank)
            self._groups[rank] = group
            self._gone.discard(rank)
        held = self._held.get(rank)
        lead = self._leads.get(group)
        follows = lead is not None and lead.rank < rank and lead.rank not in self._gone
        if follows and held is None and not self._has_to_wait(step):  # as nearly always; what follows does the same
            number = self._number_of(step, group)
            return [] if number is None else [(number, step)]
        if held is None:
            held = self._held[rank] = deque()
        held.append(step)
        if self._takes_the_lead(rank, group):
            self._leads.setdefault(group, _Lead(rank)).hand_over(rank)
        found = self._released(rank, at_least=int(_is_overdue(held)))
        if (lead := self._leads.get(group)) is not None and lead.rank == rank:
            for follower in list(self._held):
                found += self._released(follower)
        return found

    def leave(self, rank: int) -> list[NumberedStep]:
        """Takes the end of a rank. If it was a lead, the next rank leads, and nobody waits for its steps any longer."""
        self._gone.add(rank)
        found: list[NumberedStep] = []
        for group, lead in self._leads.items():
            if lead.rank == rank:
                lead.hand_over(self._lowest_of(group, rank))
                for peer in sorted(peer for peer in self._held if self._groups[peer] == group):
                    found += self._released(peer)
        return found

    def _lowest_of(self, group: int, default: int) -> int:
        """Returns the lowest rank of a group that is still there, as far as one can tell by now."""
        ranks = self._ranks[group]
        while ranks and (ranks[0] in self._gone or self._groups[ranks[0]] != group):
            heappop(ranks)
        return ranks[0] if ranks else default

    def rest(self, group: int | None = None) -> list[NumberedStep]:
        """Returns the steps that are held back, of one group or of all."""
        ranks = [rank for rank in self._held if group in (None, self._groups[rank])]
        return [step for rank in ranks for step in self._released(rank, at_least=MOST_HELD_STEPS + 1)]

    def _takes_the_lead(self, rank: int, group: int) -> bool:
        """Returns whether a rank that sends is to be the lead.

        The lowest of the group, as far as one can tell by now.
        """
        lead = self._leads.get(group)
        if lead is not None:
            return rank < lead.rank or lead.rank in self._gone
        members = self._members(group)
        return members is None or rank <= members[0] or _is_overdue(self._held[rank])

    def _group_of(self, step: Step) -> int | None:
        """Returns the group by which the step is matched; None if the rank has not named any."""
        if step.comm_first_seq is None:
            return self._groups.get(step.rank)
        return next(iter(numbered_groups(step)), DEFAULT_GROUP) if step.comm_group else DEFAULT_GROUP

    def _released(self, rank: int, at_least: int = 0) -> list[NumberedStep]:
        """Returns the rank's steps, oldest first, up to the first one that has to wait for the lead."""
        held, found = self._held[rank], []
        while held and (at_least > 0 or not self._has_to_wait(held[0])):
            at_least -= 1
            step = held.popleft()
            if (number := self._number_of(step, self._group_of(step))) is not None:
                found.append((number, step))
        if not held:
            del self._held[rank]
        return found

    def _has_to_wait(self, step: Step) -> bool:
        lead = self._leads.get(self._groups[step.rank])
        if lead is None:
            return True
        if lead.rank == step.rank or lead.rank in self._gone:
            return False
        if step.comm_first_seq is not None:
            return not lead.has_passed(step.comm_first_seq)
        return _is_alone(step) and self._counted_on(step) > lead.newest

    def _number_of(self, step: Step, group: int | None) -> int | None:
        """Returns the step's number; None for one that the others of its group did not take."""
        seq, number = step.comm_first_seq, self._counted_on(step)
        lead = None if group is None else self._leads.get(group)
        if lead is not None and seq is not None and not lead.starts_again(step.rank, seq):
            number = lead.number_of(seq, number)
            self._offsets[step.rank] = number - step.step
            number = max(0, number)
        elif lead is not None and lead.rank != step.rank and _is_alone(step) and lead.synced(number):
            return None
        for other, first in _firsts(step):
            if (counting := self._leads.get(other)) is not None and counting.rank == step.rank:
                counting.note(number, first)
        if seq is None and lead is not None and lead.rank == step.rank:
            lead.note(number, None)
        return number

    def _counted_on(self, step: Step) -> int:
        return max(0, step.step + self._offsets.get(step.rank, 0))


def _is_overdue(held: Sequence[Step]) -> bool:
    """Returns whether a rank's oldest step has waited long enough for the lead."""
    count, span_ns = len(held), held[-1].start_ns - held[0].start_ns
    some, few = count > HOLD_STEPS and span_ns > HOLD_NS, count > FEW_STEPS and span_ns > LONG_NS
    return some or few or count > MOST_HELD_STEPS


def _is_alone(step: Step) -> bool:
    """Returns whether it is sure that the rank issued no collective of its modules in this step."""
    return not step.synced and is_counted(step.status)


def _firsts(step: Step) -> Iterable[tuple[int, int]]:
    """Returns the step's groups, each with the sequence number of the first collective in it."""
    if (first := step.comm_first_seq) is None:
        return ()
    if not step.comm_group:
        return ((DEFAULT_GROUP, first),)
    found: dict[int, int] = {}
    for group, offset in zip(step.comm_group, step.comm_seq, strict=False):
        found.setdefault(group, first + offset)
    return found.items()
