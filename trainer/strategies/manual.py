"""The naive baseline: first all of backward, then one all-reduce per parameter."""

from __future__ import annotations

import time

from torch import nn

from trainer.channel import Channel
from trainer.strategies.base import Strategy, gradient_of


class Manual(Strategy):
    """Synchronise after backward, with no compute left to overlap."""

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        """Remember when each gradient was ready, to show how long it waited."""
        super().__init__(model, channel)
        self.ready_ns: dict[int, int] = {}

    def prepare(self) -> None:
        """Forget the previous step."""
        self.ready_ns.clear()

    def gradient_ready(self, index: int) -> None:
        """Note the time; the gradient waits for :meth:`finish`."""
        self.ready_ns[index] = time.monotonic_ns()

    def finish(self) -> None:
        """All-reduce one parameter after the other."""
        for index, parameter in enumerate(self.parameters):
            gradient = gradient_of(parameter).div_(self.world_size)
            self.channel.all_reduce(gradient, index, self.ready_ns.get(index)).wait()
