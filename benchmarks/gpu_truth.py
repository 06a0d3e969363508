"""Whether the overlap that ddpwatch tells on a GPU is the one that torch.profiler's kernels give, within 2 points.

    torchrun --standalone --nproc-per-node=1 benchmarks/gpu_truth.py                    one GPU, NCCL, a world of one
    torchrun --standalone --nproc-per-node=2 benchmarks/gpu_truth.py --backend gloo     two ranks that share one GPU
    torchrun --standalone --nproc-per-node=8 benchmarks/gpu_truth.py                    one rank per GPU

Theirs, by HolisticTraceAnalysis's formula: communication is the union of the NCCL kernels (with Gloo: of its
collectives), computation the union of all other kernels. Exits with 1 if the median over the steps differs by more, or
if there was nothing to compare. In a world of one NCCL launches a kernel only for an average, so a comm hook averages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from profiler_truth import under_both
from torch import nn
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity

import ddpwatch
from ddpwatch.analysis.intervals import Intervals, intersect, total, union
from ddpwatch.analysis.step import figures
from ddpwatch.probe import session
from ddpwatch.probe.recorder import StepRecord
from ddpwatch.report.format import table

WITHIN_POINTS = 2.0
NCCL_KERNELS = ("nccl", "onerankreduce")


def average(state, bucket):  # without annotations: DDP takes none in quotes
    """The comm hook of a world of one."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def train(backend: str, records: list[StepRecord]) -> tuple[Intervals, Intervals, list[int]]:
    """Trains under both: the profiler's communication, its computation, and when each step's forward began (its ns)."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend)
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=32)
    if dist.get_world_size() == 1:
        ddpwatch.watch(ddp)
        ddp.register_comm_hook(None, average)
    data = torch.randn(2048, 2048, device=device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = under_both(ddp, data, activities, records, finish=torch.cuda.synchronize)
    comm, compute, begins = [], [], []
    for event in profiler.events():
        span = (round(event.time_range.start * 1000), round(event.time_range.end * 1000))
        kernel = event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        if event.name == "DistributedDataParallel.forward" and not kernel:
            begins.append(span[0])
        elif event.name.startswith("gloo:") if backend == "gloo" else kernel and is_nccl(event.name):
            comm.append(span)
        elif kernel:
            compute.append(span)
    return union(comm), union(compute), sorted(begins)


def is_nccl(kernel: str) -> bool:
    return any(name in kernel.lower() for name in NCCL_KERNELS)


def main() -> int:
    """Prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    backend = parser.parse_args().backend
    if not torch.cuda.is_available():
        print("no GPU that torch can use on this machine; hint: this benchmark needs one", file=sys.stderr)
        return 2
    records: list[StepRecord] = []
    comm, compute, begins = train(backend, records)
    ours, theirs = [], []
    for record, begin, end in zip(records[1:-1], begins[1:], begins[2:], strict=False):
        while not record.settled():
            session._session.recorder.gpu.poll()
            time.sleep(0.01)
        overlap = figures(record.message(0, 0)).overlap
        inside = intersect(comm, [(begin, end)])
        if overlap is not None and inside:
            ours.append(100 * overlap)
            theirs.append(100 * total(intersect(inside, compute)) / total(inside))
    code = 0
    if dist.get_rank() == 0:
        if not ours:
            print("no step with communication was seen by both: no overlap to compare")
            code = 1
        else:
            differences = [a - b for a, b in zip(ours, theirs, strict=True)]
            off = statistics.median(differences)
            rows = [[f"{statistics.median(v):.1f}" for v in (ours, theirs)] + [f"{off:+.1f}", str(len(ours))]]
            print(f"{torch.cuda.get_device_name()}, {backend}, {dist.get_world_size()} ranks")
            print("\n".join(table(["ddpwatch %", "torch.profiler %", "difference", "steps"], rows)))
            code = int(abs(off) > WITHIN_POINTS)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
