"""From ``--module-hook`` to hooks on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import nn

from trainer import spec
from trainer.layers import matching_layers
from trainer.module_hooks.activations import Chunk
from trainer.module_hooks.gradients import Clip, Scale, Transform


class ModuleHook(Protocol):
    """Something that can be attached to a layer."""

    @property
    def layer(self) -> str:
        """The pattern that layers have to match."""

    def attach(self, layer: nn.Module) -> None:
        """Attach to one layer."""


MODULE_HOOKS: dict[str, Callable[..., ModuleHook]] = {
    "clip": Clip,
    "scale": Scale,
    "transform": Transform,
    "chunk": Chunk,
}


def attach_module_hooks(model: nn.Module, specs: Iterable[str]) -> None:
    """Attach every hook to the layers that match its pattern, in the order given.

    Raises:
        TrainerError: Unknown name or option, or no layer matches.
    """
    for text in specs:
        hook = spec.build("module hook", text, MODULE_HOOKS)
        for _, layer in matching_layers(model, hook.layer):
            hook.attach(layer)
