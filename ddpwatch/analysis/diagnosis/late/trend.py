"""The straight line through a rank's deviations."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from statistics import fmean
from typing import NamedTuple


class Line(NamedTuple):
    """A straight line: its slope, the share of variance that it explains, and its end."""

    slope: float
    fit: float
    last: int
    end: float

    def at(self, x: int) -> float:
        """Returns its value there."""
        return self.end - self.slope * (self.last - x)


def line_through(points: Sequence[tuple[int, float]], last: int) -> Line:
    """Returns the line of the least squares, up to ``last``."""
    x, y = map(fmean, zip(*points, strict=True))
    xs, ys = [at - x for at, _ in points], [value - y for _, value in points]
    xx, xy, yy = sum(map(mul, xs, xs)), sum(map(mul, xs, ys)), sum(map(mul, ys, ys))
    slope = xy / xx if xx else 0.0
    return Line(slope, slope * xy / yy if yy else 0.0, last, y + slope * (last - x))
