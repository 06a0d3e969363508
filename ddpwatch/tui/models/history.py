"""The newest steps, one point each, for the sparklines and the history strip."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ddpwatch.viewer.state import StepAcrossRanks

HISTORY_STEPS = 400
NEW_STEPS = 64  # steps of which frames may still arrive
SPARK_STEPS = 16


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Shows one step.

    Attributes:
        step_ns: The longest over the ranks.
        exposed_ns: The most over the ranks; None if it was not measured.
        complete: All ranks have sent the step.
        overlap: The median over the ranks; None for an incomplete step.
        late_ns: The latest rank's; None for an incomplete step.
    """

    step: int
    step_ns: int
    exposed_ns: int | None
    complete: bool
    overlap: float | None = None
    late_ns: float | None = None


class StepHistory:
    """Makes the points. A point is remade whenever another rank has sent its step, unless the step is old."""

    def __init__(self) -> None:
        self._past: deque[HistoryPoint] = deque(maxlen=HISTORY_STEPS)
        self._past_until = -1
        self._new: dict[int, tuple[int, HistoryPoint]] = {}

    def points(self, steps: Sequence[StepAcrossRanks], ranks: int) -> tuple[HistoryPoint, ...]:
        """Returns the points of the newest steps that belong into statistics, oldest first.

        Args:
            steps: The steps, oldest first.
            ranks: How many ranks the run has.
        """
        for step in steps[-HISTORY_STEPS:-NEW_STEPS]:
            if step.step > self._past_until and step.counted:
                self._past.append(self._point(step, ranks))
        self._past_until = steps[-NEW_STEPS - 1].step if len(steps) > NEW_STEPS else -1
        new = [step for step in steps[-NEW_STEPS:] if step.counted]
        self._new = {step.step: (len(step), self._point(step, ranks)) for step in new}
        return (*self._past, *(point for _, point in self._new.values()))[-HISTORY_STEPS:]

    def _point(self, step: StepAcrossRanks, ranks: int) -> HistoryPoint:
        known = self._new.get(step.step)
        return known[1] if known is not None and known[0] == len(step) else _point(step, len(step) >= ranks)


def _point(step: StepAcrossRanks, complete: bool) -> HistoryPoint:
    exposed = step.most_exposed_ns
    exposed_ns = None if exposed is None else int(exposed)
    if not complete:
        return HistoryPoint(step.step, step.longest_ns, exposed_ns, complete)
    overlaps = [value for value in step.row("overlap") if not math.isnan(value)]
    late = max((value for value in step.row("late") if not math.isnan(value)), default=None)
    overlap = median(overlaps) if overlaps else None
    return HistoryPoint(step.step, step.longest_ns, exposed_ns, complete, overlap, late)
