"""A job that is slower than it should be, for docs/tutorial.md. Find out why before you read it.

torchrun --standalone --nproc-per-node=2 demo/slow_job.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 128, 4, 256


class Block(nn.Module):
    """A layer, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, batch: Tensor) -> Tensor:
        change: Tensor = self.layers(batch)
        return batch + change


class Model(nn.Module):
    """Blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
            check_activations(batch)
        return batch


def check_activations(batch: Tensor) -> None:
    """Looks for outliers, on the rank where they once were."""
    if dist.get_rank() == dist.get_world_size() - 1:
        assert not any(distance(row, batch).isnan() for row in batch)


def distance(row: Tensor, batch: Tensor) -> Tensor:
    """Returns how far a row is from those that are most like it."""
    return (row - batch).abs().sum(1).sort().values.cumsum(0)[:8].std()


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        batch = torch.randn(BATCH, WIDTH)
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
