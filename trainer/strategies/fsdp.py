"""PyTorch's FSDP2: every rank keeps a shard of each parameter, its gradient and its optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from trainer.channel import Channel
from trainer.strategies.base import Strategy

REPLICAS = 2
"""Copies of a model that HSDP shards."""


class FSDP2(Strategy):
    """Gather parameters before they are needed, and reduce-scatter gradients, block by block."""

    ATTACHABLE = True

    def __init__(self, model: nn.Module, channel: Channel, *, hybrid: bool = False) -> None:
        """Shard ``model``, which already lives on its device, over all ranks; if ``hybrid``, each of two halves."""
        super().__init__(model, channel)  # shares the whole parameters
        replicas = REPLICAS if self.world_size % REPLICAS == 0 else 1
        shape = (replicas, self.world_size // replicas) if hybrid else (self.world_size,)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(channel.world.device.type, shape, mesh_dim_names=names)
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        self.sharded: FSDPModule = fully_shard(model, mesh=mesh)
        self._is_sharded = True

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the model, which carries ddpwatch's hooks."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def backward(self, loss: Tensor) -> None:
        """FSDP2's hooks and its waits are part of the graph's backward."""
        loss.backward()  # type: ignore[no-untyped-call]

    def no_sync(self) -> Any:
        """Keep gradients whole and local for as long as the block lasts."""
        return self._unreduced()

    def share_state(self) -> None:
        """Once the parameters are sharded, there is nothing to share but what batch norm keeps local."""
        if not getattr(self, "_is_sharded", False):
            super().share_state()

    def _attach_hooks(self) -> Any:
        """FSDP2 has hooks of its own."""
        return ()

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        self.sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.sharded.set_requires_gradient_sync(True)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks: the layers in its longest list of layers that have parameters."""
    lists = [module for module in model.modules() if isinstance(module, (nn.Sequential, nn.ModuleList))]
    layers = [[layer for layer in one if any(True for _ in layer.parameters())] for one in lists]
    return max(layers, key=len, default=[])
