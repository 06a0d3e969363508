"""A watched job with a fault that changes while it runs: before each step rank 0 reads its name from a file.

    torchrun --standalone --nproc-per-node=2 demo/story_job.py FILE [--wide]

The file contains ``none``, ``slow-backward`` (rank 1 takes 200 ms in its middle layer), ``slow-input`` (rank 0 takes
100 ms) or ``stop``. Layers sleep instead of computing, as if an accelerator computed for them, so that the load on the
machine changes their time as little as possible. With ``--wide`` the last bucket is 64 MiB large: nothing can hide its
transfer.

After every step each rank prints by how many ms it overslept, which is the delay that the machine itself has injected.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch

WIDTH, LAYERS, BATCH = 256, 8, 32
WIDE = 65_536  # inputs of the first layer; times WIDTH: 64 MiB of gradients
FORWARD_S, BACKWARD_S = 0.0015, 0.004  # per layer
SLOW_BACKWARD_S, SLOW_INPUT_S = 0.2, 0.1


class Fault:
    """The fault of the current step, the same on all ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.current = "none"

    def read(self) -> str:
        """Reads the next step's fault on rank 0 and broadcasts it."""
        names: list[str | None] = [self.path.read_text().strip() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(names)
        self.current = names[0] or "none"
        return self.current


class Sleeper:
    """Sleeps, and adds up by how much it overslept."""

    overslept_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleeps at least that long."""
        start = time.monotonic()
        time.sleep(seconds)
        self.overslept_s += time.monotonic() - start - seconds

    def report(self, rank: int) -> None:
        """Prints by how much this rank has overslept since the last report."""
        os.write(1, f"rank {rank} overslept {1e3 * self.overslept_s:.3f} ms\n".encode())
        self.overslept_s = 0.0


sleeper = Sleeper()


class Layer(nn.Linear):
    """A layer whose forward sleeps."""

    def forward(self, x: Tensor) -> Tensor:
        """Sleeps, then computes."""
        sleeper.sleep(FORWARD_S)
        return super().forward(x).relu()


def main() -> None:
    """Trains until the file contains ``stop``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", type=Path, metavar="FILE", help="contains the name of the fault")
    parser.add_argument("--wide", action="store_true", help="a last bucket of 64 MiB")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, fault, width = dist.get_rank(), Fault(args.fault), WIDE if args.wide else WIDTH
    model = nn.Sequential(Layer(width, WIDTH), *(Layer(WIDTH, WIDTH) for _ in range(LAYERS - 1)))

    def sleep_in_backward(layer: nn.Module, _: object) -> None:
        slow = fault.current == "slow-backward" and rank == 1 and layer is model[LAYERS // 2]
        sleeper.sleep(SLOW_BACKWARD_S if slow else BACKWARD_S)

    for layer in model:
        layer.register_full_backward_pre_hook(sleep_in_backward)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.25)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    with ddpwatch.watch(ddp):
        while fault.read() != "stop":
            if fault.current == "slow-input" and rank == 0:
                sleeper.sleep(SLOW_INPUT_S)
            ddp(torch.randn(BATCH, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sleeper.report(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
