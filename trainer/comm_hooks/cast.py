"""Half-width gradients on the wire, around any other hook."""
# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket  # as torch.distributed has it, but known to type checkers
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def fp16_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """All-reduce in float16."""
    return default_hooks.fp16_compress_hook(state, bucket)


def bf16_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """All-reduce in bfloat16.

    DDP refuses PyTorch's own function by its *name* unless NCCL or XCCL is there, although Gloo can do it.
    """
    return default_hooks.bf16_compress_hook(state, bucket)


def in_fp16(hook: Hook) -> Hook:
    """Hand ``hook`` a float16 bucket."""
    return _renamed(default_hooks.fp16_compress_wrapper(hook))


def in_bf16(hook: Hook) -> Hook:
    """Hand ``hook`` a bfloat16 bucket."""
    return _renamed(default_hooks.bf16_compress_wrapper(hook))


def _renamed(wrapped: Hook) -> Hook:
    """Hide the name by which DDP refuses bfloat16 on Gloo."""

    def cast_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        return wrapped(state, bucket)

    return cast_hook
