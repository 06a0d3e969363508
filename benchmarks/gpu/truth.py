"""Compares ddpwatch's overlap on a GPU with the overlap of torch.profiler's kernels.

    python benchmarks/gpu/truth.py                                                      one GPU, NCCL, a world of one
    torchrun --standalone --nproc-per-node=2 benchmarks/gpu/truth.py --backend gloo     two ranks that share one GPU
    torchrun --standalone --nproc-per-node=8 benchmarks/gpu/truth.py                    one rank per GPU

Takes about half a minute. Budget: within 2 percentage points; exits with 1 if the median over the steps differs by
more, or if there was nothing to compare.

The profiler's overlap follows HolisticTraceAnalysis's formula: communication is the union of the NCCL kernels (with
Gloo: of its collectives), computation the union of all other kernels. In a world of one, NCCL launches a kernel only
for an average, so a comm hook averages.

The columns: the median overlap by ddpwatch and by torch.profiler, their difference in points, the steps compared.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity

import ddpwatch
from benchmarks.gpu.job import average
from benchmarks.gpu.part import NO_GPU, Row, command_line, show, write
from benchmarks.profiler_truth import under_both
from ddpwatch.analysis.step import figures
from ddpwatch.common.intervals import Intervals, intersect, total, union
from ddpwatch.probe import session
from ddpwatch.probe.cuda import CudaClock
from ddpwatch.probe.record import StepRecord
from tests.support.rounds import Rounds

NAME = "truth"
WITHIN_POINTS = 2.0
NCCL_KERNELS = ("nccl", "onerankreduce")


class Profiled(NamedTuple):
    """The profiler's intervals in ns of its clock, and the start of each step's forward."""

    communication: Intervals
    compute: Intervals
    starts: list[int]


def train(device: torch.device, records: list[StepRecord], rounds: Rounds) -> Profiled:
    """Trains under ddpwatch and the profiler; ``records`` receives ddpwatch's steps."""
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=32)
    if dist.get_world_size() == 1:
        ddpwatch.watch(ddp)
        ddp.register_comm_hook(None, average)
    data = torch.randn(2048, 2048, device=device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = under_both(ddp, data, activities, records, rounds, finish=torch.cuda.synchronize)
    communication, compute, starts = [], [], []
    for event in profiler.events():
        span = (round(event.time_range.start * 1000), round(event.time_range.end * 1000))
        kernel = event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        if event.name == "DistributedDataParallel.forward" and not kernel:
            starts.append(span[0])
        elif event.name.startswith("gloo:") if dist.get_backend() == "gloo" else kernel and is_nccl(event.name):
            communication.append(span)
        elif kernel:
            compute.append(span)
    return Profiled(union(communication), union(compute), sorted(starts))


def is_nccl(kernel: str) -> bool:
    return any(name in kernel.lower() for name in NCCL_KERNELS)


def overlaps(records: list[StepRecord], profiled: Profiled) -> list[tuple[float, float]]:
    """The overlap of every step with communication, in percent: ddpwatch's and the profiler's."""
    found, watched = [], session.current
    assert watched is not None
    clock = watched.recorder.gpu
    assert isinstance(clock, CudaClock)
    for record, start, end in zip(records[1:-1], profiled.starts[1:], profiled.starts[2:], strict=False):
        while not record.settled():
            clock.poll()
            time.sleep(0.01)
        overlap = figures(record.message(0, 0)).overlap
        inside = intersect(profiled.communication, [(start, end)])
        if overlap is not None and inside:
            found.append((100 * overlap, 100 * total(intersect(inside, profiled.compute)) / total(inside)))
    return found


def report(found: list[tuple[float, float]], backend: str, out: Path) -> int:
    """Prints the table and writes it; the exit code."""
    if not found:
        print("no step with communication was seen by both: no overlap to compare")
        return 1
    watched, profiled = zip(*found, strict=True)
    difference = statistics.median(a - b for a, b in found)
    row: Row = {
        "ddpwatch %": statistics.median(watched),
        "torch.profiler %": statistics.median(profiled),
        "difference": difference,
        "steps": len(found),
        "backend": backend,
        "ranks": dist.get_world_size(),
    }
    show(f"on {torch.cuda.get_device_name()}", [row])
    write(out, NAME, True, [row])
    return int(abs(difference) > WITHIN_POINTS)


def main() -> int:
    parser = command_line(NAME, __doc__)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    args = parser.parse_args()
    backend = args.backend
    if not torch.cuda.is_available():
        print(NO_GPU)
        write(args.out, NAME, False, [])
        return 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    records: list[StepRecord] = []
    with Rounds.of_job() as rounds:
        found = overlaps(records, train(device, records, rounds))
        code = report(found, backend, args.out) if dist.get_rank() == 0 else 0
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
