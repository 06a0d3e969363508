"""Trains a step on one rank, and ends: ``end_raises.py HOW [FILE]``.

With a file it is watched, and whatever ddpwatch does at the end makes that file and raises.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

how, files = sys.argv[1], sys.argv[2:]


def fail(*_: object, **__: object) -> None:
    Path(files[0]).touch()
    raise ValueError("of nobody's business")


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
if files:
    import ddpwatch
    from ddpwatch.probe.session import ProbeSession

    ddpwatch.watch(model)
model(torch.ones(2, 4)).sum().backward()
if files:
    for name in ("_silence",) if how == "forks" else ("close", "end"):
        setattr(ProbeSession, name, fail)
if how == "forks":
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # of its threads, with its pid
    if (child := os.fork()) == 0:
        print("the child's own line", flush=True)
        os._exit(5)
    print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print("the job's own line", flush=True)
if how == "raises":
    raise RuntimeError("boom")
if how == "exits":
    sys.exit(3)
if how == "exits hard":
    os._exit(3)
