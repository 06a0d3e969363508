"""A watched job whose trouble the test changes while it runs: what is in the file given says what is wrong.

``none``, ``slow-backward`` (rank 1, 200 ms in the middle layer), ``slow-input`` (rank 0, 100 ms), ``stop``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch

WIDTH, LAYERS, BATCH = 512, 8, 512  # some 60 ms a step: what else runs on two cores is noise against that


class Trouble:
    """All ranks learn from rank 0 what is wrong in the next step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = "none"

    def ask(self) -> str:
        said: list[str | None] = [self.path.read_text().strip() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(said)
        self.now = said[0] or "none"
        return self.now


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, trouble = dist.get_rank(), Trouble(Path(sys.argv[1]))
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)

    def drag(*_: object) -> None:
        if trouble.now == "slow-backward" and rank == 1:
            time.sleep(0.2)

    model[LAYERS].register_full_backward_pre_hook(drag)
    ddp = DistributedDataParallel(model, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    with ddpwatch.watch(ddp):
        while trouble.ask() != "stop":
            if trouble.now == "slow-input" and rank == 0:
                time.sleep(0.1)
            ddp(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
