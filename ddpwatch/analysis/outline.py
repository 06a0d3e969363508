"""A run's outline: a line of points over all steps, and the steps worth looking at in detail. Bounded in memory."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from statistics import fmean

from ddpwatch.analysis.assembly import StepGroup
from ddpwatch.analysis.step import NS_PER_MS

MOST_POINTS = 1000
SPREAD_STEPS = 16
EXTREME_STEPS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """One step, or the slowest of several neighbours. Mean over the ranks, in ms."""

    step: int
    step_ms: float
    exposed_ms: float | None
    overlap: float | None
    late_ms: float | None


class Outline:
    """Collects the outline, step by step in order.

    Attributes:
        points: At most `MOST_POINTS`; each stands for ``stride`` steps.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.stride = 1
        self._pending: list[Point] = []
        self._spread: list[StepGroup] = []
        self._spread_every = 1
        self._count = 0
        self._slowest: list[tuple[float, int, StepGroup]] = []
        self._exposed: list[tuple[float, int, StepGroup]] = []

    def add(self, group: StepGroup) -> None:
        """Takes one step; warm-up, aborted and unwatched ones are left out."""
        if not group.counted or not group.figures:
            return
        point = _point(group)
        self._add_point(point)
        self._add_spread(group)
        self._keep_top(self._slowest, point.step_ms, group)
        if point.exposed_ms is not None:
            self._keep_top(self._exposed, point.exposed_ms, group)

    def details(self) -> list[tuple[StepGroup, str]]:
        """Steps to look at, in order, and why: ``slow``, ``exposed`` or ``sample``."""
        found: dict[int, tuple[StepGroup, str]] = {group.number: (group, "sample") for group in self._spread}
        found.update({group.number: (group, "exposed") for _, _, group in self._exposed})
        found.update({group.number: (group, "slow") for _, _, group in self._slowest})
        return [found[number] for number in sorted(found)]

    def _add_point(self, point: Point) -> None:
        self._pending.append(point)
        if len(self._pending) < self.stride:
            return
        self.points.append(max(self._pending, key=lambda pending: pending.step_ms))
        self._pending = []
        if len(self.points) >= MOST_POINTS:
            self.points = [max(pair, key=lambda p: p.step_ms) for pair in _pairs(self.points)]
            self.stride *= 2

    def _add_spread(self, group: StepGroup) -> None:
        """Keeps every n-th step, with n doubling as the run goes on."""
        if self._count % self._spread_every == 0:
            self._spread.append(group)
            if len(self._spread) >= 2 * SPREAD_STEPS:
                self._spread = self._spread[::2]
                self._spread_every *= 2
        self._count += 1

    def _keep_top(self, heap: list[tuple[float, int, StepGroup]], value: float, group: StepGroup) -> None:
        """The count keeps groups from being compared: a step number may come twice."""
        entry = (value, self._count, group)
        if len(heap) < EXTREME_STEPS:
            heapq.heappush(heap, entry)
        elif value > heap[0][0]:
            heapq.heapreplace(heap, entry)


def _point(group: StepGroup) -> Point:
    figures = list(group.figures.values())
    exposed = [figure.exposed_ns for figure in figures if figure.exposed_ns is not None and figure.comm_ns]
    overlaps = [figure.overlap for figure in figures if figure.overlap is not None]
    late = [bucket.last - bucket.first for bucket in group.buckets]
    return Point(
        step=group.number,
        step_ms=fmean(figure.step_ns for figure in figures) / NS_PER_MS,
        exposed_ms=fmean(exposed) / NS_PER_MS if exposed else None,
        overlap=fmean(overlaps) if overlaps else None,
        late_ms=max(late) / NS_PER_MS if late else None,
    )


def _pairs(points: list[Point]) -> list[tuple[Point, ...]]:
    return [tuple(points[place : place + 2]) for place in range(0, len(points), 2)]
