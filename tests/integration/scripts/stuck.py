"""Ranks that get stuck where the test wants them to, and until it wants them to go on.

    stuck.py FOLDER [RECORDING]

They start once there is a file ``watched`` in the folder. At step `HANGS`, rank 1 stays in its forward until somebody
opens the pipe ``go``. Then they train until there is a file ``mismatch``: at that, rank 1 calls another collective than
the others, and nobody comes back from it. If that file is there from the start, they train as many steps as there were
before the hang, and end.

Before the hang, a thread takes stacks without a pause, and training waits once until there are some. The parameters are
then left in the folder as a hash.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from ddpwatch.probe.stacks import dump

HANGS, STACKS_AT, ENOUGH_STACKS = 20, 10, 12
FOLDER = Path(sys.argv[1])


def held_up() -> None:
    """Where rank 1 stays."""
    open(FOLDER / "go").close()


class Layer(nn.Linear):
    """A layer that takes its time, and in one step of one rank for ever."""

    step = 0
    hangs = True
    stacks: int | None = None  # taken in `train` so far; None if nobody takes any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        while Layer.step == STACKS_AT and Layer.stacks is not None and Layer.stacks < ENOUGH_STACKS:
            time.sleep(0.001)
        if Layer.step == HANGS and Layer.hangs and dist.get_rank() == 1:
            held_up()
            Layer.hangs = False
        return super().forward(x)


def take_stacks(over: threading.Event) -> None:
    """What happens once in a hang, over and over."""
    me = threading.main_thread().ident or 0
    while not over.is_set():
        text, _ = dump(me)
        Layer.stacks += "in train" in text
    (FOLDER / f"stacks{dist.get_rank()}").write_text(str(Layer.stacks))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(4, 32) * (1 + dist.get_rank())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        Layer.step += 1


def is_wanted(name: str) -> bool:
    """Whether rank 0 sees that file."""
    seen = torch.tensor(float((FOLDER / name).exists()))
    dist.broadcast(seen, 0)
    return bool(seen)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[Layer(32, 32) for _ in range(4)]), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    ddpwatch.watch(model, record=sys.argv[2] if sys.argv[2:] else None)
    control, over = is_wanted("mismatch"), threading.Event()
    pest = threading.Thread(target=take_stacks, args=[over])
    while not control and not is_wanted("watched"):
        time.sleep(0.01)
    if not control:
        Layer.stacks = 0
        pest.start()
    train(model, optimizer, HANGS)
    over.set()
    digest = hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in model.parameters())).hexdigest()
    (FOLDER / f"parameters{dist.get_rank()}").write_text(digest)
    if control:
        return
    pest.join()
    while not is_wanted("mismatch"):
        train(model, optimizer, 1)
    if dist.get_rank() == 1:
        dist.all_gather([torch.zeros(3) for _ in range(dist.get_world_size())], torch.ones(3))
    train(model, optimizer, 1)


main()
