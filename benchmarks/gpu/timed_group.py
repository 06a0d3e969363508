"""Whether a collective's stamps agree with its known length, and with torch.profiler.

    python benchmarks/gpu/timed_group.py

Collectives are made up (`job.SleepingGroup`): DDP takes its default path, without a comm hook. Takes some seconds.

The columns:
    known ms      what the collective was asked to take
    stamped ms    done - start, median over steps and buckets
    off us        |stamped - known|: median, and p95
    profiler ms   the kernels of the same collectives by torch.profiler; on the simulated GPU there is none
    against us    |stamped - profiler|, median
"""

from __future__ import annotations

import statistics
import sys

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.job import Job, cycles_per_ms
from benchmarks.gpu.part import Row, Rows, run
from benchmarks.gpu.simulated import SimulatedJob
from ddpwatch.probe.record import StepRecord

LENGTHS_MS = (0.2, 1.0, 5.0)
STEPS = 30
KERNEL = "spin_kernel"  # what `torch.cuda._sleep` launches


def on_gpu() -> Rows:
    per_ms = cycles_per_ms()
    return [on_gpu_for(length, round(length * per_ms)) for length in LENGTHS_MS]


def on_gpu_for(length_ms: float, cycles: int) -> Row:
    job = Job(torch.device("cuda", torch.cuda.current_device()), cycles)
    job.steps(5)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        records = job.steps(STEPS, wait=True)
    spans = [e.time_range for e in profiler.events() if e.device_type == DeviceType.CUDA and KERNEL in e.name]
    kernels = [(span.end - span.start) / 1e3 for span in sorted(spans, key=lambda span: span.start)]
    return row(length_ms, stamped(records), kernels)


def stamped(records: list[StepRecord]) -> list[float]:
    """The lengths of all collectives, in ms."""
    steps = [record.message(0, 0) for record in records]
    rows = [pair for step in steps for pair in zip(step.comm_start, step.comm_done, strict=True)]
    return [(done - start) / 1e6 for start, done in rows if start is not None and done is not None]


def row(known_ms: float, found: list[float], profiled: list[float]) -> Row:
    off = sorted(abs(ms - known_ms) * 1e3 for ms in found)
    pairs = [abs(a - b) * 1e3 for a, b in zip(found, profiled, strict=False)]
    return {
        "known ms": known_ms,
        "stamped ms": statistics.median(found),
        "off us": statistics.median(off),
        "p95": off[int(0.95 * len(off))],
        "profiler ms": statistics.median(profiled) if profiled else None,
        "against us": statistics.median(pairs) if pairs else None,
        "collectives": len(found),
    }


def simulated() -> Rows:
    rows = []
    for length in LENGTHS_MS:
        job = SimulatedJob(offset=123_456_789, ppm=20)
        for _ in range(STEPS):
            job.step(collective_ms=length)
            job.gpu.synchronise()
        job.finish()
        rows.append(row(length, stamped(job.records), []))
    return rows


if __name__ == "__main__":
    sys.exit(run("timed_group", __doc__, on_gpu, simulated))
