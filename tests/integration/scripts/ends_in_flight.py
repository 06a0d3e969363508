"""Trains 5 steps. Then rank 0 ends while a collective is in flight: ``ends_in_flight.py STRATEGY ERROR WATCHED``.

The other rank does not join in, and ends later. With DDP the backward's first buckets are being reduced, with FSDP2 a
parameter group is being gathered.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddpwatch

ERRORS = {"ValueError": ValueError("the job's"), "SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt()}
strategy, error, watched = sys.argv[1:]


def end(gradient: torch.Tensor | None = None) -> None:
    print("ends", flush=True)
    raise ERRORS[error]


dist.init_process_group("gloo")
layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
first = layers[0].weight
model = fully_shard(layers) if strategy == "fsdp2" else DistributedDataParallel(layers, bucket_cap_mb=0.0002)
if watched == "watched":
    ddpwatch.watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank():
    time.sleep(1)
    os._exit(0)
output = model(torch.ones(2, 8)) if strategy == "ddp" else None
if isinstance(model, FSDPModule):
    model.unshard(async_op=True)
    end()
assert output is not None
first.register_hook(end)
output.sum().backward()
