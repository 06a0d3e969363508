"""Assembles the frames of many ranks into steps, with memory bounded by the steps that wait for their last ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import same_clock
from ddpwatch.messages import Hello, Message, Step

OPEN_STEPS = 1024  # steps that wait for their last ranks; older ones are closed with the ranks they have


class StepAssembler:
    """Takes messages and returns complete steps.

    Args:
        ranks: How many ranks will send a step, where that is fewer than the run has.
    """

    def __init__(self, ranks: int | None = None) -> None:
        self._ranks = ranks
        self._hellos: dict[int, Hello] = {}
        self._comparable = True
        self._expected = 1
        self._open: OrderedDict[int, StepAcrossRanks] = OrderedDict()

    def apply(self, message: Message) -> StepAcrossRanks | None:
        """Takes one message; returns the step that it completes, or the oldest one if too many wait."""
        if isinstance(message, Hello):
            self._meet(message)
        if not isinstance(message, Step):
            return None
        across = self._open.get(message.step)
        if across is None:
            across = self._open[message.step] = StepAcrossRanks(message.step)
        across.add(message)
        if len(across) >= self._expected:
            return self._closed(self._open.pop(message.step))
        return self._closed(self._open.popitem(last=False)[1]) if len(self._open) > OPEN_STEPS else None

    def rest(self) -> Iterator[StepAcrossRanks]:
        """The steps that still lack a rank, oldest first."""
        while self._open:
            yield self._closed(self._open.popitem(last=False)[1])

    def _meet(self, hello: Hello) -> None:
        self._hellos[hello.rank] = hello
        self._comparable = same_clock(self._hellos.values())
        world_size = max(known.world_size for known in self._hellos.values())
        self._expected = world_size if self._ranks is None else min(world_size, self._ranks)

    def _closed(self, across: StepAcrossRanks) -> StepAcrossRanks:
        across.comparable = self._comparable
        return across


def steps_across_ranks(messages: Iterable[Message], ranks: int | None = None) -> Iterator[StepAcrossRanks]:
    """The steps of a run, each as soon as it is complete. ``ranks`` as for `StepAssembler`."""
    assembler = StepAssembler(ranks)
    for message in messages:
        across = assembler.apply(message)
        if across is not None:
            yield across
    yield from assembler.rest()
