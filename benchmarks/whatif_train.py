"""demo/train.py with what `benchmarks/whatif.py` needs: many settings in one process, DDP's options, a paced model.

whatif_train.py PLAN

PLAN is a JSON file, a list of ``{"arguments": […], "options": {…}, "setting": {…}, "described": FILE}``: the arguments
of demo/train.py, further options of DDP, and what rank 0 writes to FILE once that training is over.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
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


def run(plan: Sequence[Mapping[str, Any]]) -> None:
    """Trains once per entry. Each training has a port of its own, as the one before may still be open."""
    port = int(os.environ["MASTER_PORT"])
    MODELS["paced"] = paced
    for number, entry in enumerate(plan):
        os.environ["MASTER_PORT"] = str(port + number)
        setattr(ddp, "DistributedDataParallel", partial(DistributedDataParallel, **entry["options"]))  # noqa: B010
        if code := main(entry["arguments"]):
            sys.exit(code)
        gc.collect()
        if os.environ["RANK"] == "0":
            Path(entry["described"]).write_text(json.dumps(entry["setting"]))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
