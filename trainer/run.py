"""A whole run, from configuration to result."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import torch

from trainer import checkpoint
from trainer.config import TrainConfig
from trainer.distributed import World, process_group
from trainer.loop import Trainer, TrainResult, checkpoint_setup
from trainer.stopping import stop_on_signal
from trainer.task import build_task
from trainer.watching import count_tokens, watched


def train(config: TrainConfig, watch: bool = False, record: Path | None = None) -> TrainResult:
    """Train in this process, as one rank of the job that torchrun has started, or alone.

    Args:
        config: What to do.
        watch: Publish the run to ddpwatch.
        record: Also record the run to this file; implies ``watch``.

    Raises:
        TrainerError: The configuration cannot work; raised before the process group starts.
    """
    world = World.from_environment(config.device)
    task = build_task(config, world)
    found = _checkpoint_to_resume(config, world)
    with process_group(world) as store, stop_on_signal(store) as agreement:
        trainer = Trainer(config, world, task, agreement.before)
        if found is not None:
            trainer.restore(found)
        if watch or record:
            trainer.on_batch = count_tokens
        with watched(trainer.strategy, record) if watch or record else nullcontext():
            result = trainer.fit()
        return _finish(trainer, result)


def _checkpoint_to_resume(config: TrainConfig, world: World) -> checkpoint.Checkpoint | None:
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if config.checkpoint is None or not (config.resume or restarted):
        return None
    return checkpoint.load_newest(config.checkpoint, world, checkpoint_setup(config))


def _finish(trainer: Trainer, result: TrainResult) -> TrainResult:
    """Save and evaluate as configured; after an interruption, only save."""
    config = trainer.config
    if config.checkpoint is not None:
        trainer.save_checkpoint()
    if config.evaluate and not result.interrupted:
        result = trainer.evaluate(result)
    if config.save_params is not None and trainer.world.rank == 0:
        torch.save(trainer.model.state_dict(), config.save_params)
    return result
