"""Trains data-parallel, watched by ddpwatch or not.

    torchrun --standalone --nproc-per-node=2 demo/train.py --watch

``--help`` lists the strategies, comm hooks and faults to inject; trainer/README.md explains them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the trainer is in the checkout only
from trainer import TrainerError, TrainResult, train
from trainer.cli import fail, parse_config
from trainer.distributed import World


def main(argv: list[str] | None = None) -> int:
    """Runs the training that the command line describes, and returns the exit code."""
    try:
        config, args = parse_config(argv)
        result = train(config, args.watch, args.record)
    except TrainerError as error:
        return fail(error)
    if World.from_environment().rank == 0:
        report(result)
    return 0


def report(result: TrainResult) -> None:
    """Prints how the training ended."""
    if result.interrupted:
        print(f"stopped as asked after step {result.steps}", flush=True)
    if result.test_accuracy is not None:
        print(f"test loss {result.test_loss:.4f} accuracy {result.test_accuracy:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
