"""What a model and the loop need to know about data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.utils.data import Dataset

Sample = tuple[Tensor, Tensor]
Kind = Literal["bytes", "image", "vector"]


@dataclass(frozen=True)
class DataSource:
    """Samples to train on, perhaps samples to test on, and what one sample is.

    ``shape`` is that of one input without the batch dimension; targets are class indices below ``classes``.
    """

    train: Dataset[Sample]
    test: Dataset[Sample] | None
    kind: Kind
    shape: tuple[int, ...]
    classes: int
