"""A run's outline: points over all its steps, and the steps worth a closer look. Its memory is bounded."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.digest import share_of
from ddpwatch.common.units import NS_PER_MS

MOST_POINTS = 1000
SPREAD_STEPS = 16
EXTREME_STEPS = 8
_Tops = list[tuple[float, int, StepAcrossRanks]]  # a heap


@dataclass(frozen=True, slots=True)
class Point:
    """One step, or the slowest of several neighbours: means over its ranks, and the largest lateness."""

    step: int
    step_ms: float
    exposed_ms: float | None
    overlap: float | None
    late_ms: float | None


class Outline:
    """Collects the outline from steps in order.

    Args:
        most: Points.

    Attributes:
        points: Fewer than ``most``; each is the slowest of ``stride`` steps.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self.points: list[Point] = []
        self.stride = 1
        self._pending: list[Point] = []
        self._spread: list[StepAcrossRanks] = []
        self._spread_every = 1
        self._count = 0
        self._slowest: _Tops = []
        self._exposed: _Tops = []

    def add_step(self, across: StepAcrossRanks) -> None:
        """Adds one step, if it counts."""
        if not across.counted or not len(across):
            return
        point = _point(across)
        self._add_point(point)
        if self._is_kept(point):
            across = across.detached()  # its figures go; they are worked out again for the few that are drawn
            across.pack()
            self._add_spread(across)
            self._keep_top(self._slowest, point.step_ms, across)
            self._keep_top(self._exposed, point.exposed_ms, across)
        self._count += 1

    def _is_kept(self, point: Point) -> bool:
        tops = _is_top(self._slowest, point.step_ms) or _is_top(self._exposed, point.exposed_ms)
        return tops or self._count % self._spread_every == 0

    def details(self) -> list[tuple[StepAcrossRanks, str]]:
        """Returns the steps worth a closer look, in order, and why: ``slow``, ``exposed`` or ``sample``."""
        found = {across.step: (across, "sample") for across in self._spread}
        found.update({across.step: (across, "exposed") for _, _, across in self._exposed})
        found.update({across.step: (across, "slow") for _, _, across in self._slowest})
        return [found[step] for step in sorted(found)]

    def _add_point(self, point: Point) -> None:
        self._pending.append(point)
        if len(self._pending) < self.stride:
            return
        self.points.append(max(self._pending, key=lambda pending: pending.step_ms))
        self._pending = []
        if len(self.points) >= self._most:
            self.points = [max(pair, key=lambda p: p.step_ms) for pair in _pairs(self.points)]
            self.stride *= 2

    def _add_spread(self, across: StepAcrossRanks) -> None:
        """Keeps every n-th step; n doubles as the run goes on."""
        if self._count % self._spread_every == 0:
            self._spread.append(across)
            if len(self._spread) >= 2 * SPREAD_STEPS:
                self._spread = self._spread[::2]
                self._spread_every *= 2

    def _keep_top(self, heap: _Tops, value: float | None, across: StepAcrossRanks) -> None:
        """Keeps the largest. The count breaks ties, as steps have no order; a step number may come twice."""
        if value is None or not _is_top(heap, value):
            return
        heapq.heappush(heap, (value, self._count, across))
        if len(heap) > EXTREME_STEPS:
            heapq.heappop(heap)


def _is_top(heap: _Tops, value: float | None) -> bool:
    return value is not None and (len(heap) < EXTREME_STEPS or value > heap[0][0])


def _point(across: StepAcrossRanks) -> Point:
    share = across.share or share_of(across)  # already there, if the steps are those of a diagnosed run
    late_ns, exposed, hidden = max(across.skew.late.values(), default=None), share.exposed, share.hidden or 0
    return Point(
        step=across.step,
        step_ms=share.mean_ns / NS_PER_MS,
        exposed_ms=None if exposed is None else exposed / share.ranks / NS_PER_MS,
        overlap=hidden / (exposed + hidden) if exposed is not None and exposed + hidden else None,
        late_ms=None if late_ns is None else late_ns / NS_PER_MS,
    )


def _pairs(points: list[Point]) -> list[tuple[Point, ...]]:
    return [tuple(points[first : first + 2]) for first in range(0, len(points), 2)]
