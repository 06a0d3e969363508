"""Assembles the frames of many ranks into steps, with memory bounded by the steps that wait for their last ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import takewhile

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import ClockDomains
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.matching import NumberedStep, StepMatcher
from ddpwatch.wire.messages import Beat, Bye, ClockExchange, Group, Hello, Message, Step, sends_no_more

OPEN_STEPS = 1024  # steps that wait for their last ranks; older ones are closed with the ranks they have
OPEN_RANK_STEPS = 131_072  # the same, of all ranks together: some 0.4 GB
LEAST_OPEN_STEPS = 64  # however many ranks there are


class StepAssembler:
    """Takes messages and yields complete steps.

    Args:
        ranks: How many ranks will send a step, where that is fewer than the run has.

    Attributes:
        groups: The run's process groups.
    """

    def __init__(self, ranks: int | None = None) -> None:
        self._ranks = ranks
        self._world_size = 0
        self._expected = 1
        self._room = OPEN_STEPS
        self._clocks = ClockDomains()
        self._open: OrderedDict[int, StepAcrossRanks] = OrderedDict()
        self.groups = Groups()
        self._matcher = StepMatcher(self.groups.members)

    def apply(self, message: Message) -> list[StepAcrossRanks]:
        """Takes one message; returns the steps that it closes, oldest first.

        These are the one that it completes, those before it that lack a rank, and the oldest one if too many wait.
        """
        if isinstance(message, Step):
            return self._add_steps(self._matcher.add_step(message))
        if isinstance(message, Hello):
            self._meet(message)
        elif isinstance(message, ClockExchange):
            self._clocks.exchange(message)
        if isinstance(message, (Hello, Group)):
            self.groups.apply(message)
        elif isinstance(message, (Bye, Beat)) and message.rank is not None and sends_no_more(message):
            return self._add_steps(self._matcher.leave(message.rank))
        return []

    def _add_steps(self, steps: Iterable[NumberedStep]) -> list[StepAcrossRanks]:
        found = []
        for number, step in steps:
            across = self._open.get(number)
            if across is None:
                across = self._open[number] = StepAcrossRanks(number, members=self.groups.members)
            across.add_step(step)
            if len(across) >= self._expected:
                found += self._closed_before(number)
                found.append(self._closed(self._open.pop(number)))
            elif len(self._open) > self._room:
                found.append(self._closed(self._open.popitem(last=False)[1]))
        return found

    def _closed_before(self, number: int) -> list[StepAcrossRanks]:
        """The steps that still lack a rank when a newer one is complete: each rank's frames come in order."""
        older = [other for other in takewhile(number.__ne__, self._open) if other < number]
        return [self._closed(self._open.pop(other)) for other in older]

    def rest(self) -> Iterator[StepAcrossRanks]:
        """The steps that still lack a rank, oldest first."""
        yield from self._add_steps(self._matcher.rest())
        while self._open:
            yield self._closed(self._open.popitem(last=False)[1])

    def _meet(self, hello: Hello) -> None:
        self._clocks.meet(hello)
        self._world_size = max(self._world_size, hello.world_size)
        self._expected = self._world_size if self._ranks is None else min(self._world_size, self._ranks)
        self._room = min(OPEN_STEPS, max(LEAST_OPEN_STEPS, OPEN_RANK_STEPS // self._expected))

    def _closed(self, across: StepAcrossRanks) -> StepAcrossRanks:
        if self._clocks.several:
            self._clocks.observe(across.ranks)
            across.align(self._clocks.shifts(across.ranks))
        return across


def steps_across_ranks(messages: Iterable[Message], ranks: int | None = None) -> Iterator[StepAcrossRanks]:
    """The steps of a run, each as soon as it is complete. ``ranks`` as for `StepAssembler`."""
    assembler = StepAssembler(ranks)
    for message in messages:
        yield from assembler.apply(message)
    yield from assembler.rest()
