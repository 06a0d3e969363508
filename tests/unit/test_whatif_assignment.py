"""Buckets are those that torch makes, for any model."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from torch import distributed

from ddpwatch.whatif.assignment import (
    DEFAULT_CAP_BYTES,
    FIRST_BUCKET_BYTES,
    MIB,
    Parameter,
    assign,
    initial,
    limits_of,
    rebuilt,
)

DTYPES = (torch.float32, torch.float16, torch.float64)
DEVICES = ("cpu", "meta")
# The sizes of ResNet-18's parameters in elements, as registered: convolution, two of its normalisation.
BLOCKS = [(64, 64, False), (64, 64, False), (64, 128, True), (128, 128, False), (128, 256, True), (256, 256, False),
          (256, 512, True), (512, 512, False)]  # fmt: skip


def random_model(dice: random.Random) -> tuple[list[torch.Tensor], list[bool], list[Parameter]]:
    """Gradients of all sizes, types and devices, as torch and as the analysis know them."""
    count, types, devices = dice.randint(1, 60), dice.randint(1, 3), dice.randint(1, 2)
    tensors = [
        torch.empty(dice.randint(0, 400), dtype=dice.choice(DTYPES[:types]), device=dice.choice(DEVICES[:devices]))
        for _ in range(count)
    ]
    sparse = [dice.random() < 0.1 for _ in tensors]
    parameters = [
        Parameter(tensor.numel() * tensor.element_size(), f"{tensor.dtype} {tensor.device}", is_sparse)
        for tensor, is_sparse in zip(tensors, sparse, strict=True)
    ]
    return tensors, sparse, parameters


@pytest.mark.parametrize("seed", range(10))
def test_buckets_are_those_of_torch(seed: int) -> None:
    """For 150 models per seed: in order of registration, and in an order in which gradients may come."""
    dice = random.Random(seed)
    for _ in range(150):
        tensors, sparse, parameters = random_model(dice)
        limits = [dice.randint(1, 3000) for _ in range(dice.randint(1, 4))]
        theirs, _ = distributed._compute_bucket_assignment_by_size(tensors, limits, sparse)
        assert assign(parameters, limits) == theirs
        order = dice.sample(range(len(tensors)), len(tensors))
        moved = [tensors[position] for position in order]
        theirs, _ = distributed._compute_bucket_assignment_by_size(moved, limits, sparse, order)
        mine = assign(parameters, limits, order)
        left_open = len({parameter.kind for parameter in parameters})  # at most; torch leaves their order open
        assert mine[:-left_open] == theirs[:-left_open]
        assert sorted(mine) == sorted(theirs)
        if left_open == 1:
            assert mine == theirs


def resnet18() -> list[Parameter]:
    """Its parameters in the order of registration, float32."""
    counts = [3 * 64 * 49, 64, 64]
    for before, after, shrinks in BLOCKS:
        counts += [before * after * 9, after, after, after * after * 9, after, after]
        counts += [before * after, after, after] if shrinks else []
    return [Parameter(4 * count, "float32 cpu") for count in [*counts, 512 * 1000, 1000]]


@pytest.mark.parametrize(
    ("cap_mib", "published"),
    [(25, [2_052_000, 28_852_224, 15_853_824]), (35, [2_052_000, 38_297_600, 6_408_448])],
)
def test_the_published_sizes_of_resnet18(cap_mib: int, published: list[int]) -> None:
    """https://github.com/pytorch/pytorch/issues/48880, where the first bucket had 1 MiB at every cap."""
    parameters = resnet18()
    assert sum(parameter.nbytes for parameter in parameters) == 4 * 11_689_512
    limits = limits_of(cap_mib * MIB, False, FIRST_BUCKET_BYTES)
    buckets = rebuilt(parameters, limits, range(len(parameters))[::-1])
    assert [sum(parameters[i].nbytes for i in bucket) for bucket in buckets] == published


def test_the_first_bucket_is_small_only_by_default() -> None:
    assert limits_of(DEFAULT_CAP_BYTES, True) == (FIRST_BUCKET_BYTES, DEFAULT_CAP_BYTES)
    assert limits_of(10 * MIB, False) == (10 * MIB, 10 * MIB)
    assert FIRST_BUCKET_BYTES == distributed._DEFAULT_FIRST_BUCKET_BYTES


def test_without_a_rebuild_the_last_parameters_travel_first() -> None:
    parameters = [Parameter(size) for size in (10, 20, 30)]
    assert initial(parameters, [sys.maxsize]) == [[0, 1, 2]]
    assert initial(parameters, [30]) == [[2], [0, 1]]
