"""Trains 30 short steps, once a file is there. Then rank 0 ends by ``os._exit``, others by ``sys.exit``, with a code.

They wait for what END names, if that is set. With a second file, the collector starts once that is there.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from ddpwatch.probe import collector_process

if len(sys.argv) > 3:
    start = collector_process.module_command
    waits = f'while ! [ -e {sys.argv[3]} ]; do sleep 0.05; done; exec "$@"'
    collector_process.module_command = lambda *words, **options: ["sh", "-c", waits, "sh", *start(*words, **options)]
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
ddpwatch.watch(model, record=os.environ.get("RECORD"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
dist.barrier()
if os.fork() == 0:  # what ends like this is not the rank
    os._exit(0)
assert os.wait()[1] == 0
assert pickle.loads(pickle.dumps(os._exit)) is os._exit
for _ in range(30):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.barrier()
while not Path(os.environ.get("END", "/")).exists():
    time.sleep(0.01)
(os._exit if dist.get_rank() == 0 else sys.exit)(int(sys.argv[1]))
