"""One hook per parameter, which all-reduces its gradient when it fires."""

from __future__ import annotations

from torch import Tensor, nn
from torch.futures import Future

from trainer.channel import Channel
from trainer.strategies.base import Strategy, gradient_of


class ParamHooks(Strategy):
    """Communicate from within backward, one message per parameter.

    Ranks must use the same parameters: each rank issues its all-reduces in the order of its own gradients, and nothing
    here restores a common order. ``bucketed-hooks`` does.
    """

    def __init__(self, model: nn.Module, channel: Channel, *, wait_in_hook: bool) -> None:
        """Either wait for each all-reduce inside its hook, or for all of them after backward."""
        super().__init__(model, channel)
        self.wait_in_hook = wait_in_hook
        self.pending: dict[int, Future[Tensor]] = {}

    def prepare(self) -> None:
        """Forget a step that was left by an exception."""
        self.pending.clear()

    def gradient_ready(self, index: int) -> None:
        """Issue the all-reduce now. Waiting for it here stops the backward meanwhile."""
        self._issue(index)
        if self.wait_in_hook:
            self.instrument.wait_begin()
            self.pending[index].wait()
            self.instrument.wait_end()

    def finish(self) -> None:
        """Reduce the gradients that no hook has fired for, then wait for all."""
        for index in range(len(self.parameters)):
            if index not in self.pending:
                self._issue(index)
        for future in self.pending.values():
            future.wait()

    def _issue(self, index: int) -> None:
        gradient = gradient_of(self.parameters[index]).div_(self.world_size)
        self.pending[index] = self.channel.all_reduce(gradient, index)
