"""The models, by name. Each factory takes the data and its own options."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from trainer import spec
from trainer.data.source import DataSource
from trainer.models.dense import branches, mlp, simple_block
from trainer.models.gpt import gpt
from trainer.models.resnet import resnet

__all__ = ["MODELS", "build_model"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt": gpt,
    "mlp": mlp,
    "simple-block": simple_block,
    "resnet": resnet,
    "branches": branches,
}


def build_model(name: str, data: DataSource) -> nn.Module:
    """Build a model by name, with options.

    Raises:
        TrainerError: Unknown name or option, or a model that cannot take this data.
    """
    return spec.build("model", name, MODELS, data)
