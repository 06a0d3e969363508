"""Trains until every rank knows whether the job is watched; none waits long for a rank 0 that cannot watch."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.probe import rendezvous
from ddpwatch.probe.watch import watch

rendezvous.FIND_TIMEOUT_S = 1.0  # of 60: the others would warn after it
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 4))
watch(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(40):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
dist.destroy_process_group()
