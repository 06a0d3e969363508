"""What a full, a shadow and an unwatched step cost the host, alone and beside a thread that keeps the GIL busy.

    python benchmarks/gpu/host_cost.py

Takes about a minute on a GPU. On the CPU, with events that cost nothing, it shows the probe's own Python.

The columns:
    model         as it is; with CUDA graphs that are replayed; with an fp16 comm hook
    beside        whether another thread keeps the GIL busy
    level         of the steps; levels alternate in blocks
    step us       host time of a step, the median of blocks
    adds us       by how much that exceeds the unwatched steps of the same blocks, median
    own us        what the probe measured of itself, median
    peak MiB      of GPU memory
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.job import LEVELS, Job
from benchmarks.gpu.part import Row, Rows, run
from benchmarks.gpu.simulated import SimulatedGpu
from ddpwatch.probe.cuda import CudaClock

BLOCKS, STEPS = 12, 30
SMALL: dict[str, Any] = {"layers": 25, "width": 64, "batch": 8}  # the host is slower than the GPU


def measure(job: Job, model: str) -> Rows:
    return [row for busy in (False, True) for row in measure_beside(job, model, busy, BLOCKS, STEPS)]


def measure_beside(job: Job, model: str, busy: bool, blocks: int, steps: int) -> Iterator[Row]:
    took: dict[str, list[float]] = {level: [] for level in LEVELS}
    own: dict[str, list[float]] = {level: [] for level in LEVELS}
    peak: dict[str, float | None] = dict.fromkeys(LEVELS)
    job.steps(5)
    with gil_kept_busy() if busy else nullcontext():
        for _ in range(blocks):
            for level in LEVELS:
                if job.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                records = job.steps(steps, level)
                took[level].append((time.perf_counter() - start) / (steps + 1) * 1e6)
                own[level].extend(record.own_ns / 1e3 for record in records if record.status == level)
                if job.device.type == "cuda":
                    peak[level] = torch.cuda.max_memory_allocated() / (1 << 20)
    for level in LEVELS:
        yield {
            "model": model,
            "beside": "a busy thread" if busy else "",
            "level": level,
            "step us": statistics.median(took[level]),
            "adds us": statistics.median(a - b for a, b in zip(took[level], took["unwatched"], strict=True)),
            "own us": statistics.median(own[level]) if own[level] else None,
            "peak MiB": peak[level],
        }


@contextmanager
def gil_kept_busy() -> Iterator[None]:
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def on_gpu() -> Rows:
    device = torch.device("cuda", torch.cuda.current_device())
    plain = measure(Job(device, **SMALL), "as it is")
    graphs = measure(Job(device, **SMALL, wrap=graphed), "CUDA graphs")
    hooked = Job(device, layers=8, width=4096, batch=64)
    hooked.ddp.register_comm_hook(None, fp16_hook(hooked))
    return plain + graphs + measure(hooked, "fp16 hook")


def graphed(model: nn.Module, data: torch.Tensor) -> nn.Module:
    """A model whose forward and backward are replayed."""
    return torch.cuda.make_graphed_callables(model, (data.clone(),))  # type: ignore[return-value]


def fp16_hook(job: Job) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """What torch's fp16 hook does, through the job's made-up group."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations in quotes
        compressed = bucket.buffer().to(torch.float16)
        future = job.ddp.process_group.allreduce([compressed]).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    return hook


def simulated(blocks: int = 4, steps: int = 10) -> Rows:
    """The simulated GPU never is behind: this is the time of the probe's Python, without CUDA's."""
    gpu = SimulatedGpu()
    clock = CudaClock(gpu.event, lambda: "compute", lambda: False, lambda: gpu.host)
    job = Job(torch.device("cpu"), **SMALL, gpu=clock)
    return list(measure_beside(job, "on the CPU", False, blocks, steps))


if __name__ == "__main__":
    sys.exit(run("host_cost", __doc__, on_gpu, simulated))
