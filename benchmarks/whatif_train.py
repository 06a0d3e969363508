"""demo/train.py with what `benchmarks/whatif.py` needs: further options of DDP, and a model whose compute is pauses.

whatif_train.py '{"gradient_as_bucket_view": true}' --model paced:ms=10 --data digits …
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from demo.train import main
from trainer.data.source import DataSource
from trainer.models import MODELS
from trainer.models.dense import mlp
from trainer.strategies import ddp


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


def _pause(ms: float, module: nn.Module, inputs: Any, output: Tensor) -> Any:
    return Pause.apply(output, ms)


def paced(data: DataSource, *, width: int = 512, layers: int = 10, ms: float = 8.0) -> nn.Module:
    """An MLP that takes so many ms per layer, whatever else runs and however many ranks share the cores."""
    model = mlp(data, width=width, layers=layers)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(partial(_pause, ms))
    return model


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    setattr(ddp, "DistributedDataParallel", partial(DistributedDataParallel, **options))  # noqa: B010
    MODELS["paced"] = paced
    sys.exit(main(sys.argv[2:]))
