"""Two ranks, one after the other, below one process. Each takes steps, records itself, and ends by ``sys.exit``."""

import os
import sys

import torch

from ddpwatch.probe.watch import watch_recorder

STEPS = 4


def train() -> None:
    watch = watch_recorder(model := torch.nn.Linear(1, 1))
    recorder, optimizer = watch.recorder, torch.optim.SGD(model.parameters())
    try:
        for _ in range(STEPS):
            recorder.forward_begin()
            loss = model(torch.ones(1, 1)).sum()
            recorder.forward_end()
            recorder.backward_begin()
            loss.backward()
            recorder.backward_compute_end()
            recorder.backward_end(reduced=True)
            optimizer.step()
        sys.exit(1)
    finally:
        watch.close()


for _ in range(2):
    if (rank := os.fork()) == 0:
        train()
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 1
