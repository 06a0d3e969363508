"""How two clocks differ: bounds of their offset and drift, fitted to hard bounds over a sliding window.

At any moment, the other clock's time is this clock's time + offset, and the offset drifts. A bound says that the offset
was at least, or at most, so much at some time. Each one cuts a half plane off the plane of all (drift, offset): what is
left is a polygon, and every question to it is a linear program in two variables, answered by its corners. If nothing
is left, the clock has jumped: what was known is dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_DRIFT_PPM = 200.0  # crystals differ by less than 50 each; the rest is for clocks that are being slewed
DRIFT_CHANGE_PPM = 1.0  # by which the drift may change within the window, as machines warm up
STRAY_PPM = DRIFT_CHANGE_PPM / 2  # so all that it was within the window differs from its middle by no more
WINDOW_NS = 120_000_000_000
CHUNK_NS = 5_000_000_000  # how often old bounds are thinned out
ROUNDING_NS = 1.0
AT_LEAST, AT_MOST = 1, -1

Corner = tuple[float, float]  # drift (ppm) and offset (ns) at the polygon's origin


class Bound(NamedTuple):
    """A bound of the offset (ns) at a time of the one clock, from one side. See `at_least` and `at_most`."""

    at_ns: int
    value: int
    side: int


def at_least(at_ns: int, value: int) -> Bound:
    """Returns the bound below which the offset was not."""
    return Bound(at_ns, value, AT_LEAST)


def at_most(at_ns: int, value: int) -> Bound:
    """Returns the bound above which the offset was not."""
    return Bound(at_ns, value, AT_MOST)


class ClockOffset:
    """What to add to one clock's times to get another's: an interval.

    Attributes:
        epoch: How often the clock has jumped.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._chunks: deque[list[Bound]] = deque()
        self._chunk_end = 0
        self._origin_ns, self._origin_offset = 0, 0
        self._polygon: list[Corner] = []  # empty while one side is unbounded

    @property
    def bounded(self) -> bool:
        """Whether it is known from both sides."""
        return bool(self._polygon)

    @property
    def drift_ppm(self) -> tuple[float, float]:
        """Bounds of the drift, in millionths of the time that passes."""
        drifts = [drift for drift, _ in self._polygon] or [-MAX_DRIFT_PPM, MAX_DRIFT_PPM]
        return min(drifts) - STRAY_PPM, max(drifts) + STRAY_PPM

    @property
    def newest(self) -> tuple[int, int]:
        """Bounds of the offset at about the newest bound, if it is bounded."""
        return self.between(self._origin_ns, self._origin_ns)

    def add_bounds(self, *bounds: Bound) -> None:
        """Takes bounds that were found together. If those before contradict them, the clock has jumped."""
        if bounds and not self._agree(bounds):
            self.epoch += 1
            self._chunks.clear()
            if not self._agree(bounds):  # it jumped in between
                self._chunks.clear()
                self._agree(bounds[-1:])

    def between(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Bounds of the offset at any time in [start, end], if it is bounded."""
        ends = [self._at(start_ns), self._at(end_ns)]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        return self._origin_offset + math.floor(low), self._origin_offset + math.ceil(high)

    # -- inside ----------------------------------------------------------------------------------------------

    def _at(self, at_ns: int) -> tuple[float, float]:
        ms = (at_ns - self._origin_ns) / 1e6  # ppm times ms is ns
        offsets = [offset + drift * ms for drift, offset in self._polygon]
        slack = STRAY_PPM * abs(ms)
        return min(offsets) - slack, max(offsets) + slack

    def _agree(self, bounds: Sequence[Bound]) -> bool:
        """Adds bounds; returns whether anything is left."""
        newest = max(bound.at_ns for bound in bounds)
        fresh = not self._chunks or newest >= self._chunk_end
        if fresh:
            self._start_chunk(newest)
        self._chunks[-1] += bounds
        if fresh or not self._polygon:
            return self._fit()
        for bound in bounds:
            self._polygon = self._polygon and self._cut(self._polygon, bound)
        return bool(self._polygon)

    def _start_chunk(self, at_ns: int) -> None:
        """Thins out what is no longer new, and drops what is too old."""
        if self._chunks:
            self._chunks[-1] = [kept for side in (AT_LEAST, AT_MOST) for kept in _hull(self._chunks[-1], side)]
        while self._chunks and self._chunks[0][-1].at_ns < at_ns - WINDOW_NS:
            self._chunks.popleft()
        self._chunks.append([])
        self._chunk_end = at_ns + CHUNK_NS

    def _fit(self) -> bool:
        """Finds what all bounds in the window leave, around the newest of them; returns whether anything is left."""
        bounds = [bound for chunk in reversed(self._chunks) for bound in reversed(chunk)]
        self._polygon = []
        if len({bound.side for bound in bounds}) < 2:
            return True
        self._origin_ns, self._origin_offset, _ = bounds[0]
        self._polygon = self._box(bounds)
        for bound in bounds:
            self._polygon = self._polygon and self._cut(self._polygon, bound)
        return bool(self._polygon)

    def _box(self, bounds: Sequence[Bound]) -> list[Corner]:
        """Returns all offsets that the bounds leave with any drift; no corners if none."""
        low, high = -math.inf, math.inf
        for bound in bounds:
            ms, value = self._relative(bound)
            reach = MAX_DRIFT_PPM * abs(ms)
            low, high = (max(low, value - reach), high) if bound.side == AT_LEAST else (low, min(high, value + reach))
        drift = MAX_DRIFT_PPM
        return [(-drift, low), (drift, low), (drift, high), (-drift, high)] if low <= high else []

    def _cut(self, polygon: list[Corner], bound: Bound) -> list[Corner]:
        """Returns what a bound leaves of a convex polygon."""
        ms, value = self._relative(bound)
        inside = [bound.side * (offset + drift * ms - value) for drift, offset in polygon]
        if min(inside) >= 0:
            return polygon
        kept: list[Corner] = []
        for position, (corner, at) in enumerate(zip(polygon, inside, strict=True)):
            before, at_before = polygon[position - 1], inside[position - 1]
            if (at < 0) != (at_before < 0):
                kept.append(_on_the_way(before, corner, at_before / (at_before - at)))
            if at >= 0:
                kept.append(corner)
        return kept

    def _relative(self, bound: Bound) -> tuple[float, float]:
        """Returns the time (ms) and value of a bound, from the origin.

        The farther away, the more the drift may have changed.
        """
        ms = (bound.at_ns - self._origin_ns) / 1e6
        slack = STRAY_PPM * abs(ms) + ROUNDING_NS
        return ms, bound.value - self._origin_offset - bound.side * slack


def _on_the_way(a: Corner, b: Corner, share: float) -> Corner:
    return a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])


def _hull(bounds: Sequence[Bound], side: int) -> list[Bound]:
    """Returns the bounds of one side that a line can touch: no other one will ever matter."""
    kept: list[Bound] = []
    for bound in sorted(bound for bound in bounds if bound.side == side):
        while len(kept) >= 2 and side * _turn(kept[-2], kept[-1], bound) >= 0:
            kept.pop()
        kept.append(bound)
    return kept


def _turn(a: Bound, b: Bound, c: Bound) -> int:
    return (b.at_ns - a.at_ns) * (c.value - a.value) - (b.value - a.value) * (c.at_ns - a.at_ns)
