"""Two ranks, of which one is late, and then stays where it is: ``troubled.py FOLDER``. It knows nothing of ddpwatch.

Rank 1 is late until the file ``alerts`` has a straggler. While whoever wrote that waits for the pipe ``go``, it trains
`MORE` steps, opens the pipe and hangs.
"""

import multiprocessing
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER, MORE = Path(sys.argv[1]), 20


def held_up() -> None:
    """Where rank 1 stays."""
    threading.Event().wait()


class Layer(nn.Linear):
    """A layer of a rank that may be late, and hang."""

    left = MORE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.03)
            Layer.left -= "straggler" in (FOLDER / "alerts").read_text()
            if Layer.left == 0:
                (FOLDER / "go").write_text("")
                held_up()
        return super().forward(x)


def train(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{FOLDER}/store")
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), Layer(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    while True:
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    ranks = [multiprocessing.get_context("fork").Process(target=train, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in ranks])  # as torchrun passes it on
    for process in ranks:
        process.join()
    sys.exit(1)
