"""Steps in blocks, whose medians show how a run goes."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple


class StepBlock(NamedTuple):
    """Successive steps that count.

    Attributes:
        first, last: Of them.
        ns: What they take: the median of their rank-time that nobody is to blame for.
        start_ns: When the first one started, on the time line.
    """

    first: int
    last: int
    ns: float
    start_ns: int


class StepBlocks:
    """Puts steps into blocks as they come.

    Args:
        size: Of a block, in steps; may be changed between two blocks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._steps: list[StepBlock] = []

    def add_step(self, step: int, ns: int, start_ns: int) -> StepBlock | None:
        """Takes the next step that counts; returns the block that is full with it."""
        self._steps.append(StepBlock(step, step, ns, start_ns))
        if len(self._steps) < self.size:
            return None
        block = self._steps[0]._replace(last=step, ns=median(one.ns for one in self._steps))
        self._steps.clear()
        return block
