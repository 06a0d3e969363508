"""Every rank over the whole run: how long its steps took, and how late it was. Memory is bounded, whatever the run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddpwatch.analysis.across_ranks import StepAcrossRanks

MOST_CELLS = 1 << 20  # ranks times columns: 12 MB here, 4 MB of a page
_LONGEST, _TIMED, _LATE = range(3)
_Cells = npt.NDArray[np.float32]


class RankStrips:
    """Collects a strip per rank, of columns that stand for ``stride`` neighbouring steps each.

    Where there would be too many cells, every two columns become one: so few ranks are known step by step.

    Args:
        most: Cells.

    Attributes:
        first: Number of the run's first step.
        stride: Steps of a column.
        columns: How many there are so far.
    """

    def __init__(self, most: int = MOST_CELLS) -> None:
        self._most = most
        self.first, self.stride, self.columns = 0, 1, 0
        self._strips: dict[int, int] = {}  # by rank
        self._cells: _Cells = np.zeros((3, 0, 0), np.float32)

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order: that of the strips in what is returned."""
        return sorted(self._strips)

    def add_step(self, across: StepAcrossRanks) -> None:
        """Adds one step, whatever is known of it. Ignores those from before the first."""
        if not self._strips:
            self.first = across.step
        if across.step < self.first:
            return
        if new := across.members - self._strips.keys():
            self._add_ranks(sorted(new))
        cells, strips = self._column(across.step), [self._strips[rank] for rank in across.members]
        took = np.array([step.duration_ns for step in across.ranks.values()], np.float32)
        cells[_LONGEST, strips] = np.maximum(cells[_LONGEST, strips], took)
        if across.counted and (late := across.skew.late):
            known = np.array([late.get(rank, np.nan) for rank in across.members], np.float32)
            cells[_TIMED, strips] += np.where(np.isnan(known), 0, took)
            cells[_LATE, strips] += np.nan_to_num(known)

    def longest_ns(self) -> _Cells:
        """Returns by rank and column the longest step (ns); 0 where there is none."""
        longest: _Cells = self._known()[_LONGEST].T
        return longest

    def late(self) -> _Cells:
        """Returns by rank and column how late the rank was, as a share of its time; NaN where it is not known."""
        _, timed, late = self._known()
        shares: _Cells = np.divide(late, timed, out=np.full_like(late, np.nan), where=timed > 0).T
        return shares

    def _known(self) -> _Cells:
        return self._cells[:, : self.columns, [self._strips[rank] for rank in self.ranks]]

    def _column(self, step: int) -> _Cells:
        """Returns the cells of a step's column: figures by strip."""
        while (column := (step - self.first) // self.stride) >= self._cells.shape[1]:
            self._halve()
        self.columns = max(self.columns, column + 1)
        return self._cells[:, column]

    def _add_ranks(self, ranks: list[int]) -> None:
        before = len(self._strips)
        self._strips.update({rank: before + place for place, rank in enumerate(ranks)})
        room = 2 * max(1, self._most // (2 * len(self._strips)))
        while self.columns > room:
            self._halve()
        cells = np.zeros((3, room, len(self._strips)), np.float32)
        cells[:, : self.columns, :before] = self._cells[:, : self.columns]
        self._cells = cells

    def _halve(self) -> None:
        """Makes every two columns one."""
        even, odd = self._cells[:, ::2], self._cells[:, 1::2]
        merged = even + odd
        merged[_LONGEST] = np.maximum(even[_LONGEST], odd[_LONGEST])
        self._cells = np.concatenate([merged, np.zeros_like(merged)], axis=1)
        self.stride *= 2
        self.columns = (self.columns + 1) // 2
