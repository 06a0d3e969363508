"""One process: the reference for the other strategies."""

from __future__ import annotations

import sys

import torch
from torch import nn

from trainer.channel import Channel
from trainer.instrument import BucketContent
from trainer.strategies.base import Strategy


class Single(Strategy):
    """Train in one process, which synchronises nothing."""

    def bucket_contents(self) -> list[BucketContent]:
        """List no buckets."""
        return []


class DataParallel(Single):
    """One process that splits every batch over its GPUs with ``torch.nn.DataParallel``."""

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        """Wrap ``model``; without a GPU, ``DataParallel`` has nothing to split over."""
        super().__init__(model, channel)
        if torch.cuda.is_available():
            self.module = nn.DataParallel(model)
        else:
            print("dataparallel: no GPU here, training the bare module", file=sys.stderr, flush=True)
