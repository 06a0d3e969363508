"""A data-parallel trainer that synchronises gradients by hooks.

Example:
    >>> from trainer import TrainConfig, train
    >>> train(TrainConfig(strategy="bucketed-hooks", steps=100), watch=True)
"""

from trainer.config import TrainConfig
from trainer.errors import TrainerError
from trainer.loop import Trainer, TrainResult
from trainer.run import train
from trainer.task import Task, build_task

__all__ = ["Task", "TrainConfig", "TrainResult", "Trainer", "TrainerError", "build_task", "train"]
