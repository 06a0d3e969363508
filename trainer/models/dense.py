"""Models of linear layers: a deep one, the smallest one, and one whose branches finish together."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from trainer.data.source import DataSource
from trainer.errors import TrainerError


def mlp(data: DataSource, *, width: int = 256, layers: int = 3) -> nn.Module:
    """Stack ``layers`` hidden layers of ``width``."""
    sizes = [_features(data, "mlp"), *[width] * layers]
    hidden = [nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, data.classes))


def simple_block(data: DataSource, *, width: int = 128) -> nn.Module:
    """Linear, ReLU, linear: four parameters, the smallest model whose backward has anything to show."""
    features = _features(data, "simple-block")
    return nn.Sequential(nn.Flatten(), nn.Linear(features, width), nn.ReLU(), nn.Linear(width, data.classes))


def branches(data: DataSource, *, count: int = 4, width: int = 256) -> nn.Module:
    """Sum ``count`` branches of the same depth."""
    return Branches(_features(data, "branches"), data.classes, count, width)


class Branches(nn.Module):
    """Branches of the same depth over the same input.

    Their gradients become computable at the same moment, when the sum's gradient is known; autograd then walks
    them one after the other, the branch that ran last in forward first.
    """

    def __init__(self, features: int, classes: int, count: int, width: int) -> None:
        """Build ``count`` branches, each linear, ReLU, linear."""
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, ...)`` to logits ``(batch, classes)``."""
        flat = x.flatten(1)
        return torch.stack([branch(flat) for branch in self.branches]).sum(dim=0)


def _features(data: DataSource, model: str) -> int:
    if data.kind == "bytes":
        raise TrainerError(f"model {model} takes images or vectors, not text; try --data digits, or --model gpt")
    return math.prod(data.shape)
