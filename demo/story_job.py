"""A watched job with a fault that changes while it runs: before each step rank 0 reads its name from a file.

    torchrun --standalone --nproc-per-node=2 demo/story_job.py FILE [--wide] [--record RECORDING]

The file contains ``none``, ``slow-backward`` (rank 1 takes 200 ms in its middle layer), ``slow-input`` (rank 0 takes
100 ms) or ``stop``. Layers sleep instead of computing, as if an accelerator computed for them, so that the load on the
machine changes their time as little as possible. With ``--wide`` the last bucket is 16 MiB large: nothing can hide its
transfer.

After every step each rank prints the step's stamps by its own clock (monotonic ns): start, start of the forward, the
moments the backward reached each layer, from the last to the first, end of the backward, end.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import ddpwatch

WIDTH, LAYERS, BATCH = 256, 8, 32
WIDE = 16_384  # times WIDTH: 16 MiB of gradients
FORWARD_S, BACKWARD_S = 0.0015, 0.004  # per layer
SLOW_BACKWARD_S, SLOW_INPUT_S = 0.2, 0.1


class Fault:
    """The name of the fault of the next step, which all ranks learn from rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.current = "none"

    def read(self) -> str:
        """Reads the next step's fault on rank 0 and broadcasts it."""
        names: list[str | None] = [self.path.read_text().strip() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(names)
        self.current = names[0] or "none"
        return self.current


class Layer(nn.Linear):
    """A layer whose forward sleeps."""

    def forward(self, x: Tensor) -> Tensor:
        """Sleeps, then computes."""
        time.sleep(FORWARD_S)
        return super().forward(x).relu()


class Batches(IterableDataset[Tensor]):
    """Random batches, which rank 0 gets late while its input is slow."""

    def __init__(self, width: int, fault: Fault) -> None:
        self.width, self.fault = width, fault

    def __iter__(self) -> Iterator[Tensor]:
        """Yields batches without end."""
        while True:
            if self.fault.current == "slow-input" and dist.get_rank() == 0:
                time.sleep(SLOW_INPUT_S)
            yield torch.randn(BATCH, self.width)


def main() -> None:
    """Trains until the file contains ``stop``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", type=Path, metavar="FILE", help="contains the name of the fault")
    parser.add_argument("--wide", action="store_true", help="a last bucket of 16 MiB")
    parser.add_argument("--record", type=Path, metavar="RECORDING", help="record the run")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, fault, width = dist.get_rank(), Fault(args.fault), WIDE if args.wide else WIDTH
    model = nn.Sequential(Layer(width, WIDTH), *(Layer(WIDTH, WIDTH) for _ in range(LAYERS - 1)))
    stamps_ns: list[int] = []

    def sleep_in_backward(layer: nn.Module, _: object) -> None:
        slow = fault.current == "slow-backward" and rank == 1 and layer is model[LAYERS // 2]
        time.sleep(SLOW_BACKWARD_S if slow else BACKWARD_S)
        stamps_ns.append(time.monotonic_ns())

    batches = iter(DataLoader(Batches(width, fault), batch_size=None))
    for layer in model:
        layer.register_full_backward_pre_hook(sleep_in_backward)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.25)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    with ddpwatch.watch(ddp, record=args.record):
        for step in count():
            stamps_ns[:] = [time.monotonic_ns()]
            if fault.read() == "stop":
                break
            x = next(batches)
            stamps_ns.append(time.monotonic_ns())
            ddp(x).square().mean().backward()
            stamps_ns.append(time.monotonic_ns())
            optimizer.step()
            optimizer.zero_grad()
            stamps_ns.append(time.monotonic_ns())
            os.write(1, f"rank {rank} step {step} {fault.current}: {' '.join(map(str, stamps_ns))}\n".encode())
    del ddp  # before the group: a model destroys it with the GIL held, which Gloo's thread may wait for
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
