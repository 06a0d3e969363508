"""The newest steps of a run: what viewers keep of it, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.means import ENOUGH_FULL
from ddpwatch.analysis.retention import KEEP_STEPS


class StepLimit(NamedTuple):
    """How many steps are held: fewer with more ranks, as that is what bounds memory.

    Attributes:
        steps: With few ranks.
        rank_steps: Of all ranks together.
        least: However many ranks there are.
    """

    steps: int
    rank_steps: int
    least: int

    def of(self, ranks: int) -> int:
        """Returns how many steps of so many ranks are held."""
        return max(min(self.steps, self.rank_steps // max(ranks, 1)), self.least)


KEPT = StepLimit(KEEP_STEPS, 65_536, 2)
DECODED = StepLimit(KEPT.steps, 2_048, 2)  # older frames are kept encoded
KEEP_FIGURES = 64  # steps; older figures are computed again on demand


class KeptSteps:
    """Keeps a run's newest steps, and the last few full ones before them.

    Attributes:
        by_number: The steps, oldest first.
    """

    def __init__(self) -> None:
        self.by_number: OrderedDict[int, StepAcrossRanks] = OrderedDict()
        self._added = 0

    def add_step(self, across: StepAcrossRanks, ranks: int) -> bool:
        """Adds a new step, to which frames may still be added; returns False if it is older than anything kept.

        Args:
            across: The step.
            ranks: How many ranks send steps.
        """
        steps, number = self.by_number, across.step
        if len(steps) >= KEPT.of(ranks) and number < next(iter(steps)):
            return False
        in_order = not steps or number > next(reversed(steps))
        steps[number] = across
        if not in_order:
            self.by_number = OrderedDict(sorted(steps.items()))
        self._drop_oldest(ranks)
        self._added += 1
        self._pack_old(ranks, look_at_all=self._added % DECODED.of(ranks) == 0)
        return True

    def _drop_oldest(self, ranks: int) -> None:
        steps = self.by_number
        if (spare := len(steps) - KEPT.of(ranks)) > 0:
            full = islice((across for across in reversed(steps.values()) if across.full), ENOUGH_FULL)
            kept = {across.step for across in full}
            for number in [number for number in islice(steps, spare) if number not in kept]:
                del steps[number]

    def _pack_old(self, ranks: int, look_at_all: bool) -> None:
        """Packs steps that are no longer new: mostly one since the last time, but older ones may have changed."""
        for across in islice(reversed(self.by_number.values()), DECODED.of(ranks), None):
            if not across.pack() and not look_at_all:
                break
        for across in islice(reversed(self.by_number.values()), KEEP_FIGURES, None):
            if not across.forget_facts() and not look_at_all:
                break
