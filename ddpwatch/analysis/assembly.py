"""Frames of many ranks put together step by step, with memory bounded by the steps that wait for their last ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ddpwatch.analysis.ranks import BucketFigures, bucket_figures, same_clock
from ddpwatch.analysis.step import StepFigures, figures
from ddpwatch.messages import COUNTED, Hello, Message, Step

OPEN_STEPS = 1024  # steps that wait for their last ranks; older ones are closed with the ranks they have


@dataclass
class StepGroup:
    """One step of all ranks that have sent it. ``comparable`` says whether they stamp with one clock."""

    number: int
    comparable: bool = True
    steps: dict[int, Step] = field(default_factory=dict)

    @property
    def counted(self) -> bool:
        """Whether the step belongs into statistics: neither warm-up, aborted nor unwatched on any rank."""
        return all(step.status in COUNTED for step in self.steps.values())

    @cached_property
    def figures(self) -> dict[int, StepFigures]:
        """Figures per rank."""
        return {rank: figures(step) for rank, step in self.steps.items()}

    @cached_property
    def buckets(self) -> list[BucketFigures]:
        """Buckets compared over the ranks; empty where there is nothing to compare."""
        return bucket_figures(self.steps) if self.comparable and len(self.steps) > 1 else []


class StepAssembler:
    """Takes messages and gives steps that are complete.

    Args:
        ranks: How many ranks will send a step, where that is fewer than the run has.
    """

    def __init__(self, ranks: int | None = None) -> None:
        self._ranks = ranks
        self._hellos: dict[int, Hello] = {}
        self._comparable = True
        self._open: OrderedDict[int, StepGroup] = OrderedDict()

    def apply(self, message: Message) -> StepGroup | None:
        """Takes one message; gives the step that it completes, or the oldest if too many wait."""
        if isinstance(message, Hello):
            self._hellos[message.rank] = message
            self._comparable = same_clock(self._hellos.values())
        if not isinstance(message, Step):
            return None
        group = self._open.setdefault(message.step, StepGroup(message.step))
        group.steps[message.rank] = message
        if len(group.steps) >= self._expected():
            return self._closed(self._open.pop(message.step))
        return self._closed(self._open.popitem(last=False)[1]) if len(self._open) > OPEN_STEPS else None

    def rest(self) -> Iterator[StepGroup]:
        """The steps that have not every rank."""
        while self._open:
            yield self._closed(self._open.popitem(last=False)[1])

    def _expected(self) -> int:
        world = max((hello.world_size for hello in self._hellos.values()), default=1)
        return world if self._ranks is None else min(world, self._ranks)

    def _closed(self, group: StepGroup) -> StepGroup:
        group.comparable = self._comparable
        return group
