"""Trains on two ranks, of which rank 1 is slow from step 5 on as CASE says, for ``ddpwatch explain`` to say why.

    torchrun --nproc-per-node=2 benchmarks/explained_job.py CASE &
    ddpwatch explain --rank 1 --with 0 --steps 60

The cases are alike, forward, backward, data, core, length and unfrozen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import ddpwatch

STEPS, FIRST, DELAY_S, WIDTH = 1200, 5, 0.02, 128
CASE = sys.argv[1]
SPINS = "import os\nos.sched_setaffinity(0, {1})\nrank = os.getppid()\nwhile os.getppid() == rank: pass"
step = 0


def strikes(case: str) -> bool:
    """Returns whether this rank is slow now, in that way."""
    return case == CASE and dist.get_rank() == 1 and step >= FIRST


def mask_spans() -> None:
    """Computes in Python."""
    until = time.monotonic() + DELAY_S
    while time.monotonic() < until:
        pass


def augment(row: torch.Tensor) -> torch.Tensor:
    """Transforms a sample."""
    if strikes("data"):
        time.sleep(DELAY_S)
    return row


class Rows(IterableDataset[torch.Tensor]):
    """Random sequences."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield augment(torch.randn(64, WIDTH))


class Scaled(torch.autograd.Function):
    """A factor with a backward of its own."""

    @staticmethod
    def forward(context: object, batch: torch.Tensor) -> torch.Tensor:
        return batch * 1.5

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        if strikes("backward"):
            time.sleep(DELAY_S)
        return gradient * 1.5


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, is_slow: bool) -> None:
        super().__init__()
        self.is_slow = is_slow
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Computes the block."""
        if self.is_slow and strikes("forward"):
            mask_spans()
        batch = batch + self.attention(batch, batch, batch, need_weights=False)[0]
        batch = batch + self.mlp(batch)
        scaled: torch.Tensor = Scaled.apply(batch) if self.is_slow else batch
        return scaled


class Net(nn.Module):
    """A frozen backbone, which DDP does not know, below blocks that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(Block(False), Block(False)).requires_grad_(False)
        self.blocks = nn.Sequential(Block(False), Block(True), Block(False))

    def forward(self, batch: torch.Tensor) -> Any:
        """Computes the model."""
        return self.blocks(self.backbone(batch))


def main() -> None:
    """Trains."""
    global step
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    net = Net()
    frozen = [name for name, _ in net.named_parameters() if name.startswith("backbone")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, frozen)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.blocks.parameters(), lr=0.01)
    ddpwatch.watch(model)
    for step, batch in zip(range(STEPS), DataLoader(Rows(), batch_size=4), strict=False):
        if step == FIRST and CASE == "core":
            os.sched_setaffinity(0, {dist.get_rank()})
            if dist.get_rank() == 1:
                subprocess.Popen([sys.executable, "-c", SPINS])  # until this rank ends
        if step == FIRST and strikes("unfrozen"):
            net.backbone.requires_grad_(True)
        model(torch.cat([batch, batch], 1) if strikes("length") else batch).square().mean().backward()
        optimizer.step()
        model.zero_grad()


if __name__ == "__main__":
    main()
