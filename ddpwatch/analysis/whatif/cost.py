"""What a collective costs by its size: a piecewise line through the mean of each size that was seen.

A collective takes α + bytes / rate, and the rate grows with the size, so the line bends. Where two collectives are in
flight (Gloo has two threads), they share the wire; what one would have taken alone is its *work*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from statistics import fmean, stdev
from typing import NamedTuple

from ddpwatch.analysis.whatif.wire import Wire

ALIKE = 1.1  # sizes within this factor are one
APART = 1.5  # the largest size over the smallest, from which latency and rate can be told apart
GLOO_THREADS = 2
FEWEST_PAIRS = 20
MOST_LOSS = 0.67  # three times as long
LEAST_SPREAD = 0.05  # sum of squares, of shares from 0 to 1


class Knot(NamedTuple):
    """The mean work of collectives of one size, and its standard error. Bytes and ns."""

    nbytes: float
    work: float
    error: float


@dataclass(frozen=True)
class Curve:
    """Work by size, in ns.

    Attributes:
        knots: By size. Work grows with it.
        lean: From -1 to 1: how far work leans towards the lowest or the highest that the knots allow. 0 is the best
            guess. The further away a size is from all knots, the more it matters.
    """

    knots: tuple[Knot, ...]
    lean: float = 0.0

    @property
    def bends(self) -> bool:
        """Whether sizes differ enough to tell latency from rate."""
        return self.knots[-1].nbytes >= APART * self.knots[0].nbytes

    @property
    def latency(self) -> float:
        """α: where the line through the two smallest sizes meets zero bytes; never negative."""
        if not self.bends:
            return 0.0
        first, second = self.knots[0], self.knots[1]
        slope = (second.work - first.work) / (second.nbytes - first.nbytes)
        return min(first.work, max(0.0, first.work - slope * first.nbytes))

    def work(self, nbytes: float) -> float:
        """What a collective of this size takes alone."""
        if nbytes <= 0:
            return 0.0
        best, spread = self._at(nbytes)
        return max(0.2 * best, best + self.lean * spread)

    def _at(self, nbytes: float) -> tuple[float, float]:
        """The best guess, and how far it may be off."""
        knots, last = self.knots, self.knots[-1]
        if len(knots) == 1:
            return last.work * nbytes / last.nbytes, abs(nbytes - last.nbytes) / last.nbytes * last.work + last.error
        if nbytes > last.nbytes:
            return self._beyond(nbytes)
        before = Knot(0.0, self.latency, knots[0].error)
        for knot in knots:
            if nbytes <= knot.nbytes:
                share = (nbytes - before.nbytes) / (knot.nbytes - before.nbytes)
                best = before.work + share * (knot.work - before.work)
                inside = 4 * share * (1 - share) * 0.1 * best if before.nbytes else (1 - share) * 0.3 * best
                return best, math.hypot(before.error * (1 - share) + knot.error * share, inside)
            before = knot
        raise AssertionError("the last knot ends the loop")

    def _beyond(self, nbytes: float) -> tuple[float, float]:
        """Above the largest size: on along the last piece, at most at its average rate."""
        before, last = self.knots[-2], self.knots[-1]
        average = last.work / last.nbytes
        slope = min(average, max(0.25 * average, (last.work - before.work) / (last.nbytes - before.nbytes)))
        further = nbytes - last.nbytes
        return last.work + slope * further, math.hypot(last.error, max(average - slope, 0.1 * average) * further)


def curve_of(samples: Sequence[tuple[float, float]]) -> Curve:
    """Fits the curve to pairs of size and work; at least one."""
    groups: list[list[tuple[float, float]]] = []
    for nbytes, work in sorted(samples):
        if not groups or nbytes > ALIKE * groups[-1][0][0]:
            groups.append([])
        groups[-1].append((nbytes, work))
    return Curve(tuple(_growing([_knot(group) for group in groups])))


def _knot(group: Sequence[tuple[float, float]]) -> Knot:
    works = [work for _, work in group]
    error = stdev(works) / math.sqrt(len(works)) if len(works) > 1 else 0.2 * works[0]
    return Knot(fmean(nbytes for nbytes, _ in group), fmean(works), error)


def _growing(knots: list[Knot]) -> list[Knot]:
    """Levels neighbours until work never falls with the size (isotonic regression)."""
    levels: list[list[Knot]] = []
    for knot in knots:
        levels.append([knot])
        while len(levels) > 1 and _level(levels[-2]) > _level(levels[-1]):
            levels[-2:] = [levels[-2] + levels[-1]]
    return [
        Knot(knot.nbytes, _level(level), max(knot.error, abs(knot.work - _level(level))))
        for level in levels
        for knot in level
    ]


def _level(knots: Sequence[Knot]) -> float:
    return fmean(knot.work for knot in knots)


def calibrated(wire: Wire, seen: Curve, ranks: int) -> Curve:
    """The curve of a sweep at the level that the job's own collectives show."""
    factor = ring_bytes(ranks) / ring_bytes(wire.world_size)
    shape = Curve(
        tuple(_growing([Knot(s.nbytes, 1e6 * factor * s.alone_ms, 0.5e6 * (s.high_ms - s.low_ms)) for s in wire.sizes]))
    )
    logs = [math.log(knot.work / shape.work(knot.nbytes)) for knot in seen.knots]
    level = math.exp(fmean(logs))
    doubt = stdev(logs) if len(logs) > 1 else 0.02
    return Curve(tuple(Knot(k.nbytes, k.work * level, k.work * level * min(0.3, doubt)) for k in shape.knots))


def ring_bytes(ranks: int) -> float:
    """How often each byte crosses a rank's link in an all-reduce."""
    return 2 * (ranks - 1) / ranks


def workers_of(backend: str) -> int:
    """How many collectives of a group are in flight at once: NCCL has one stream for them, Gloo two threads."""
    return GLOO_THREADS if "gloo" in backend else 1


def in_service(launches: Sequence[float], dones: Sequence[float], workers: int) -> list[float]:
    """When each collective began to move: a worker takes them in launch order."""
    free = [-math.inf] * workers
    starts = []
    for launch, done in zip(launches, dones, strict=True):
        starts.append(min(done, max(launch, free[0])))
        heapreplace(free, done)
    return starts


def works_of(starts: Sequence[float], dones: Sequence[float], sharing: float) -> list[float]:
    """What each collective would have taken alone; beside another, it moves at ``sharing`` of its speed."""
    works = [done - start for start, done in zip(starts, dones, strict=True)]
    if sharing == 1:
        return works
    for i in range(len(works)):
        for j in range(i + 1, len(works)):
            shared = min(dones[i], dones[j]) - max(starts[i], starts[j])
            if starts[j] >= dones[i] and shared <= 0:
                break
            if shared > 0:
                works[i] -= (1 - sharing) * shared
                works[j] -= (1 - sharing) * shared
    return works


Panel = list[list[tuple[float, float]]]  # rows of equally many pairs of x and y


def slowdown_of(panels: Sequence[Panel]) -> tuple[float, float] | None:
    """How many times longer, less 1, something takes where x is 1 than where it is 0; with the standard error.

    The time y has the work y · (1 − λx), which must not depend on x; the slowdown is λ / (1 − λ). Only what is left
    after the means of rows and columns counts. So neither a column that is always slower nor a row that is slower
    throughout (a slow step, a slow rank) looks like an effect of x. None if x hardly varies besides.
    """
    rows = [row for panel in panels for row in _residuals(panel)]
    spread = sum(x * x for x, _, _ in rows)
    lever = sum(x * xy for x, _, xy in rows)
    if len(rows) < FEWEST_PAIRS or spread < LEAST_SPREAD or lever <= 0:
        return None
    loss = min(MOST_LOSS, sum(x * y for x, y, _ in rows) / lever)
    rest = sum((y - loss * xy) ** 2 for _, y, xy in rows) / (len(rows) - 1)
    return loss / (1 - loss), math.sqrt(rest * spread) / lever / (1 - loss) ** 2


def _residuals(panel: Panel) -> list[tuple[float, float, float]]:
    """Of x, y and their product, y as a share of its column's mean."""
    if len(panel) < 2 or len(panel[0]) < 2:
        return []
    means = [fmean(column) for column in zip(*([y for _, y in row] for row in panel), strict=True)]
    ys = [[y / mean if mean else 1.0 for (_, y), mean in zip(row, means, strict=True)] for row in panel]
    xs = [[x for x, _ in row] for row in panel]
    products = [[x * y for x, y in zip(*pair, strict=True)] for pair in zip(xs, ys, strict=True)]
    return list(zip(_demeaned(xs), _demeaned(ys), _demeaned(products), strict=True))


def _demeaned(rows: Sequence[Sequence[float]]) -> list[float]:
    """What is left of each value without the means of its row and its column."""
    columns = [fmean(column) for column in zip(*rows, strict=True)]
    whole = fmean(columns)
    found = []
    for row in rows:
        mean = fmean(row)
        found += [value - mean - column + whole for value, column in zip(row, columns, strict=True)]
    return found
