"""Looks for a rank's goodbye after a CUDA error, which makes every later CUDA call fail.

    python benchmarks/gpu/illegal_access.py

Starts itself: a job of one rank reads outside a tensor once its recording has steps, and ends. Takes some seconds. On
the simulated GPU, only the events fail.

The columns:
    exit code   of the job; not 0
    end         how the rank ended
    said by     the rank in its goodbye, or the collector that found it gone
    detail      what that says
    steps       how many were sent, and how many of them are unresolved
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from benchmarks.gpu.part import Rows, run
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.wire.messages import Bye, Message, Step
from tests.support.simulated_gpu import SimulatedJob

STEPS_BEFORE = 10
COLLECTOR_S = 20.0
BREAK = "--break"


def on_gpu(device: str = "cuda") -> Rows:
    with tempfile.TemporaryDirectory(prefix="ddpwatch-gpu-") as folder:
        environment = {**os.environ, "DDPWATCH_DIR": folder, "DDPWATCH_DETAIL": "full"}
        file = Path(folder) / "run.mcap"
        job = subprocess.run([sys.executable, __file__, BREAK, file, device], env=environment, capture_output=True)
        messages = complete(file)
    bye = next((m for m in messages if isinstance(m, Bye) and m.rank == 0), None)
    steps = [m for m in messages if isinstance(m, Step)]
    return [
        {
            "exit code": job.returncode,
            "end": None if bye is None else bye.reason,
            "said by": None if bye is None else bye.by,
            "detail": None if bye is None else bye.detail[:100],
            "steps": len(steps),
            "unresolved": sum(step.status == "unresolved" for step in steps),
        }
    ]


def complete(file: Path) -> list[Message]:
    """The recording, once the collector has written the end of the run: it outlives the ranks by some seconds."""
    deadline = time.monotonic() + COLLECTOR_S
    while True:
        with contextlib.suppress(DdpwatchError):  # it is being written
            messages = [message for message, _ in Recording(file)]
            if any(isinstance(message, Bye) and message.rank is None for message in messages):
                return messages
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} has no end")
        time.sleep(0.2)


def break_down(file: Path, device: torch.device) -> None:
    """The job."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Linear(1024, 1024).to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    data = torch.randn(64, 1024, device=device)
    ddpwatch.watch(ddp, record=file)
    steps_after = 0
    while steps_after < 5:
        if steps_after or count_steps(file) >= STEPS_BEFORE:
            steps_after += 1
        if steps_after == 1:
            data = data[torch.full((64,), 1 << 40, device=device)]  # no such row
        ddp(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def count_steps(file: Path) -> int:
    """How many steps a recording has by now; 0 as long as it has nothing that can be read."""
    try:
        return sum(isinstance(message, Step) for message, _ in Recording(file))
    except (OSError, DdpwatchError):
        return 0


def simulated() -> Rows:
    job = SimulatedJob()
    for step in range(STEPS_BEFORE):
        job.step()
        if step < STEPS_BEFORE // 2:
            job.gpu.synchronise()
    job.gpu.broken = True
    try:
        job.recorder.finish()
    except RuntimeError as error:
        detail = str(error)
    return [
        {
            "exit code": None,
            "end": None,
            "said by": None,
            "detail": detail,
            "steps": len(job.records),
            "unresolved": sum(record.status == "unresolved" for record in job.records),
        }
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == [BREAK]:
        break_down(Path(sys.argv[2]), torch.device(sys.argv[3]))
    else:
        sys.exit(run("illegal_access", __doc__, on_gpu, simulated))
