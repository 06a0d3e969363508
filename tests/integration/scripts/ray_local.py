"""``with_ray.py`` in Ray's local mode: the same training function, in ranks that torchrun or a test has started.

The unwatched twin: a second cluster would cost 15 s of processor time.
"""

import os
import sys
from pathlib import Path

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from unmodified import with_ray


class Kept:
    """In place of a checkpoint, which local mode does not store."""

    state: dict[str, torch.Tensor]

    @classmethod
    def from_directory(cls, folder: str) -> None:
        cls.state = torch.load(Path(folder) / "model.pt")


def main() -> None:
    with_ray.Checkpoint = Kept
    configuration = {"lr": 1e-3, "epochs": 2}
    scaling = ScalingConfig(num_workers=0)
    result = TorchTrainer(with_ray.train, train_loop_config=configuration, scaling_config=scaling).fit()
    if os.environ["RANK"] == "0":
        print(f"trained, last loss {result.metrics['loss']:.6f}")
        torch.save(Kept.state, sys.argv[1])


if __name__ == "__main__":
    main()
