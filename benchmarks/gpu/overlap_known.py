"""Compares stamps and overlap with torch.profiler's kernels, for collectives of known length.

    python benchmarks/gpu/overlap_known.py

Collectives are made up (`job.SleepingGroup`): DDP takes its default path, and the profiler sees each as one kernel.
Takes a quarter of a minute. Starts and ends are compared after the median difference of the ends: of the two clocks.

The columns:
    known ms                  what the collective was asked to take
    stamped ms                done - start, median over steps and buckets
    off us                    |stamped - known|, median
    start p5, p50, p95 us     start - the kernel's start
    end p5, p95 us            done - the kernel's end
    overlap %, kernels' %     by ddpwatch, and by the kernels: medians over the steps
    points                    their difference, median
    collectives               how many were compared
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.job import Job, cycles_per_ms
from benchmarks.gpu.part import Row, run
from ddpwatch.analysis.step import figures
from ddpwatch.common.intervals import Intervals, intersect, total, union
from ddpwatch.wire.messages import Step
from tests.support.simulated_gpu import SimulatedJob

LENGTHS_MS = (0.1, 0.5, 2.0, 5.0)
STEPS = 20
KERNEL = "spin_kernel"  # what `torch.cuda._sleep` launches


def on_gpu() -> Iterable[Row]:
    per_ms = cycles_per_ms()
    for length in LENGTHS_MS:
        job = Job(torch.device("cuda", 0), round(length * per_ms), layers=12, width=2048, batch=4096)
        job.steps(5)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            records = job.steps(STEPS, wait=True)
        yield row(length, [record.message(0, 0) for record in records if record.status == "ok"], *kernels_of(profiler))


def kernels_of(profiler: profile) -> tuple[Intervals, Intervals]:
    """The kernels of collectives, and the union of all others (ns)."""
    sleeps: Intervals = []
    others: Intervals = []
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            span = (round(event.time_range.start * 1000), round(event.time_range.end * 1000))
            (sleeps if KERNEL in event.name else others).append(span)
    return sorted(sleeps), union(others)


def row(known_ms: float, steps: Sequence[Step], kernels: Intervals, others: Intervals) -> Row:
    """One row.

    Args:
        known_ms: The collectives' length.
        steps: By ddpwatch.
        kernels: Of the collectives, and perhaps of those of a step more; none on the simulated GPU.
        others: The kernels of compute.
    """
    ours = [span for step in steps for span in collectives_of(step)]
    lengths = [(done - start) / 1e6 for start, done in ours]
    kernels = kernels[: len(ours)]
    compared = kernels and len(kernels) == len(ours)
    starts, ends = differences(ours, kernels) if compared else ([], [])
    shown = [100 * overlap for step in steps if (overlap := figures(step).overlap) is not None]
    theirs = overlaps(kernels, others, len(ours) // len(steps)) if compared else []
    return {
        "known ms": known_ms,
        "stamped ms": statistics.median(lengths),
        "off us": statistics.median(abs(length - known_ms) * 1e3 for length in lengths),
        "start p5 us": quantile(starts, 0.05),
        "p50 us": quantile(starts, 0.5),
        "p95 us": quantile(starts, 0.95),
        "end p5 us": quantile(ends, 0.05),
        "p95": quantile(ends, 0.95),
        "overlap %": statistics.median(shown),
        "kernels' %": statistics.median(theirs) if theirs else None,
        "points": statistics.median(a - b for a, b in zip(shown, theirs, strict=False)) if theirs else None,
        "collectives": len(ours),
    }


def collectives_of(step: Step) -> list[tuple[int, int]]:
    """The start and the end of each, on the host's clock (ns)."""
    found = []
    for launch, start, done in zip(step.comm_launch, step.comm_start or step.comm_launch, step.comm_done, strict=True):
        begin = launch if start is None else start
        if begin is not None and done is not None:
            found.append((step.start_ns + begin, step.start_ns + done))
    return found


def differences(ours: Sequence[tuple[int, int]], kernels: Intervals) -> tuple[list[float], list[float]]:
    """Of the starts and of the ends, in us."""
    clocks = statistics.median(done - end for (_, done), (_, end) in zip(ours, kernels, strict=True))
    pairs = list(zip(ours, kernels, strict=True))
    starts = [(mine - theirs - clocks) / 1e3 for (mine, _), (theirs, _) in pairs]
    return starts, [(mine - theirs - clocks) / 1e3 for (_, mine), (_, theirs) in pairs]


def overlaps(kernels: Intervals, others: Intervals, per_step: int) -> list[float]:
    """The overlap of each step by the kernels alone, in percent."""
    steps = (union(kernels[first : first + per_step]) for first in range(0, len(kernels), per_step))
    return [100 * total(intersect(spans, others)) / total(spans) for spans in steps]


def quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[int(share * (len(values) - 1))] if values else None


def simulated() -> Iterable[Row]:
    for length in LENGTHS_MS:
        job = SimulatedJob(offset=123_456_789, ppm=20)
        for _ in range(STEPS):
            job.step(collective_ms=length)
            job.gpu.synchronise()
        job.finish()
        yield row(length, [record.message(0, 0) for record in job.records], [], [])


if __name__ == "__main__":
    sys.exit(run("overlap_known", __doc__, on_gpu, simulated))
