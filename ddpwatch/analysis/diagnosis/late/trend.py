"""The straight line through a rank's deviations, kept up to date point by point from exact sums."""

from __future__ import annotations

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


class Trend:
    """Points that come and go. All sums are of integers, so nothing is lost however many come.

    Attributes:
        count: How many there are.
    """

    __slots__ = ("_x", "_xx", "_xy", "_y", "_yy", "count")

    def __init__(self) -> None:
        self.count = self._x = self._y = self._xx = self._xy = self._yy = 0

    def add_point(self, x: int, y: int, sign: int = 1) -> None:
        """Takes a point."""
        self.count += sign
        self._x += sign * x
        self._y += sign * y
        self._xx += sign * x * x
        self._xy += sign * x * y
        self._yy += sign * y * y

    def drop(self, x: int, y: int) -> None:
        """Forgets a point."""
        self.add_point(x, y, -1)

    def line(self, last: int) -> Line:
        """Returns the line of the least squares, up to ``last``."""
        count, x, y = self.count, self._x, self._y
        xx, xy, yy = count * self._xx - x * x, count * self._xy - x * y, count * self._yy - y * y
        slope = xy / xx if xx else 0.0
        return Line(slope, slope * xy / yy if yy else 0.0, last, (y + slope * (count * last - x)) / count)
