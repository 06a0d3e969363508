"""Counts the steps that the host is ahead of the GPU in jobs that never synchronise, and those that get no times.

    python benchmarks/gpu/ahead.py

Takes half a minute. Jobs with few launches per step (large kernels, CUDA graphs) are the furthest ahead: the driver's
queue holds a number of launches, not of steps.

The columns:
    job                    on the simulated GPU, a host that never waits
    steps                  how many were trained
    ahead                  the most steps that the host was ahead
    resolved, unresolved   steps with times, and without
    GPU ms, host ms        a step, by the GPU and to enqueue
    stated us              how far the newest step's start may be off, by its own word
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.gpu.job import LARGE, Job, graphed
from benchmarks.gpu.part import Row, run
from ddpwatch.probe.record import StepRecord
from tests.support.simulated_gpu import SimulatedJob

STEPS = 150
JOBS: dict[str, dict[str, Any]] = {
    "3 large layers": LARGE,
    "48 layers": {"layers": 48, "width": 2048, "batch": 2048},
    "16 layers, CUDA graphs": {"layers": 16, "width": 4096, "batch": 4096, "wrap": graphed},
}
SIMULATED_STEPS = (8, 32, 200)


def on_gpu() -> Iterable[Row]:
    torch.backends.cuda.matmul.allow_tf32 = True
    for name, size in JOBS.items():
        yield trained(name, Job(torch.device("cuda", 0), **size))
        torch.cuda.empty_cache()


def trained(name: str, job: Job) -> Row:
    job.steps(3)
    before = len(job.records)
    ends: list[torch.cuda.Event] = []
    most = passed = 0
    start = time.perf_counter()
    for _ in range(STEPS):
        job.step()
        ends.append(torch.cuda.Event())
        ends[-1].record()
        while passed < len(ends) and ends[passed].query():
            passed += 1
        most = max(most, len(ends) - passed)
    host_s = time.perf_counter() - start
    job.synchronise()
    gpu_s = time.perf_counter() - start
    job.steps(0)  # closes the last one
    return row(name, job.records[before:], most, gpu_s / STEPS * 1e3, host_s / STEPS * 1e3)


def row(
    name: str, records: list[StepRecord], ahead: int, gpu_ms: float | None = None, host_ms: float | None = None
) -> Row:
    resolved = [record for record in records if record.status == "ok"]
    stated = [record.clock_error_ns / 1e3 for record in resolved if record.clock_error_ns is not None]
    return {
        "job": name,
        "steps": len(records),
        "ahead": ahead,
        "resolved": len(resolved),
        "unresolved": sum(record.status == "unresolved" for record in records),
        "GPU ms": gpu_ms,
        "host ms": host_ms,
        "stated us": stated[-1] if stated else None,
    }


def simulated() -> Iterable[Row]:
    for steps in SIMULATED_STEPS:
        job = SimulatedJob(offset=123_456_789, ppm=20)
        for _ in range(steps):
            job.step()
        job.finish()
        yield row("never waits", job.records, steps)


if __name__ == "__main__":
    sys.exit(run("ahead", __doc__, on_gpu, simulated))
