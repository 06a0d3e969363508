"""One rank's endless, resumable stream of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from trainer.data.source import Sample
from trainer.distributed import World

Batch = tuple[Tensor, Tensor]


class BatchStream:
    """This rank's share of epoch after epoch, each shuffled differently.

    ``DistributedSampler`` deals the shuffled samples out in turn, so batch k of all ranks together is batch k of one
    process with a batch as large as all of theirs. That makes strategies comparable with ``single``.
    """

    def __init__(
        self,
        data: Dataset[Sample],
        batch_size: int,
        world: World,
        seed: int,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Start before the first batch of epoch 0; ``on_batch`` is called while a batch is being put together."""
        self._on_batch = on_batch
        self.sampler = _ResumableSampler(data, world, seed)
        self.loader = DataLoader(data, batch_size, sampler=self.sampler, drop_last=True, collate_fn=self._collate)
        self.batch_size = batch_size

    def _collate(self, samples: list[Sample]) -> Batch:
        self._on_batch()
        inputs, targets = default_collate(samples)
        return inputs, targets

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches for as long as the caller wants them."""
        while True:
            for batch in self.loader:
                self.sampler.consumed += self.batch_size
                yield batch
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that was yielded."""
        return {"epoch": self.sampler.epoch, "consumed": self.sampler.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; call before iterating."""
        self.sampler.set_epoch(state["epoch"])
        self.sampler.consumed = state["consumed"]


class _ResumableSampler(DistributedSampler[int]):
    """A ``DistributedSampler`` that can skip the samples an interrupted epoch has consumed."""

    def __init__(self, data: Dataset[Sample], world: World, seed: int) -> None:
        super().__init__(data, world.size, world.rank, seed=seed, drop_last=True)
        self.consumed = 0

    def __iter__(self) -> Iterator[int]:
        indices = list(super().__iter__())
        yield from indices[self.consumed :]

    def __len__(self) -> int:
        return super().__len__() - self.consumed

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.consumed = 0
