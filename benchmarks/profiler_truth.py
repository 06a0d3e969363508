"""Whether torch.profiler saw what ddpwatch saw: both watch the same steps of the same job.

    torchrun --standalone --nproc-per-node=2 benchmarks/profiler_truth.py

For every step, the begin and end of each span on the profiler's clock is set against ours, and so is the overlap that
HolisticTraceAnalysis's formula gives from the profiler's events alone. A difference is "ours − the profiler's".
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

os.environ["DDPWATCH_STEPS"] = "full"

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ddpwatch
from ddpwatch.analysis.intervals import Intervals, intersect, total, union
from ddpwatch.analysis.step import figures
from ddpwatch.messages import Step
from ddpwatch.probe import session
from ddpwatch.probe.recorder import StepRecord
from ddpwatch.report.format import table

STEPS, WARM = 40, 20
LAYERS, WIDTH, BATCH = 24, 512, 128
Events = dict[str, list[tuple[int, int]]]


def under_both(
    ddp: DistributedDataParallel,
    data: torch.Tensor,
    activities: list[ProfilerActivity],
    records: list[StepRecord],
    finish: Callable[[], None] = lambda: None,
) -> profile:
    """Trains with ddpwatch and the profiler both watching the last steps; ``finish`` is the last thing profiled."""
    ddpwatch.watch(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def step() -> None:
        ddp(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    recorder = session._session.recorder
    emit = recorder._emit
    recorder._emit = lambda record: (records.append(record), emit(record))
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        finish()
    step()  # closes the last step
    return profiler


def train(records: list[StepRecord]) -> Events:
    """The profiler's events of the reference job by name, in ns of the monotonic clock."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4)
    profiler = under_both(ddp, torch.randn(BATCH, WIDTH), [ProfilerActivity.CPU], records)
    zero = profiler.profiler.kineto_results.trace_start_ns() - time.time_ns() + time.monotonic_ns()
    found: Events = defaultdict(list)
    for event in profiler.events():
        name = "backward" if event.name.startswith("autograd::engine::evaluate_function") else event.name
        span = event.time_range
        found[name].append((zero + round(span.start * 1000), zero + round(span.end * 1000)))
    return {name: sorted(spans) for name, spans in found.items()}


def sent(record: StepRecord) -> Step:
    """The record's frame, once the sender thread has made it."""
    while record.later or not record.settled():
        time.sleep(0.01)
    return record.message(0, 0)


def within(spans: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The spans that begin in a stretch."""
    starts = [start for start, _ in spans]
    return spans[bisect_left(starts, begin) : bisect_left(starts, end)]


def compare(step: Step, events: Events, differences: defaultdict[str, list[float]]) -> None:
    """Notes what differs in one step, in ms; the first is ours."""

    def note(what: str, ours: float, theirs: float) -> None:
        differences[what].append((ours - theirs) / 1e6)

    begin, end = step.start_ns, step.start_ns + step.duration_ns
    spans = {span.phase: (begin + span.start, begin + span.end) for span in step.spans}
    (forward,) = within(events["DistributedDataParallel.forward"], begin - 1_000_000, end)[-1:]
    backward = within(events["backward"], forward[1], end)
    (optimizer,) = within(events["Optimizer.step#SGD.step"], begin + 1_000_000, end)[-1:]
    launches = within(events["c10d::allreduce_"], forward[1], end)
    collectives = within(events["gloo:all_reduce"], forward[1], end)
    assert len(launches) == len(collectives) == len(step.bucket_launch), "not the same collectives"
    note("forward begin", spans["forward"][0], forward[0])
    note("forward end", spans["forward"][1], forward[1])
    note("backward compute begin", spans["backward"][0], backward[0][0])
    note("backward compute end", spans["backward"][1], max(stop for _, stop in backward))
    note("optimizer begin", spans["optimizer"][0], optimizer[0])
    note("optimizer end", spans["optimizer"][1], optimizer[1])
    for ours, (theirs, _) in zip(step.bucket_launch, launches, strict=True):
        note("bucket launch", begin + ours, theirs)
    done = [at for at in step.bucket_done if at is not None]
    for ours, (_, theirs) in zip(sorted(done), sorted(collectives, key=lambda span: span[1]), strict=True):
        note("bucket done", begin + ours, theirs)
    compute = union([forward, (backward[0][0], max(stop for _, stop in backward))])
    comm: Intervals = union((at, stop) for (at, _), (_, stop) in zip(launches, collectives, strict=True))
    overlap = figures(step).overlap
    assert overlap is not None
    differences["overlap (points)"].append(100 * (overlap - total(intersect(comm, compute)) / total(comm)))


def main() -> int:
    """Prints the table on rank 0."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    records: list[StepRecord] = []
    events = train(records)
    differences: defaultdict[str, list[float]] = defaultdict(list)
    steps = [sent(record) for record in records][1:-1]  # whole ones
    for step in steps:
        compare(step, events, differences)
    if dist.get_rank() == 0:
        rows = []
        for what, values in differences.items():
            size = sorted(abs(value) for value in values)
            row = [statistics.median(values), statistics.median(size), size[int(0.95 * len(size))], size[-1]]
            rows.append([what, str(len(values)), *(f"{value:.3f}" for value in row)])
        step_ms = statistics.median(step.duration_ns for step in steps) / 1e6
        print(f"{len(steps)} steps of {step_ms:.0f} ms; differences in ms, overlap in points")
        print("\n".join(table(["", "compared", "p50", "|p50|", "|p95|", "|max|"], rows)))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
