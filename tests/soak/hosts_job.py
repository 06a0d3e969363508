"""A job that trains until it is asked to stop, and notes when each of its watched steps ended. Started by `hosts.py`.

    hosts_job.py FOLDER RECORDING

Steps mostly nap, as if they waited for a GPU. FOLDER is the same on all hosts: once it holds a file ``watch``, the job
is watched, once it holds ``lie``, the last rank lies (`liar.py`), and once it holds ``stop``, it ends. Each rank
writes ``steps-RANK`` there: a line per watched step with its end in ns, on the rank's own clock.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from tests.soak.liar import Liar

WIDTH, LAYERS = 64, 4
NAP_S = 0.04


def steps(model: nn.Module, until: Path) -> Iterator[None]:
    """Trains until rank 0 finds the file; yields after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch, stop = torch.randn(16, WIDTH), torch.zeros(1)
    while not stop.item():
        model(batch).square().mean().backward()
        time.sleep(NAP_S)
        optimizer.step()
        optimizer.zero_grad()
        yield
        stop += dist.get_rank() == 0 and until.exists()
        dist.broadcast(stop, 0)


def main(folder: Path, recording: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    for _ in steps(model, folder / "watch"):
        pass
    ended = os.open(folder / f"steps-{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with ddpwatch.watch(model, record=recording):
        liar: Liar | None = None
        for _ in steps(model, folder / "stop"):
            os.write(ended, b"%d\n" % time.monotonic_ns())
            if liar is None and dist.get_rank() == dist.get_world_size() - 1 and (folder / "lie").exists():
                liar = Liar(dist.distributed_c10d._get_default_store(), dist.get_rank(), folder / "lied")
            if liar is not None:
                liar.turn()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
