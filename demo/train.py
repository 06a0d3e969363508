"""Train data-parallel, watched by ddpwatch or not.

Run it as ``torchrun --nproc-per-node=2 demo/train.py --watch``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer import TrainerError, TrainResult, train
from trainer.cli import fail, parse_config
from trainer.distributed import World


def main(argv: list[str] | None = None) -> int:
    """Run the training that the command line asks for and give the exit code."""
    try:
        config, args = parse_config(argv)
        result = train(config, args.watch, args.record)
    except TrainerError as error:
        return fail(error)
    if World.from_environment().rank == 0:
        report(result)
    return 0


def report(result: TrainResult) -> None:
    """Say how it ended."""
    if result.interrupted:
        print(f"stopped as asked after step {result.steps}", flush=True)
    if result.test_accuracy is not None:
        print(f"test loss {result.test_loss:.4f} accuracy {result.test_accuracy:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
