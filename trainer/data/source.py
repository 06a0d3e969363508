"""Data as the models and the loop see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.utils.data import Dataset

Sample = tuple[Tensor, Tensor]
Kind = Literal["bytes", "image", "vector"]


@dataclass(frozen=True)
class DataSource:
    """Samples to train on, perhaps samples to test on, and the form of one sample.

    ``shape`` is the shape of one input without the batch dimension; targets are class indices below ``classes``.
    """

    train: Dataset[Sample]
    test: Dataset[Sample] | None
    kind: Kind
    shape: tuple[int, ...]
    classes: int
