"""A sequence with an item per rank, of which only those are made that a screen has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class ByRank(Sequence[T], Generic[T]):
    """Items of some ranks, each made when it is first read.

    Args:
        ranks: The ranks, in order.
        make: Makes a rank's item.
    """

    def __init__(self, ranks: Sequence[int], make: Callable[[int], T]) -> None:
        self.ranks = ranks
        self._make = make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Returns items by their index."""
        if isinstance(index, slice):
            return [self.of(rank) for rank in self.ranks[index]]
        return self.of(self.ranks[index])

    def of(self, rank: int) -> T:
        """Returns a rank's item."""
        if rank not in self._made:
            self._made[rank] = self._make(rank)
        return self._made[rank]
