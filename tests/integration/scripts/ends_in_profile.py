"""Trains until it is profiled, and ends by itself: ``ends_in_profile.py ERROR``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
ddpwatch.watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not torch.autograd._profiler_enabled():
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ends", flush=True)
if sys.argv[1] == "_exit":
    os._exit(4)
raise {"ValueError": ValueError("the job's"), "SystemExit": SystemExit(3)}[sys.argv[1]]
