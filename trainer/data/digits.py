"""The 8×8 handwritten digits."""

from __future__ import annotations

import gzip
from functools import cache
from importlib import resources

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from trainer.data.source import DataSource

TRAIN_IMAGES = 1437


def digits() -> DataSource:
    """Read 1,437 images to train on and 360 to test on, ``(1, 8, 8)`` float32 between 0 and 1."""
    table = _read_table()
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    images, labels = table[order, :64].float().div(16).view(-1, 1, 8, 8), table[order, 64]
    train = TensorDataset(images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])
    test = TensorDataset(images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])
    return DataSource(train, test, "image", (1, 8, 8), classes=10)  # type: ignore[arg-type]


@cache
def _read_table() -> Tensor:
    """Read the file: one row of 64 pixels and a label per image."""
    packed = resources.files("trainer.data").joinpath("digits.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode("ascii").splitlines()
    return torch.tensor([[int(value) for value in line.split(",")] for line in lines])
