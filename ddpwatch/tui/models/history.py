"""The newest steps, one point each: what sparklines and the history strip draw."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ddpwatch.state import StepAcrossRanks

HISTORY_STEPS = 400
NEW_STEPS = 64  # for which ranks may still send their frames
SPARK_STEPS = 16


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One step: the longest of its ranks, the most that was exposed on one, the overlap, the latest rank.

    Attributes:
        complete: All ranks have sent it.
        overlap: The median over the ranks; like ``late_ns``, None for a step that is not complete.
    """

    step: int
    step_ns: int
    exposed_ns: int | None
    complete: bool
    overlap: float | None = None
    late_ns: float | None = None


class StepHistory:
    """Makes the points. A step's is made anew when a further rank has sent the step, unless it is long past."""

    def __init__(self) -> None:
        self._past: deque[HistoryPoint] = deque(maxlen=HISTORY_STEPS)
        self._past_until = -1
        self._new: dict[int, tuple[int, HistoryPoint]] = {}

    def points(self, views: Sequence[StepAcrossRanks], ranks: int) -> tuple[HistoryPoint, ...]:
        """The points of the newest steps that belong into statistics, oldest first.

        Args:
            views: The steps, oldest first.
            ranks: How many ranks the run has.
        """
        for view in views[-HISTORY_STEPS:-NEW_STEPS]:
            if view.step > self._past_until and view.counted:
                self._past.append(self._point(view, ranks))
        self._past_until = views[-NEW_STEPS - 1].step if len(views) > NEW_STEPS else -1
        new = [view for view in views[-NEW_STEPS:] if view.counted]
        self._new = {view.step: (len(view), self._point(view, ranks)) for view in new}
        return (*self._past, *(point for _, point in self._new.values()))[-HISTORY_STEPS:]

    def _point(self, view: StepAcrossRanks, ranks: int) -> HistoryPoint:
        known = self._new.get(view.step)
        return known[1] if known is not None and known[0] == len(view) else _point(view, len(view) >= ranks)


def _point(view: StepAcrossRanks, complete: bool) -> HistoryPoint:
    exposed = view.most_exposed_ns
    exposed_ns = None if exposed is None else int(exposed)
    if not complete:
        return HistoryPoint(view.step, view.longest_ns, exposed_ns, complete)
    overlaps = [value for value in view.row("overlap") if not math.isnan(value)]
    late = max((value for value in view.row("late") if not math.isnan(value)), default=None)
    overlap = median(overlaps) if overlaps else None
    return HistoryPoint(view.step, view.longest_ns, exposed_ns, complete, overlap, late)
