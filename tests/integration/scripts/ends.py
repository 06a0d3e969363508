"""Two ranks, one after the other, below one process. Each records by itself, and ends by ``sys.exit``."""

import os
import sys

import torch

from ddpwatch.probe.watch import watch_recorder


def end() -> None:
    watch = watch_recorder(torch.nn.Linear(1, 1))
    try:
        sys.exit(1)
    finally:
        watch.close()


for _ in range(2):
    if (rank := os.fork()) == 0:
        end()
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 1
