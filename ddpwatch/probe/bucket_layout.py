"""Which parameters are in which of a DDP module's buckets, from what DDP notes about itself. Free: no collective."""

from __future__ import annotations

import sys

import torch
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.messages import BucketLayout


def reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that DDP reduces, with their names, in the order in which its reducer numbers them."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def bucket_layout(ddp: DistributedDataParallel) -> list[BucketLayout]:
    """The buckets now in force, in index order; ``params`` are positions in `reduced_parameters`.

    DDP notes the buckets that it has rebuilt with its runtime statistics, one iteration late; until then, the answer
    is an empty list. Those it begins with are not noted but computed, in the way in which DDP computes them.
    """
    noted = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if getattr(ddp, "_has_rebuilt_buckets", False):
        sizes = _numbers(noted.get("rebuilt_bucket_sizes", ""), ",")
        params = [_numbers(ids, " ") for ids in noted.get("rebuilt_per_bucket_param_indices", "").split(",")]
    else:
        sizes = _numbers(noted.get("bucket_sizes", ""), ",")
        params = _initial_assignment(ddp, sizes)
    if len(sizes) != len(params):
        return []
    return [BucketLayout(index, *row) for index, row in enumerate(zip(sizes, params, strict=True))]


def _initial_assignment(ddp: DistributedDataParallel, sizes: list[int]) -> list[list[int]]:
    """The assignment that gives buckets of these sizes: one bucket at first, or with caps where it is never rebuilt."""
    params: list[torch.Tensor] = [p for _, p in reduced_parameters(ddp)]
    sparse_ids = {
        id(module.weight)
        for module in ddp.module.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }
    sparse = [id(p) in sparse_ids for p in params]
    cap = int(ddp.bucket_bytes_cap)
    for limits in ([sys.maxsize], [_DEFAULT_FIRST_BUCKET_BYTES, cap], [cap]):
        assignment: list[list[int]] = _compute_bucket_assignment_by_size(params, limits, sparse)[0][::-1]
        if [sum(params[i].numel() * params[i].element_size() for i in ids) for ids in assignment] == sizes:
            return assignment
    return []


def _numbers(text: str, separator: str) -> list[int]:
    return [int(part) for part in text.split(separator) if part.strip()]
