"""A process group of one rank, without ports or other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from trainer.distributed import World

ALONE = World(0, 0, 1, torch.device("cpu"))


@pytest.fixture
def alone() -> Iterator[World]:
    """A world of one inside a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ALONE
    dist.destroy_process_group()
