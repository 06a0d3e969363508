"""A callback for Lightning."""

from __future__ import annotations

import os
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.utilities import rank_zero_info

import ddpwatch
from ddpwatch.errors import UsageError
from ddpwatch.integrations.closing import closing
from ddpwatch.probe.session import is_sharded


class LightningCallback(L.Callback):
    """Watches the module of DDP or FSDP2, marks steps, epochs and checkpoints, and logs the run's figures at the end.

    Args:
        every: Mark every so many steps; 0 for none.
        record: File to record the run to.
    """

    def __init__(self, every: int = 100, record: str | os.PathLike[str] | None = None) -> None:
        self.every = every
        self._record = record

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Watches a model of DDP, or what FSDP2 has sharded of it; any other stays unwatched."""
        model = trainer.strategy.model
        try:
            for module in [] if model is None else _sharded(model) or [model]:
                ddpwatch.watch(module, record=self._record)
        except UsageError:
            rank_zero_info("ddpwatch: the strategy's model is neither DDP's nor FSDP2's, so it is not watched")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Marks the epoch."""
        ddpwatch.mark(f"epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Marks the step."""
        if self.every and trainer.global_step % self.every == 0:
            ddpwatch.mark(f"step {trainer.global_step}")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Marks the checkpoint."""
        ddpwatch.mark("checkpoint")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Logs the figures, on one rank."""
        found = closing() if trainer.is_global_zero else None
        if found is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(dict(found.metrics), step=trainer.global_step)
        rank_zero_info(found.text)


def _sharded(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the outermost modules of FSDP2.

    As a rule, ``configure_model`` shards parts of the Lightning module only.
    """
    if is_sharded(model):
        return [model]
    return [found for child in model.children() for found in _sharded(child)]
