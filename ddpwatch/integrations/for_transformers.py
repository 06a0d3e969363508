"""A callback for the Trainer of Hugging Face Transformers."""

from __future__ import annotations

from typing import Any

from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments
from transformers.utils import logging

import ddpwatch
from ddpwatch.integrations.closing import closing

_log = logging.get_logger("transformers.ddpwatch")


class TransformersCallback(TrainerCallback):
    """Marks steps, epochs and checkpoints, and logs the run's figures at the end.

    ``ddpwatch run`` has to watch the job, as the Trainer wraps the model by itself.

    Args:
        trainer: Where the figures are logged; without it, only the paragraph is.
        every: Mark every so many steps; 0 for none.
    """

    def __init__(self, trainer: Trainer | None = None, every: int = 100) -> None:
        self.trainer = trainer
        self.every = every

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Marks the epoch."""
        ddpwatch.mark(f"epoch {int(state.epoch or 0)}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Marks the step."""
        if self.every and state.global_step % self.every == 0:
            ddpwatch.mark(f"step {state.global_step}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Marks the checkpoint."""
        ddpwatch.mark("checkpoint")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the figures to the last log, on one rank."""
        # A key of the log with which a training ends, before other callbacks close
        found = closing() if state.is_world_process_zero and "train_runtime" in (logs or {}) else None
        if found is None:
            return
        if self.trainer is not None:
            self.trainer.log(dict(found.metrics))
        _log.warning(found.text)  # as the paragraph should be seen by default
