"""Synthetic data for benchmarks: any shape, no files, and still something to learn."""

from __future__ import annotations

import math

import torch
from torch.utils.data import TensorDataset

from trainer.data.source import DataSource
from trainer.data.text import TextBytes
from trainer.errors import TrainerError


def synthetic(
    *, kind: str = "vector", samples: int = 4096, size: int = 256, classes: int = 10, block_size: int = 64
) -> DataSource:
    """Draw random inputs, labelled by a random linear teacher.

    Args:
        kind: ``vector``, ``image`` or ``bytes``.
        samples: How many inputs to draw.
        size: Features of a vector, or pixels of a one-channel square image.
        classes: Number of labels.
        block_size: Length of a sequence of bytes.
    """
    draw = torch.Generator().manual_seed(0)
    if kind == "bytes":
        letters = torch.randint(97, 123, (samples * block_size + 1,), generator=draw, dtype=torch.uint8)
        return DataSource(TextBytes(bytes(letters.tolist()), block_size), None, "bytes", (block_size,), 256)
    if kind not in ("vector", "image"):
        raise TrainerError(f"data synthetic: kind={kind!r} is none of vector, image, bytes")
    inputs = torch.randn(samples, size, generator=draw)
    labels = (inputs @ torch.randn(size, classes, generator=draw)).argmax(dim=1)
    shape = (size,) if kind == "vector" else (1, math.isqrt(size), math.isqrt(size))
    if math.prod(shape) != size:
        raise TrainerError(f"data synthetic: an image of {size} pixels is not square")
    data = TensorDataset(inputs.view(samples, *shape), labels)
    return DataSource(data, None, "image" if kind == "image" else "vector", shape, classes)  # type: ignore[arg-type]
