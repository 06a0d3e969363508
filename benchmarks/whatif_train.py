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
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from demo.train import main
from tests.support.paced import pace
from trainer.data.source import DataSource
from trainer.models import MODELS
from trainer.models.dense import mlp
from trainer.strategies import ddp


def paced(data: DataSource, *, width: int = 512, layers: int = 10, ms: float = 8.0) -> nn.Module:
    """An MLP that takes so many ms per layer, whatever else runs and however many ranks share the cores."""
    model = mlp(data, width=width, layers=layers)
    pace(model, ms)
    return model


def run(plan: Sequence[Mapping[str, Any]]) -> None:
    """Trains once per entry. Each training has a port of its own, as the one before may still be open."""
    port = int(os.environ["MASTER_PORT"])
    MODELS["paced"] = MODELS["wide"] = paced
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
