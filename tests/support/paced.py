"""Compute as pauses: a layer takes so many ms, whatever else runs and however many ranks share the cores.

That is how a GPU looks to its host. Ranks on a machine with few cores then do not slow each other.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Pause(torch.autograd.Function):
    """Waits in the forward, and twice as long in the backward, as compute would."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, ms: float) -> Tensor:
        """See above."""
        ctx.ms = ms
        time.sleep(ms / 1e3)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """See above."""
        time.sleep(2 * ctx.ms / 1e3)
        return gradients[0], None


def pace(model: nn.Module, ms: float) -> None:
    """Makes every linear layer take ``ms`` longer in the forward, and twice that in the backward."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(partial(_pause, ms))


def _pause(ms: float, module: nn.Module, inputs: Any, output: Tensor) -> Any:
    return Pause.apply(output, ms)
