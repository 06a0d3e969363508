"""The interface of a strategy, and the hooks that most of them share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer.channel import Channel
from trainer.in_order import InOrder
from trainer.instrument import Announce, BucketContent, Instrument


class Strategy:
    """One way of keeping the ranks' gradients in step.

    A step is :meth:`begin_step`, then per micro-batch :meth:`forward` and :meth:`backward`. When the last backward of
    a step returns, every parameter's ``.grad`` holds the gradient for the optimizer.

    A subclass defines what happens with each gradient (:meth:`gradient_ready`) and after the last (:meth:`finish`).

    ``ATTACHABLE`` is whether ddpwatch attaches to the module itself, so that the strategy reports nothing.
    """

    ATTACHABLE = False

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        """Give every rank rank 0's parameters, and hook into every gradient."""
        self.model = model
        self.module = model
        self.channel = channel
        self.syncing = True
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.parameters = [p for _, p in trained]
        self.share_state()
        self._hooks = list(self._attach_hooks())

    @property
    def world_size(self) -> int:
        """Number of ranks that average their gradients."""
        return self.channel.world.size

    @property
    def instrument(self) -> Instrument:
        """What takes the stamps."""
        return self.channel.instrument

    def watch_with(self, instrument: Instrument, announce: Announce) -> None:
        """Report to ``instrument`` from now on, and the buckets to ``announce``."""
        self.channel.instrument, self.channel.announce = instrument, announce
        announce(self.names, self.bucket_contents())

    # -- what the loop calls ---------------------------------------------------------------------------------

    def begin_step(self, samples: int) -> None:
        """Prepare a step over ``samples`` local samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the model."""
        self.instrument.forward_begin()
        outputs: Tensor = self.module(inputs)
        self.instrument.forward_end()
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss`` and, outside :meth:`no_sync`, synchronise them."""
        if self.syncing:
            self.prepare()
        self.instrument.backward_begin()
        loss.backward()  # type: ignore[no-untyped-call]
        self.instrument.backward_compute_end()
        if self.syncing:
            self.finish()
        self.instrument.backward_end()

    def delay_communication(self, thread: InOrder) -> None:
        """Send every bucket through ``thread``, which is slow."""
        self.channel.delayed = thread

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local for as long as the block lasts."""
        return self._local_only()

    def share_state(self) -> None:
        """Give every rank rank 0's parameters and buffers (the running statistics of batch norm)."""
        if self.world_size > 1:
            for tensor in self.model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart on this rank, beyond model and optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    # -- what a subclass defines --------------------------------------------------------------------------

    def prepare(self) -> None:
        """A backward that synchronises is about to start."""

    def gradient_ready(self, index: int) -> None:
        """Called within backward: the gradient of parameter ``index`` is complete."""

    def finish(self) -> None:
        """Called after backward: return when all gradients are synchronised."""

    def bucket_contents(self) -> list[BucketContent]:
        """List the buckets; here, one per parameter."""
        return [BucketContent(p.numel() * p.element_size(), [i]) for i, p in enumerate(self.parameters)]

    # -- inside ----------------------------------------------------------------------------------------------

    def _attach_hooks(self) -> Iterator[RemovableHandle]:
        # `partial` binds the index now. A lambda in this loop would look it up when it fires: the last one, always.
        for index, parameter in enumerate(self.parameters):
            yield parameter.register_post_accumulate_grad_hook(partial(self._fired, index))  # type: ignore[no-untyped-call]

    def _fired(self, index: int, parameter: Tensor) -> None:
        self.instrument.hook_fired(index)
        if self.syncing:
            self.gradient_ready(index)

    @contextmanager
    def _local_only(self) -> Iterator[None]:
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient to communicate: zeros where this rank did not use the parameter."""
    if parameter.grad is None:
        parameter.grad = parameter.new_zeros(parameter.shape)
    return parameter.grad
