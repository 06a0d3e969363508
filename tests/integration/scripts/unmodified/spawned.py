"""Starts its own ranks with torch.multiprocessing, or is the only one. It knows nothing of ddpwatch."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def train(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    model = DistributedDataParallel(nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(48, 32)), batch_size=4, num_workers=1)
    for (batch,) in data:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model  # before the group, which a model would destroy with the GIL held: Gloo's thread may be waiting for that
    dist.destroy_process_group()


if __name__ == "__main__":
    print("marker:", os.environ.get("OTHER_SITECUSTOMIZE"), flush=True)
    if "--alone" in sys.argv:
        train(0, 1, sys.argv[1])
    else:
        method = "fork" if "--fork" in sys.argv else "spawn"
        mp.start_processes(train, args=(2, sys.argv[1]), nprocs=2, start_method=method)
