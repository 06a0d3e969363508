"""The job of the soak test (`soak.py`): trains a small model, and notes a hash of its parameters after every step.

A rank's notes are ``rank.RANK.ATTEMPT.PID`` in the job's folder, with lines of 26 bytes. At `GATE_STEP` the job
waits for the file ``go``, so that what is to happen to it can wait until it is watched. What it trains depends on
nothing but the number of steps.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GATE_STEP = 20
FILE_LIMIT_BYTES = 12 * 1024
STOP_EVERY = 50  # steps between two looks for the file `stop`, in a job without end
GATE_S = 90.0


def main() -> None:
    folder, options = Path(os.environ["SOAK_JOB"]), os.environ["SOAK_OPTIONS"].split()
    if "limited" in options:  # in place of a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, FILE_LIMIT_BYTES))
    join(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), bucket_cap_mb=0.003)
    if "watch" in options:
        import ddpwatch

        ddpwatch.watch(model, record=folder / "recording" / "run.mcap" if "record" in options else None)
    name = f"rank.{dist.get_rank()}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{os.getpid()}"
    with (folder / name).open("wb", buffering=0) as notes:
        train(model, notes.write, folder, float(os.environ["SOAK_PAUSE_S"]), int(os.environ["SOAK_STEPS"]))
    dist.destroy_process_group()


def join(attempt: int) -> None:
    """Joins the process group. After a restart, with keys of its own in the store, which is torchrun's and goes on.

    Gloo would otherwise find the addresses of the attempt before: torch 2.13 then fails or hangs in half of the cases.
    """
    if not attempt:
        dist.init_process_group("gloo")
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=ranks)


def train(
    model: DistributedDataParallel, note: Callable[[bytes], object], folder: Path, pause_s: float, steps: int
) -> None:
    """Trains so many steps; with 0, until there is a file ``stop``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, rank = 0, dist.get_rank()
    while step < steps or (not steps and not stopped(step, folder)):
        if step == GATE_STEP and rank == 0:
            wait_for(folder / "go")
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(b"%8d %s\n" % (step, parameters(model)))
        step += 1
        time.sleep(pause_s)


def parameters(model: nn.Module) -> bytes:
    """A hash of all parameters."""
    raw = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(raw).hexdigest()[:16].encode()


def wait_for(file: Path) -> None:
    """Waits for a file of the soak test's. Without one, the job goes on some time: the test is gone, then."""
    deadline = time.monotonic() + GATE_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def stopped(step: int, folder: Path) -> bool:
    """Whether the job is to stop, or the soak test is gone: the same answer on all ranks."""
    if step % STOP_EVERY:
        return False
    soak = Path("/proc") / os.environ["SOAK_PID"]
    stop = torch.tensor([float((folder / "stop").exists() or not soak.exists())])
    dist.broadcast(stop, 0)
    return bool(stop.item())


if __name__ == "__main__":
    main()
