"""Jobs that ddpwatch cannot watch, or that never end a step. They know nothing of ddpwatch.

``blind.py CASE [FILE]`` goes on until the file is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASE = sys.argv[1]


def built() -> nn.Module:
    """The model, wrapped as the case says."""
    if CASE == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    if CASE == "refused":
        torch._dynamo.config.optimize_ddp = "python_reducer"
        return DistributedDataParallel(nn.Linear(4, 4))
    if CASE in ("no-forward", "no-step"):
        return DistributedDataParallel(nn.Linear(4, 4))
    return nn.Linear(4, 4)


def main() -> None:
    if CASE not in ("alone", "no-group") and "RANK" in os.environ:
        dist.init_process_group("gloo")
    if CASE == "crash":
        raise FileNotFoundError(2, "No such file or directory", "/no/such/data")
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        loss = (model.module if CASE == "no-forward" else model)(torch.ones(2, 4)).sum()
        if CASE == "no-step":
            continue
        loss.backward()
        if CASE == "by-hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if CASE != "no-update":
            optimizer.step()
    while sys.argv[2:] and not Path(sys.argv[2]).exists():
        time.sleep(0.05)
    del model, optimizer
    if dist.is_initialized():
        dist.destroy_process_group()


main()
