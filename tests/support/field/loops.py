"""What several cases are made of: datasets that take their time, nets, validation."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.support.field.job import BATCH, WIDTH, Job


class Samples(Dataset[Tensor]):
    """So many samples, each of which takes a while."""

    def __init__(self, count: int, seconds: float = 0.0, width: int = WIDTH) -> None:
        self._count, self._seconds, self._width = count, seconds, width

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        self.wait(self._seconds)
        return torch.full((self._width,), index % 7 / 7)

    @staticmethod
    def wait(seconds: float) -> None:
        """Takes a while, as a disk does."""
        if seconds:
            time.sleep(seconds)


def wide(layers: int, width: int = WIDTH) -> nn.Sequential:
    """Returns a stack of linear layers."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def validate(job: Job, batches: int) -> None:
    """Validates on some batches, by the module that DDP wraps, as most scripts do."""
    job.model.module.eval()
    with torch.no_grad():
        for _ in range(batches):
            job.model.module(torch.randn(BATCH, WIDTH))
    job.model.module.train()
