"""Which parameters DDP puts into which bucket: `_compute_bucket_assignment_by_size` and DDP's rules around it.

A bucket has parameters of one type on one device only. Each type and device fills its buckets up to the first limit,
then the second, and so on; the last limit holds for all further ones. A parameter that reaches the limit still belongs
to the bucket, which is then closed. A sparse gradient has a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
DEFAULT_CAP_BYTES = 25 * MIB


class Parameter(NamedTuple):
    """One gradient.

    Attributes:
        nbytes: Its size.
        kind: Type and device; gradients of different kinds never share a bucket.
        sparse: Whether it is sparse.
        rows: The first dimension; 0 for vectors and scalars.
    """

    nbytes: int
    kind: str = ""
    sparse: bool = False
    rows: int = 0


Buckets = list[list[int]]  # positions of the parameters, in index order


class BucketCaps(NamedTuple):
    """The sizes at which buckets are closed (bytes): the first of each kind, and all others."""

    first: int
    cap: int


def assign(parameters: Sequence[Parameter], limits: Sequence[int], order: Sequence[int] | None = None) -> Buckets:
    """Returns what torch's `_compute_bucket_assignment_by_size` returns.

    Args:
        parameters: By position.
        limits: In bytes, at least one.
        order: The positions in the order in which the gradients are ready. Without it, the order is that of the
            positions, and buckets are sorted by their first one.
    """
    done: Buckets = []
    open_: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    closed: dict[str, int] = {}
    for position in range(len(parameters)) if order is None else order:
        parameter = parameters[position]
        if parameter.sparse:
            done.append([position])
            continue
        kind = parameter.kind
        open_.setdefault(kind, []).append(position)
        sizes[kind] = sizes.get(kind, 0) + parameter.nbytes
        if sizes[kind] >= limits[min(closed.get(kind, 0), len(limits) - 1)]:
            done.append(open_.pop(kind))
            sizes[kind] = 0
            closed[kind] = closed.get(kind, 0) + 1
    done += open_.values()
    return sorted(done, key=min) if order is None else done


def initial(parameters: Sequence[Parameter], limits: Sequence[int]) -> Buckets:
    """Returns the buckets that DDP starts with: as if gradients came in the reverse order of registration.

    They stay where DDP never rebuilds them: with ``find_unused_parameters`` and no ``static_graph``.
    """
    return assign(parameters, limits)[::-1]


def rebuilt(parameters: Sequence[Parameter], limits: BucketCaps, order: Sequence[int]) -> Buckets:
    """Returns the buckets after the first step: in the order in which the gradients came on rank 0."""
    return assign(parameters, limits, order)


def limits_of(cap_bytes: int, is_default: bool, first_bytes: int | None = None) -> BucketCaps:
    """Returns DDP's limits. A first bucket of 1 MiB comes only with the default cap, or where it is asked for."""
    if first_bytes is not None:
        return BucketCaps(first_bytes, cap_bytes)
    return BucketCaps(min(FIRST_BUCKET_BYTES, cap_bytes) if is_default else cap_bytes, cap_bytes)
