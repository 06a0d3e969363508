"""PyTorch's PowerSGD, with a state that survives a restart."""
# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import math
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # as torch.distributed has it, but known to type checkers
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.futures import Future

from trainer.comm_hooks.cast import Hook

MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression")


class PowerSGD:
    """A ``PowerSGDState`` that survives a restart.

    PowerSGD keeps its memory by bucket *index*. DDP starts with other buckets than it ends up with, so right after a
    restart the memory does not fit yet: the first step is a plain all-reduce.
    """

    def __init__(self, inner: PowerSGDState, compress: Hook) -> None:
        """Compress with PyTorch's hook ``compress`` over ``inner``."""
        self.inner = inner
        self.compress = compress
        self.plain_steps = 0

    def compression(self) -> float:
        """Return elements before over elements after compression, as PyTorch counts them; 1 before it starts."""
        return float(self.inner.compression_stats()[0]) or 1.0  # type: ignore[no-untyped-call]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory as plain tensors and numbers, loadable without pickle."""
        rng = self.inner.rng.get_state(legacy=False)
        rng["state"]["key"] = torch.from_numpy(rng["state"]["key"].astype("int64"))
        state = {slot: getattr(self.inner, slot) for slot in MEMORIES + COUNTERS}
        return {**state, "rng": rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a memory, and leave DDP one step to form its buckets again."""
        for slot in MEMORIES + COUNTERS:
            setattr(self.inner, slot, state[slot])
        key = state["rng"]["state"]["key"].cpu().numpy().astype("uint32")
        self.inner.rng.set_state({**state["rng"], "state": {**state["rng"]["state"], "key": key}})
        self.plain_steps = 1


def powersgd_state(
    batched: bool, rank: int, start: int, error_feedback: bool, warm_start: bool, group: dist.ProcessGroup
) -> PowerSGD:
    """Build the state; ``batched`` compresses a whole bucket as one square matrix."""
    inner = PowerSGDState(
        group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        use_error_feedback=error_feedback,
        warm_start=warm_start,
        orthogonalization_epsilon=1e-8,  # a layer whose gradient vanishes would divide by zero
    )
    return PowerSGD(inner, batched_hook if batched else powerSGD_hook.powerSGD_hook)


class SquareBucket:
    """A bucket as one square matrix, for ``batched`` to compress."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket = bucket
        self._side = math.ceil(math.sqrt(bucket.buffer().numel()))
        padding = self._side**2 - bucket.buffer().numel()
        self._padded = torch.nn.functional.pad(bucket.buffer(), (0, padding))

    def buffer(self) -> torch.Tensor:
        """Return the gradients, padded with zeros."""
        return self._padded

    def gradients(self) -> list[torch.Tensor]:
        """Return the matrix."""
        return [self._padded.view(self._side, self._side)]

    def index(self) -> int:
        """Return the bucket's index."""
        return self._bucket.index()

    def is_last(self) -> bool:
        """Whether the iteration ends with this bucket."""
        return self._bucket.is_last()


def batched_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Compress a bucket as one matrix: fewer, larger products than layer by layer, and a coarser result.

    PyTorch's own ``batched_powerSGD_hook`` stops with an AssertionError at its first compressed step (its
    ``_orthogonalize`` takes stacks of matrices and is handed a single one), so the layer-wise hook does the work.
    """
    length = bucket.buffer().numel()
    square: Any = SquareBucket(bucket)
    return powerSGD_hook.powerSGD_hook(state, square).then(lambda future: future.value()[:length])


def powersgd_hook(state: PowerSGD, bucket: GradBucket) -> Future[torch.Tensor]:
    """Send a low-rank approximation of the bucket and keep the error for the next step."""
    if state.plain_steps:
        state.plain_steps -= bucket.is_last()
        return default_hooks.allreduce_hook(state.inner.process_group, bucket)
    return state.compress(state.inner, bucket)
