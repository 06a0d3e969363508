"""Times each CUDA call of a stamp on the host, and what watching adds to a step over NCCL, by the steps' level.

    python benchmarks/gpu/stamp_cost.py

Takes half a minute on a GPU, with NCCL in a world of one. Blocks of steps alternate between a job without a probe and
one with steps of each level. On the CPU, with events and collectives that cost nothing, it shows the probe's own
Python.

The columns:
    what       a call, or a step: "host-bound" if the host takes longer than the GPU
    level      of the steps; free: without a probe
    us, p95    of the host: median, and 95th percentile, of blocks
    adds us    by how much that exceeds the free steps of the same blocks, median
    own us     what the probe measured of itself, median
    peak MiB   of GPU memory
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.gpu.job import LEVELS, Job, average, nccl_alone
from benchmarks.gpu.part import Row, run
from ddpwatch.probe.cuda import CudaClock
from ddpwatch.probe.cuda_calls import cuda_clock, current_stream_of, make_event, query_mode
from tests.support.simulated_gpu import SimulatedGpu

BLOCKS, CALLS, STEPS = 30, 100, 10
BEHIND_CYCLES = 2_000_000_000  # the GPU is busy for a second
SMALL: dict[str, Any] = {"layers": 12, "width": 512, "batch": 64}
SIZES: dict[str, dict[str, Any]] = {
    "host-bound, 12 buckets": SMALL,
    "host-bound, comm hook": SMALL,
    "GPU-bound, 12 buckets": {"layers": 12, "width": 4096, "batch": 4096},
}
FREE = "free"


def on_gpu() -> Iterator[Row]:
    device = torch.device("cuda", 0)
    group = nccl_alone(device)
    yield from calls(device)
    for name, size in SIZES.items():
        free, watched = (Job(device, group=group, **size) for _ in range(2))
        if "comm hook" in name:
            for job in (free, watched):
                job.ddp.register_comm_hook(None, average)
        yield from levels(name, free, watched, BLOCKS // 3)
        del free, watched
        torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()


def calls(device: torch.device) -> Iterator[Row]:
    """The parts of a stamp, and stamps."""
    stream, mode, event, clock = current_stream_of(device), query_mode(), make_event(), cuda_clock(device)
    other = make_event()
    now = stream()
    for one in (event, other):
        one.record(now)
    torch.cuda.synchronize()

    def enter() -> None:
        with mode():
            pass

    yield timed("the current stream", stream)
    yield timed("whether a graph is captured", torch.cuda.is_current_stream_capturing)
    yield timed("query_mode", enter)
    yield timed("an event's query", event.query)
    yield timed("elapsed_time", lambda: event.elapsed_time(other))
    yield timed("an event's record", lambda: event.record(now), torch.cuda.synchronize)
    yield timed("a stamp", clock, torch.cuda.synchronize)
    torch.cuda._sleep(BEHIND_CYCLES)
    yield timed("a stamp, GPU behind", clock, blocks=5)  # CUDA's queue holds 1,021 launches
    torch.cuda.synchronize()


def timed(
    what: str, call: Callable[[], object], before: Callable[[], object] = lambda: None, blocks: int = BLOCKS
) -> Row:
    took = []
    for _ in range(blocks):
        before()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        took.append((time.perf_counter_ns() - start) / CALLS / 1e3)
    return row(what, took)


def row(
    what: str,
    took_us: list[float],
    level: str = "",
    adds_us: float | None = None,
    own_us: list[float] | None = None,
    peak_mib: float | None = None,
) -> Row:
    return {
        "what": what,
        "level": level,
        "us": statistics.median(took_us),
        "p95": sorted(took_us)[int(0.95 * len(took_us))],
        "adds us": adds_us,
        "own us": statistics.median(own_us) if own_us else None,
        "peak MiB": peak_mib,
    }


def levels(what: str, free: Job, watched: Job, blocks: int, steps: int = STEPS) -> Iterable[Row]:
    """Steps of each level against those of a job without a probe."""
    assert free.probe is not None
    free.probe.close()
    took: dict[str, list[float]] = {level: [] for level in (FREE, *LEVELS)}
    own: dict[str, list[float]] = {level: [] for level in took}
    peak: dict[str, float | None] = dict.fromkeys(took)
    free.steps(3)
    watched.steps(3)
    for _ in range(blocks):
        for level, values in took.items():
            if free.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            records = free.steps(steps) if level == FREE else watched.steps(steps, level)
            values.append((time.perf_counter() - start) / (steps + 1) * 1e6)
            own[level] += [record.own_ns / 1e3 for record in records if record.status == level]
            if free.device.type == "cuda":
                peak[level] = torch.cuda.max_memory_allocated() / (1 << 20)
    for level, values in took.items():
        more = statistics.median(a - b for a, b in zip(values, took[FREE], strict=True))
        yield row(what, values, level, None if level == FREE else more, own[level], peak[level])


def simulated(blocks: int = 4, steps: int = STEPS) -> Iterable[Row]:
    """The simulated GPU is never behind."""
    gpu = SimulatedGpu()

    def job() -> Job:
        clock = CudaClock(gpu.event, lambda: "compute", lambda: False, lambda: gpu.host)
        return Job(torch.device("cpu"), layers=25, width=64, batch=8, gpu=clock)

    return levels("on the CPU, 25 buckets", job(), job(), blocks, steps)


if __name__ == "__main__":
    sys.exit(run("stamp_cost", __doc__, on_gpu, simulated))
