"""PyTorch's own DistributedDataParallel, with a comm hook or without."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.channel import Channel
from trainer.comm_hooks import CommHook, in_order
from trainer.in_order import InOrder
from trainer.strategies.base import Strategy


class DDP(Strategy):
    """Let DistributedDataParallel reduce buckets from within backward."""

    ATTACHABLE = True

    def __init__(
        self,
        model: nn.Module,
        channel: Channel,
        *,
        comm_hook: CommHook | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        """Wrap ``model``, which already lives on its device."""
        super().__init__(model, channel)
        self.comm_hook = comm_hook
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[channel.world.device] if channel.world.device.type == "cuda" else None,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
        )
        self.module = self.ddp
        self._hook_pending = comm_hook is not None

    def begin_step(self, samples: int) -> None:
        """Register the hook before the first step: late enough for ddpwatch to have come first."""
        if self.comm_hook is None:
            return
        if self._hook_pending:
            self._hook_pending = False
            self.ddp.register_comm_hook(self.comm_hook.state, self.comm_hook.function)
        self.comm_hook.begin_step(samples)

    def backward(self, loss: Tensor) -> None:
        """DDP's hooks and its wait are part of the graph's backward."""
        loss.backward()  # type: ignore[no-untyped-call]

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the DDP module, which carries ddpwatch's hooks."""
        outputs: Tensor = self.ddp(inputs)
        return outputs

    def delay_communication(self, thread: InOrder) -> None:
        """Run the comm hook, or a plain all-reduce without one, on ``thread``."""
        self.comm_hook = self.comm_hook or CommHook("allreduce", None, allreduce_hook)
        self.comm_hook = replace(self.comm_hook, function=in_order(self.comm_hook.function, thread))
        self._hook_pending = True

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip DDP's reduction."""
        return self.ddp.no_sync()

    def share_state(self) -> None:
        """DDP broadcasts parameters when it is built and buffers with every forward."""

    def state_dict(self) -> dict[str, Any]:
        """Return the comm hook's state."""
        return {} if self.comm_hook is None else self.comm_hook.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the comm hook's state."""
        if self.comm_hook is not None and state:
            self.comm_hook.load_state_dict(state)

    def _attach_hooks(self) -> Any:
        """DDP has hooks of its own in C++."""
        return ()
