"""Chooses the steps of which figures are kept, so that memory does not grow with a run."""

from __future__ import annotations

from random import Random


class StepSample:
    """Chooses all steps until there are too many. Of more, each has the same chance (Vitter's algorithm R).

    Every n-th step would not do: runs have rhythms.

    Args:
        most: How many are kept.
    """

    __slots__ = ("_most", "_random", "_seen")

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen = 0
        self._random = Random(0)

    def place(self) -> int | None:
        """Returns the place of the next step, from 0, in which another one may be that goes; None to leave it out."""
        self._seen += 1
        place = self._seen - 1 if self._seen <= self._most else self._random.randrange(self._seen)
        return place if place < self._most else None
