"""The strategies, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from trainer.channel import Channel
from trainer.comm_hooks import build_comm_hook
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.strategies.base import Strategy
from trainer.strategies.bucketed_hooks import BucketedHooks
from trainer.strategies.ddp import DDP
from trainer.strategies.manual import Manual
from trainer.strategies.param_hooks import ParamHooks
from trainer.strategies.single import DataParallel, Single

__all__ = ["DDP", "ONE_PROCESS", "SHARDED", "STRATEGIES", "Strategy", "build_strategy"]

Builder = Callable[[nn.Module, Channel, TrainConfig], Strategy]


def _ddp(model: nn.Module, channel: Channel, config: TrainConfig) -> Strategy:
    hook = build_comm_hook(config.comm_hook, config.hook_options, channel.world) if config.comm_hook else None
    return DDP(
        model,
        channel,
        comm_hook=hook,
        bucket_cap_mb=config.bucket_cap_mb,
        find_unused_parameters=config.find_unused_parameters,
    )


def _fsdp2(model: nn.Module, channel: Channel, config: TrainConfig) -> Strategy:
    from trainer.strategies.fsdp import FSDP2  # torch takes seconds to import it

    return FSDP2(model, channel, hybrid=config.strategy == "hsdp")


STRATEGIES: dict[str, Builder] = {
    "single": lambda model, channel, config: Single(model, channel),
    "dataparallel": lambda model, channel, config: DataParallel(model, channel),
    "manual": lambda model, channel, config: Manual(model, channel),
    "param-hooks": lambda model, channel, config: ParamHooks(model, channel, wait_in_hook=False),
    "param-hooks-sync": lambda model, channel, config: ParamHooks(model, channel, wait_in_hook=True),
    "bucketed-hooks": lambda model, channel, config: BucketedHooks(model, channel, bucket_cap_mb=config.bucket_cap_mb),
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "hsdp": _fsdp2,
}
ONE_PROCESS = ("single", "dataparallel")
SHARDED = ("fsdp2", "hsdp")


def build_strategy(model: nn.Module, config: TrainConfig, world: World) -> Strategy:
    """Build the strategy that the configuration names; collective."""
    return STRATEGIES[config.strategy](model, Channel(world), config)
