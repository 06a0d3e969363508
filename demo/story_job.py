"""A watched job whose trouble changes while it runs: what is in the file given says what is wrong in the next step.

``none``, ``slow-backward`` (rank 1, 200 ms in the middle layer), ``slow-input`` (rank 0, 100 ms), ``stop``. Layers take
their time asleep, as if an accelerator computed: what else runs on the machine is not in the way. With ``--wide`` the
first layer is so large that the last bucket's transfer is longer than all that could hide it.

Every rank prints what happened in each step by its own clock (monotonic ns): its start, its forward's start, the moment
its backward reached the first layer, the backward's end, the step's end.

torchrun --standalone --nproc-per-node=2 demo/story_job.py FILE [--wide] [--record RECORDING]
"""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch

WIDTH, LAYERS, BATCH = 256, 8, 32
WIDE = 65_536  # times WIDTH: 64 MiB of gradients
FORWARD_S, BACKWARD_S = 0.0015, 0.004  # per layer


class Trouble:
    """All ranks learn from rank 0 what is wrong in the next step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = "none"

    def ask(self) -> str:
        """What rank 0's file says, the same on every rank."""
        said: list[str | None] = [self.path.read_text().strip() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(said)
        self.now = said[0] or "none"
        return self.now


class Layer(nn.Linear):
    """A layer that takes its time."""

    def forward(self, given: Tensor) -> Tensor:
        """The layer, after its sleep."""
        time.sleep(FORWARD_S)
        return super().forward(given).relu()


def main() -> None:
    """Trains until the file says stop."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, trouble = dist.get_rank(), Trouble(Path(sys.argv[1]))
    width = WIDE if "--wide" in sys.argv else WIDTH
    model = nn.Sequential(Layer(width, WIDTH), *(Layer(WIDTH, WIDTH) for _ in range(LAYERS - 1)))

    stamps: list[int] = []

    def drag(layer: nn.Module, _: object) -> None:
        slow = trouble.now == "slow-backward" and rank == 1 and layer is model[LAYERS // 2]
        time.sleep(0.2 if slow else BACKWARD_S)
        if layer is model[0]:
            stamps.append(time.monotonic_ns())

    for layer in model:
        layer.register_full_backward_pre_hook(drag)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.25)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    record = sys.argv[sys.argv.index("--record") + 1] if "--record" in sys.argv else None
    with ddpwatch.watch(ddp, record=record):
        for step in count():
            stamps = [time.monotonic_ns()]
            if trouble.ask() == "stop":
                break
            if trouble.now == "slow-input" and rank == 0:
                time.sleep(0.1)
            stamps.append(time.monotonic_ns())
            ddp(torch.randn(BATCH, width)).square().mean().backward()
            stamps.append(time.monotonic_ns())
            optimizer.step()
            optimizer.zero_grad()
            stamps.append(time.monotonic_ns())
            os.write(1, f"rank {rank} step {step} {trouble.now}: {' '.join(map(str, stamps))}\n".encode())
    del ddp  # before the group, which a model would destroy with the GIL held: Gloo's thread may be waiting for that
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
