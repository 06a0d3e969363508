"""Model, data and faults, built before any process group starts, so that every mistake shows while no rank waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer.comm_hooks import check_comm_hook
from trainer.config import TrainConfig
from trainer.data import DataSource, build_data
from trainer.distributed import World
from trainer.errors import TrainerError
from trainer.faults import Fault, check_faults, parse_faults
from trainer.models import build_model
from trainer.module_hooks import attach_module_hooks
from trainer.optimization import OPTIMIZERS, SCHEDULES
from trainer.strategies import ONE_PROCESS, SHARDED, STRATEGIES


@dataclass(frozen=True)
class Task:
    """A model, data that fit it, and the faults to inject."""

    model: nn.Module
    data: DataSource
    faults: tuple[Fault, ...] = ()


def build_task(config: TrainConfig, world: World) -> Task:
    """Check the configuration and build all that needs no other rank.

    Raises:
        TrainerError: A name that does not exist, or a combination that cannot work.
    """
    check_config(config, world)
    torch.manual_seed(config.seed)
    data = build_data(config.data, config.text)
    model = build_model(config.model, data)
    attach_module_hooks(model, config.module_hooks)
    faults = parse_faults(config.inject)
    check_faults(faults, world, model)
    return Task(model, data, tuple(faults))


def check_config(config: TrainConfig, world: World) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        TrainerError: With one line about the first mistake.
    """
    _known("strategy", config.strategy, STRATEGIES)
    _known("optimizer", config.optimizer, OPTIMIZERS)
    _known("schedule", config.schedule, SCHEDULES)
    _check_numbers(config)
    if config.strategy in ONE_PROCESS and world.size > 1:
        raise TrainerError(f"strategy {config.strategy} is one process; torchrun has started {world.size}")
    if config.strategy in SHARDED and (config.checkpoint or config.save_params):
        raise TrainerError(
            f"no rank has all parameters with {config.strategy}; --checkpoint and --save-params need that"
        )
    if config.strategy in SHARDED and any(text.startswith("slow-comm") for text in config.inject):
        raise TrainerError(f"slow-comm cannot delay what {config.strategy} sends")
    if config.strategy in ONE_PROCESS and any(text.startswith("slow-comm") for text in config.inject):
        raise TrainerError(f"strategy {config.strategy} sends nothing that slow-comm could delay")
    if config.comm_hook is not None:
        if config.strategy != "ddp":
            raise TrainerError(f"strategy {config.strategy} takes no comm hook; --comm-hook belongs to ddp")
        check_comm_hook(config.comm_hook, config.hook_options, world)
    if len(config.batch_sizes) not in (1, world.size):
        raise TrainerError(f"{len(config.batch_sizes)} batch sizes for {world.size} ranks; give one, or one per rank")
    if config.checkpoint is None and (config.resume or config.checkpoint_every):
        raise TrainerError("--resume and --checkpoint-every need --checkpoint DIR")


def _known(kind: str, name: str, known: object) -> None:
    assert isinstance(known, dict)
    if name not in known:
        raise TrainerError(f"no {kind} is called {name!r}; known: {', '.join(known)}")


def _check_numbers(config: TrainConfig) -> None:
    at_least_one = {
        "--steps": config.steps, "--batch-size": min(config.batch_sizes), "--accumulate": config.accumulate,
        "--log-every": config.log_every, "--checkpoint-every": config.checkpoint_every or 1,
    }  # fmt: skip
    for option, value in at_least_one.items():
        if value < 1:
            raise TrainerError(f"{option} is {value}, at least 1 is needed")
    if config.bucket_cap_mb is not None and config.bucket_cap_mb <= 0:
        raise TrainerError(f"--bucket-cap-mb is {config.bucket_cap_mb}, more than 0 is needed")
    if config.accumulate_wrong and config.accumulate == 1:
        raise TrainerError("--accumulate-wrong shows nothing without --accumulate of 2 or more")
