"""A hook that processes a layer's output in chunks, in parallel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.errors import TrainerError

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "softsign": functional.softsign,
}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Split a layer's output along the batch, apply ``op`` to each chunk on a thread of its own, and join the results.

    The graph is the same as without chunks, since autograd records operations on any thread. Only thread-local modes
    have to be carried over: whether gradients are enabled, and autocast.
    """

    layer: str = "*"
    chunks: int = 2
    op: str = "tanh"
    pool: ThreadPoolExecutor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse less than one chunk, and unknown operations."""
        if self.chunks < 1:
            raise TrainerError(f"module hook chunk: {self.chunks} chunks, at least 1 is needed")
        if self.op not in OPERATIONS:
            raise TrainerError(f"module hook chunk: no operation is called {self.op!r}; known: {', '.join(OPERATIONS)}")
        object.__setattr__(self, "pool", ThreadPoolExecutor(self.chunks, "chunk"))

    def attach(self, layer: nn.Module) -> None:
        """Replace this layer's output from now on."""
        layer.register_forward_hook(self._on_forward)

    def _on_forward(self, layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
        apply = _with_modes_of_this_thread(OPERATIONS[self.op], output.device.type)
        return torch.cat(list(self.pool.map(apply, output.chunk(self.chunks))))


def _with_modes_of_this_thread(operation: Callable[[Tensor], Tensor], device_type: str) -> Callable[[Tensor], Tensor]:
    grad, cast = torch.is_grad_enabled(), torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)

    def apply(chunk: Tensor) -> Tensor:
        with ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(grad))
            modes.enter_context(torch.autocast(device_type, dtype, enabled=cast))
            return operation(chunk)

    return apply
