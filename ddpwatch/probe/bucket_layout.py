"""Which parameters are in which of a DDP module's buckets, from what DDP logs about itself. Free: no collective."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.wire.messages import BucketLayout

LAYOUT_TRIES = 12  # steps; DDP logs its final buckets in its first ten iterations


def reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the parameters that DDP reduces, with their names, in the order in which its reducer numbers them."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def parameter_columns(ddp: DistributedDataParallel) -> dict[str, list[Any]]:
    """Returns the columns of a `Layout` that describe the parameters; from them, other buckets can be worked out."""
    params, sparse = [p for _, p in reduced_parameters(ddp)], _sparse_ids(ddp)
    return {
        "param_bytes": [p.numel() * p.element_size() for p in params],
        "param_rows": [p.shape[0] if p.dim() > 1 else 0 for p in params],
        "param_kind": [
            f"{str(p.dtype).removeprefix('torch.')} {p.device}{' sparse' if id(p) in sparse else ''}" for p in params
        ],
    }


def bucket_layout(ddp: DistributedDataParallel) -> list[BucketLayout]:
    """Returns the buckets now in force, in index order; ``params`` are positions in `reduced_parameters`.

    DDP logs the buckets that it has rebuilt with its runtime statistics, one iteration late; until then, the answer
    is an empty list. The initial ones are not logged but computed here, as DDP computes them.
    """
    logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if getattr(ddp, "_has_rebuilt_buckets", False):
        sizes = _numbers(logged.get("rebuilt_bucket_sizes", ""), ",")
        params = [_numbers(ids, " ") for ids in logged.get("rebuilt_per_bucket_param_indices", "").split(",")]
    else:
        sizes = _numbers(logged.get("bucket_sizes", ""), ",")
        params = _initial_assignment(ddp, sizes)
    if len(sizes) != len(params):
        return []
    return [BucketLayout(index, *row) for index, row in enumerate(zip(sizes, params, strict=True))]


class LayoutTracker:
    """Follows one module's buckets: they change when DDP rebuilds them, and DDP logs their parameters later still.

    Args:
        ddp: The module. Sparse gradients have another size each time, so they do not show a change.

    Attributes:
        buckets: The newest, in index order; ``params`` are empty until DDP logs them.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.buckets: list[BucketLayout] = []
        self._tries = LAYOUT_TRIES
        self._sizes_vary = bool(_sparse_ids(ddp))

    def update(self, ddp: DistributedDataParallel, sizes: list[int]) -> bool:
        """Looks for a change after a reduced backward; whether there is one.

        Args:
            ddp: The module.
            sizes: Bytes of the buckets that were launched, in index order; empty where they are not known.
        """
        held = [bucket.nbytes for bucket in self.buckets]
        sizes = [] if self._sizes_vary else sizes
        if sizes and sizes != held:
            self._tries = LAYOUT_TRIES
        elif self._tries == 0 or (sizes and all(bucket.params for bucket in self.buckets)):
            return False
        self._tries -= 1
        known = bucket_layout(ddp)
        sizes = sizes or [bucket.nbytes for bucket in known]
        params = [bucket.params for bucket in known] if len(known) == len(sizes) else [[] for _ in sizes]
        if not sizes or (sizes == held and params == [bucket.params for bucket in self.buckets]):
            return False
        self.buckets = [BucketLayout(i, *row) for i, row in enumerate(zip(sizes, params, strict=True))]
        return True

    def sizes(self, sent: list[int]) -> list[int]:
        """Returns the gradients' bytes in the buckets that a comm hook sent in so many bytes, as far as known."""
        return sent if self._sizes_vary or len(sent) != len(self.buckets) else [one.nbytes for one in self.buckets]


def _initial_assignment(ddp: DistributedDataParallel, sizes: list[int]) -> list[list[int]]:
    """Returns the assignment with buckets of these sizes.

    One bucket at first, or several where they are never rebuilt.
    """
    params: list[torch.Tensor] = [p for _, p in reduced_parameters(ddp)]
    sparse_ids = _sparse_ids(ddp)
    sparse = [id(p) in sparse_ids for p in params]
    if not params:  # with tensor parallelism, they are the module's own only outside its forward and backward
        return []
    cap = int(ddp.bucket_bytes_cap)
    for limits in ([sys.maxsize], [_DEFAULT_FIRST_BUCKET_BYTES, cap], [cap]):
        assignment: list[list[int]] = _compute_bucket_assignment_by_size(params, limits, sparse)[0][::-1]
        if [sum(params[i].numel() * params[i].element_size() for i in ids) for ids in assignment] == sizes:
            return assignment
    return []


def _sparse_ids(ddp: DistributedDataParallel) -> set[int]:
    """Returns the ids of the parameters whose gradients are sparse."""
    return {
        id(module.weight)
        for module in ddp.module.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }


def _numbers(text: str, separator: str) -> list[int]:
    return [int(part) for part in text.split(separator) if part.strip()]
