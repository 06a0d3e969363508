"""Aggregations that a plain all-reduce cannot do, and the one that does nothing."""
# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # as torch.distributed has it, but known to type checkers
from torch.futures import Future

from trainer.channel import issue_all_reduce
from trainer.in_order import future_on

# PyTorch 2.13 renamed both and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def noop_hook(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Leave every rank with its own gradients. For debugging: the ranks drift apart."""
    future = future_on(bucket.buffer().device)
    future.set_result(bucket.buffer())
    return future


class Weights:
    """This rank's share in a weighted mean.

    With given weights it never changes. Without, a rank's weight is its number of samples in the step, so that the
    result is the mean over all samples even where ranks have different numbers of them.
    """

    def __init__(self, weights: tuple[float, ...] | None, device: torch.device) -> None:
        """Take one weight per rank, or None to weigh by sample count; collective if None."""
        self.given = weights
        self.device = device
        self.share = 0.0 if weights is None else weights[dist.get_rank()] / sum(weights)

    def begin_step(self, samples: int) -> None:
        """Add up the samples of all ranks."""
        if self.given is None:
            total = torch.tensor(float(samples), device=self.device)
            dist.all_reduce(total)
            self.share = samples / total.item() if total > 0 else 0.0


def weighted_hook(state: Weights, bucket: GradBucket) -> Future[Tensor]:
    """Average with weights: the shares add up to one, so their sum is the mean."""
    return issue_all_reduce(bucket.buffer().mul_(state.share)).then(_first)


class Gathered:
    """How to reduce the gathered buckets: drop the ``trim`` largest and smallest values, average the rest."""

    def __init__(self, trim: int) -> None:
        """``trim`` 0 is the mean, half the ranks (rounded to leave one or two) the median."""
        self.trim = trim


def gathered_hook(state: Gathered, bucket: GradBucket) -> Future[Tensor]:
    """Gather every rank's bucket and reduce locally: n times the memory, but any reduction."""
    buffer = bucket.buffer()
    parts = buffer.new_empty(dist.get_world_size() * buffer.numel())
    future: Future[Tensor] = _all_gather(parts, buffer, async_op=True).get_future()
    return future.then(partial(_reduce_locally, parts.view(-1, buffer.numel()), state.trim))


def trimmed_mean(parts: Tensor, trim: int) -> Tensor:
    """Average over dimension 0 without the ``trim`` largest and smallest values of every element."""
    kept = parts.sort(dim=0).values[trim : len(parts) - trim] if trim else parts
    return kept.mean(dim=0)


def reduce_scatter_hook(state: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Let each rank average one slice of the bucket, then gather the slices: the two halves of an all-reduce."""
    buffer, world_size = bucket.buffer(), dist.get_world_size()
    length = -(-buffer.numel() // world_size)
    padded = torch.nn.functional.pad(buffer, (0, length * world_size - buffer.numel())).div_(world_size)
    part = padded.new_empty(length)
    reduced = _reduce_scatter(part, padded, group=state, async_op=True)
    if dist.get_backend(state) != "nccl":  # NCCL runs both halves on one stream, in order
        reduced.wait()
    gathered: Future[Tensor] = _all_gather(padded, part, group=state, async_op=True).get_future()
    return gathered.then(lambda _: padded[: buffer.numel()])


def _first(future: Future[Any]) -> Tensor:
    result: Tensor = future.value()[0]
    return result


def _reduce_locally(parts: Tensor, trim: int, future: object) -> Tensor:
    return trimmed_mean(parts, trim)
