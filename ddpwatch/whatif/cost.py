"""What a collective costs by its size: a piecewise line through the mean of each size that was seen.

A collective takes α + bytes / rate, and the rate grows with the size, so the line bends. Where two collectives are in
flight (Gloo has two threads), they share the wire; what one would have taken alone is its *work*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from statistics import fmean, median, stdev
from typing import NamedTuple

from ddpwatch.whatif.wire import LARGE_BYTES, Wire

ALIKE = 1.25  # sizes within this factor are one
APART = 1.5  # the largest size over the smallest, from which latency and rate can be distinguished
KNOT_DOUBT = 0.03  # of a knot, besides its standard error, when a slope is taken from it
# What is likely before anything is seen, as standard deviations: of the latency (ns), and of the rate of one size, or
# above the largest (as a share of the rate of all).
LATENCY_PRIOR_NS, RATE_PRIOR = 2e6, 0.05
LATENCY_DOUBT = 0.5  # of it: what a line through two sizes leaves at zero bytes may be what bytes take
QUEUE_DOUBT = 0.4  # of what a collective loses to another one: the first of two may lose nothing
EVEN_ROUNDS = 4  # over all pairs, as what one gets changes what its neighbours get
FEWEST_PAIRS = 20
MOST_LOSS = 0.67  # three times as long
LEAST_SPREAD = 0.05  # sum of squares, of shares from 0 to 1


class Guess(NamedTuple):
    """A fitted number and its standard error."""

    value: float
    error: float


class WorkSample(NamedTuple):
    """A collective: its bytes, what it would have taken alone, and how far that may be off (`evened`). ns."""

    nbytes: float
    work: float
    doubt: float = 0.0


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
        hop_lean: The same of the latency that grows with the number of ranks.
    """

    knots: tuple[Knot, ...]
    lean: float = 0.0
    hop_lean: float = 0.0

    @property
    def bends(self) -> bool:
        """Whether sizes differ enough to tell latency from rate."""
        return self.knots[-1].nbytes >= APART * self.knots[0].nbytes

    @property
    def latency(self) -> float:
        """α: where the line through the two smallest sizes meets zero bytes; never negative."""
        return self._latency()[0]

    @property
    def hop_latency(self) -> float:
        """The latency, or as far off as `hop_lean` says."""
        best, doubt = self._latency()
        return min(self.knots[0].work, max(0.0, best + self.hop_lean * doubt))

    def _latency(self) -> tuple[float, float]:
        """Returns the best guess and its standard error."""
        if not self.bends:
            return 0.0, 0.0
        first = self.knots[0]
        likely = Expected(first.work / first.nbytes, LATENCY_PRIOR_NS / first.nbytes)
        slope, doubt = _slope(first, self.knots[1], likely)
        best = min(first.work, max(0.0, first.work - slope * first.nbytes))
        return best, math.hypot(doubt * first.nbytes, LATENCY_DOUBT * best)

    def work(self, nbytes: float) -> float:
        """Returns what a collective of this size takes alone."""
        if nbytes <= 0:
            return 0.0
        best, spread = self._at(nbytes)
        return max(0.2 * best, best + self.lean * spread)

    def _at(self, nbytes: float) -> tuple[float, float]:
        """Returns the best guess, and how far it may be off."""
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
        """Goes on above the largest size along the last piece, at most at its average rate."""
        before, last = self.knots[-2], self.knots[-1]
        average = last.work / last.nbytes
        prior = math.hypot(RATE_PRIOR * average, LATENCY_PRIOR_NS / last.nbytes)
        slope, doubt = _slope(before, last, Expected(average, prior))
        slope = min(average, max(0.25 * average, slope))
        further = nbytes - last.nbytes
        return last.work + slope * further, math.hypot(last.error, max(average - slope, doubt) * further)


class Expected(NamedTuple):
    """What is likely before anything is seen, and its standard deviation."""

    value: float
    prior: float

    def drawn(self, seen: float, error: float) -> tuple[float, float]:
        """Returns what was seen with an error, drawn towards this; and the standard error of that."""
        trust = self.prior**2 / (self.prior**2 + error**2)
        return self.value + trust * (seen - self.value), error * trust**0.5


def _slope(first: Knot, second: Knot, expected: Expected) -> tuple[float, float]:
    """Returns the slope between two knots and its standard error: the closer they are, the less they say about it."""
    apart = second.nbytes - first.nbytes
    doubts = (knot.error + KNOT_DOUBT * knot.work for knot in (first, second))
    return expected.drawn((second.work - first.work) / apart, math.hypot(*doubts) / apart)


def curve_of(samples: Sequence[WorkSample]) -> Curve:
    """Fits the curve to at least one collective."""
    groups: list[list[WorkSample]] = []
    for sample in sorted(samples):
        if not groups or sample.nbytes > ALIKE * groups[-1][0].nbytes:
            groups.append([])
        groups[-1].append(sample)
    return Curve(tuple(_growing([_knot(group) for group in groups])))


def _knot(group: Sequence[WorkSample]) -> Knot:
    works = [sample.work for sample in group]
    error = stdev(works) / math.sqrt(len(works)) if len(works) > 1 else 0.2 * works[0]
    doubt = fmean(sample.doubt for sample in group)
    return Knot(fmean(sample.nbytes for sample in group), fmean(works), math.hypot(error, doubt))


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
    """Returns the job's own curve, which a sweep continues below its smallest and above its largest size.

    Where the job shows one size only, the sweep gives the shape, and the job the level.
    """
    sizes = [Knot(s.nbytes, 1e6 * s.alone_ms, 0.5e6 * (s.high_ms - s.low_ms)) for s in wire.sizes]
    ring = ring_bytes(ranks) / ring_bytes(wire.world_size)
    hops = hops_of(ranks, wire.backend) / hops_of(wire.world_size, wire.backend)
    shape = _among(Curve(tuple(_growing(sizes))), ring, hops)
    levels = [knot.work / shape.work(knot.nbytes) for knot in seen.knots]
    logs = list(map(math.log, levels))
    doubt = min(0.3, stdev(logs) if len(logs) > 1 else 0.02)
    first, last = seen.knots[0], seen.knots[-1]
    knots = [
        *(
            Knot(k.nbytes, k.work * levels[0], k.work * levels[0] * doubt)
            for k in shape.knots
            if k.nbytes < first.nbytes
        ),
        *seen.knots,
        *(
            Knot(k.nbytes, k.work * levels[-1], k.work * levels[-1] * doubt)
            for k in shape.knots
            if k.nbytes > last.nbytes
        ),
    ]
    return Curve(tuple(_growing(knots)))


def _among(curve: Curve, ring: float, hops: float) -> Curve:
    """Returns the curve among another number of ranks.

    Latency grows with the hops, and the rest with how often bytes cross.
    """
    latency = curve.latency
    return Curve(
        tuple(
            Knot(knot.nbytes, min(latency, knot.work) * hops + max(0.0, knot.work - latency) * ring, knot.error * ring)
            for knot in curve.knots
        )
    )


def link_of(wire: Wire, ranks: int) -> float:
    """Returns the ns per byte that the link takes: that of a sweep's large collectives, alone and at their fastest."""
    factor = ring_bytes(ranks) / ring_bytes(wire.world_size)
    large = [size for size in wire.sizes if size.nbytes >= LARGE_BYTES] or wire.sizes[-1:]
    return factor * median(1e6 * size.low_ms / size.nbytes for size in large)


def ring_bytes(ranks: int) -> float:
    """Returns how often each byte crosses a rank's link in an all-reduce."""
    return 2 * (ranks - 1) / ranks


def hops_of(ranks: int, backend: str) -> float:
    """Returns how often a message is passed on.

    Along a ring, or where NCCL would rather have it, up and down a tree.
    """
    ring = float(ranks - 1)
    return min(ring, max(1.0, math.log2(ranks))) if "nccl" in backend and ranks > 1 else ring


def workers_of(backend: str) -> int:
    """Returns how many collectives of a group are in flight at once: NCCL has one stream for them, Gloo two threads."""
    return 2 if backend == "gloo" else 1


def in_service(launches: Sequence[float], dones: Sequence[float], workers: int) -> list[float]:
    """Returns when each collective began to move: a worker takes them in launch order."""
    free = [-math.inf] * workers
    starts = []
    for launch, done in zip(launches, dones, strict=True):
        starts.append(min(done, max(launch, free[0])))
        heapreplace(free, done)
    return starts


class Overlap(NamedTuple):
    """Two collectives that were in flight at once, by position, and the ns that each has lost to the other by that."""

    first: int
    second: int
    lost: float


def shares_of(starts: Sequence[float], dones: Sequence[float], sharing: float) -> tuple[list[float], list[Overlap]]:
    """Returns what each of a step's collectives would have taken alone, with its share, and which were not alone.

    Beside another, a collective moves at ``sharing`` of its speed, on average.
    """
    works = [done - start for start, done in zip(starts, dones, strict=True)]
    overlaps = []
    for i in range(len(works) if sharing < 1 else 0):
        for j in range(i + 1, len(works)):
            shared = min(dones[i], dones[j]) - max(starts[i], starts[j])
            if starts[j] >= dones[i] and shared <= 0:
                break
            if shared > 0:
                overlaps.append(Overlap(i, j, (1 - sharing) * shared))
    for i, j, lost in overlaps:
        works[i] -= lost
        works[j] -= lost
    return works, overlaps


def evened(works: Sequence[float], overlaps: Sequence[Overlap], sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Returns what each collective would have taken alone, as is most likely by its size, and how far that may be off.

    Where two wait in one queue, the first one gets more than its share and the second one less. So what both take
    together is known, and what each of them takes is drawn towards what its size takes at the rate of all. How far it
    is off matters for unlike sizes only: of many of one size, it averages out.
    """
    if not overlaps:
        return [(work, 0.0) for work in works]
    rate = sum(works) / sum(sizes)
    likely = [Expected(rate * size, math.hypot(RATE_PRIOR * rate * size, LATENCY_PRIOR_NS)) for size in sizes]
    settled, doubts = _even_out(works, overlaps, likely), [0.0] * len(works)
    for i, j, lost in overlaps:
        if max(sizes[i], sizes[j]) > ALIKE * min(sizes[i], sizes[j]):
            doubt = 1 / math.sqrt(_trust(likely[i].prior) + _trust(likely[j].prior) + _trust(QUEUE_DOUBT * lost))
            doubts[i] += doubt
            doubts[j] += doubt
    return list(zip(settled, doubts, strict=True))


def _even_out(shares: Sequence[float], overlaps: Sequence[Overlap], likely: Sequence[Expected]) -> list[float]:
    """Moves what one of two has lost to the other to where it is most likely, at most all of it."""
    works, moved = list(shares), [0.0] * len(overlaps)
    trust = [_trust(each.prior) for each in likely]
    for _ in range(EVEN_ROUNDS):
        for at, (i, j, lost) in enumerate(overlaps):
            one, other = works[i] - moved[at], works[j] + moved[at]
            pull = trust[i] * (likely[i].value - one) - trust[j] * (likely[j].value - other)
            best = pull / (trust[i] + trust[j] + _trust(QUEUE_DOUBT * lost))
            moved[at] = min(lost, max(-lost, best))
            works[i], works[j] = one + moved[at], other - moved[at]
    return works


def _trust(error: float) -> float:
    return 1 / error**2


Panel = list[list[tuple[float, float]]]  # rows of equally many pairs of x and y


def slowdown_of(panels: Sequence[Panel]) -> tuple[float, float] | None:
    """Returns how many times longer, less 1, something takes where x is 1 than where it is 0; with the standard error.

    The time y has the work y · (1 − λx), which must not depend on x; the slowdown is λ / (1 − λ). Only what is left
    after the means of rows and columns counts. So neither a column that is always slower nor a row that is slower
    throughout (a slow step, a slow rank) looks like an effect of x. None if x hardly varies besides.
    """
    rows = [row for panel in panels for row in _residuals(panel)]
    free = sum((len(panel) - 1) * (len(panel[0]) - 1) for panel in panels if panel) - 1  # means are taken off
    spread = sum(x * x for x, _, _ in rows)
    lever = sum(x * xy for x, _, xy in rows)
    if len(rows) < FEWEST_PAIRS or free < 1 or spread < LEAST_SPREAD or lever <= 0:
        return None
    loss = min(MOST_LOSS, sum(x * y for x, y, _ in rows) / lever)
    rest = sum((y - loss * xy) ** 2 for _, y, xy in rows) / free
    return loss / (1 - loss), math.sqrt(rest * spread) / lever / (1 - loss) ** 2


def _residuals(panel: Panel) -> list[tuple[float, float, float]]:
    """Returns x, y and their product, y as a share of its column's mean."""
    if len(panel) < 2 or len(panel[0]) < 2:
        return []
    means = [fmean(column) for column in zip(*([y for _, y in row] for row in panel), strict=True)]
    ys = [[y / mean if mean else 1.0 for (_, y), mean in zip(row, means, strict=True)] for row in panel]
    xs = [[x for x, _ in row] for row in panel]
    products = [[x * y for x, y in zip(*pair, strict=True)] for pair in zip(xs, ys, strict=True)]
    return list(zip(_demeaned(xs), _demeaned(ys), _demeaned(products), strict=True))


def _demeaned(rows: Sequence[Sequence[float]]) -> list[float]:
    """Returns what is left of each value without the means of its row and its column."""
    columns = [fmean(column) for column in zip(*rows, strict=True)]
    whole = fmean(columns)
    found = []
    for row in rows:
        mean = fmean(row)
        found += [value - mean - column + whole for value, column in zip(row, columns, strict=True)]
    return found
