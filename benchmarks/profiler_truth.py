"""Checks whether ddpwatch's stamps agree with torch.profiler's: both watch the same steps of the same job.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 benchmarks/profiler_truth.py [--strategy fsdp2] [--batch 128]

Takes one to two minutes. A larger batch adds compute to a step, and no communication. Budget: stamps within 0.1 ms,
overlap within a percentage point, and of a job with FSDP2 the exposed time within a percentage point of the step.

For every step, the start and the end of each span are compared, and so is the overlap, which HolisticTraceAnalysis's
formula gives from the profiler's events alone. A difference is ddpwatch's value minus the profiler's. FSDP2 gathers
asynchronously here; in the profiler's events, it waits for a gather from the start of its copy-out to the gather's end.
A reduce-scatter blocks: it lasts, and is waited for, until the training thread has copied this rank's part out of the
result (Gloo's own event is of the all-reduce before that, and ``wait`` copies). By these events, a thread that
has no core, or not the GIL, when the result is there waits no longer; ddpwatch sees it wait until it goes on.

The columns:
    compared            how many stamps
    p50                 the median difference, in ms (overlap: in points)
    |p50| |p95| |max|   quantiles of its absolute value
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter

os.environ["DDPWATCH_DETAIL"] = "full"

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ddpwatch
from ddpwatch.analysis.step import figures
from ddpwatch.common.intervals import Intervals, intersect, total, union
from ddpwatch.common.text import table
from ddpwatch.probe import session
from ddpwatch.probe.record import StepRecord
from ddpwatch.wire.messages import Step
from tests.support.rounds import Rounds, rounds_done

STEPS, WARM_UP_STEPS = 100, 20
LAYERS, WIDTH = 24, 512
BATCH = {"ddp": 128, "fsdp2": 512}  # its 36 collectives need more compute beside them
Events = dict[str, list[tuple[int, int]]]
COPIES = "copies by the training thread"
Differences = defaultdict[str, list[float]]


def under_both(
    ddp: nn.Module,
    data: torch.Tensor,
    activities: list[ProfilerActivity],
    records: list[StepRecord],
    rounds: Rounds,
    steps: int = STEPS,
    finish: Callable[[], None] = lambda: None,
) -> profile:
    """Trains with ddpwatch, and after a warm-up with the profiler as well.

    Args:
        ddp: The model.
        data: A batch.
        activities: What the profiler records.
        records: Receives ddpwatch's record of every profiled step.
        rounds: Ends the steps early on a signal.
        steps: How many to profile.
        finish: The last call that is profiled.
    """
    ddpwatch.watch(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def step() -> None:
        ddp(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    assert session.current is not None
    recorder = session.current.recorder
    emit = recorder._emit

    def noted(record: StepRecord) -> None:
        records.append(record)
        emit(record)

    recorder._emit = noted
    with profile(activities=activities) as profiler:
        for _ in rounds.over(range(steps), "profiled steps"):
            step()
        finish()
    step()  # closes the last step
    return profiler


def with_ddp() -> nn.Module:
    """The reference job's model."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4)


def with_fsdp2() -> nn.Module:
    """The same layers, two to a parameter group."""
    pairs: list[list[nn.Module]] = [
        [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())] for _ in range(LAYERS // 2)
    ]
    blocks = [nn.Sequential(*pair) for pair in pairs]
    for block, following in pairwise([fully_shard(block) for block in blocks]):  # in place
        block.set_modules_to_forward_prefetch([following])
    model = nn.Sequential(*blocks)
    fully_shard(model)._set_unshard_async_op(True)
    return model


def train(model: nn.Module, batch: int, records: list[StepRecord], rounds: Rounds, steps: int) -> Events:
    """The profiler's events of the reference job by name, in ns of the monotonic clock."""
    profiler = under_both(model, torch.randn(batch, WIDTH), [ProfilerActivity.CPU], records, rounds, steps)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    zero = profiler.profiler.kineto_results.trace_start_ns() - time.time_ns() + time.monotonic_ns()
    found: Events = defaultdict(list)
    training = next(event.thread for event in profiler.events() if event.name.startswith("Optimizer.step"))
    for event in profiler.events():
        name = "backward" if event.name.startswith("autograd::engine::evaluate_function") else event.name
        span = event.time_range
        found[name].append((zero + round(span.start * 1000), zero + round(span.end * 1000)))
        if event.thread == training and name == "aten::copy_":
            found[COPIES].append(found[name][-1])
    return {name: sorted(spans) for name, spans in found.items()}


def sent(record: StepRecord) -> Step:
    """The record's message, once the sender thread has completed it."""
    while record.later or not record.settled():
        time.sleep(0.01)
    return record.message(0, 0)


def within(spans: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The spans that start in an interval."""
    first, last = (bisect_left(spans, at, key=itemgetter(0)) for at in (start, end))
    return spans[first:last]


def compare(step: Step, events: Events, differences: Differences) -> None:
    """Adds the differences in one step, in ms."""

    def note(what: str, watched_ns: float, profiled_ns: float) -> None:
        differences[what].append((watched_ns - profiled_ns) / 1e6)

    start, end = step.start_ns, step.start_ns + step.duration_ns
    spans = {span.phase: (start + span.start, start + span.end) for span in step.spans}
    (forward,) = within(events["DistributedDataParallel.forward"], start - 1_000_000, end)[-1:]
    backward = within(events["backward"], forward[1], end)
    (optimizer,) = within(events["Optimizer.step#SGD.step"], start + 1_000_000, end)[-1:]
    launches = within(events["c10d::allreduce_"], forward[1], end)
    collectives = within(events["gloo:all_reduce"], forward[1], end)
    assert len(launches) == len(collectives) == len(step.comm_launch), "not the same collectives"
    note("forward start", spans["forward"][0], forward[0])
    note("forward end", spans["forward"][1], forward[1])
    note("backward compute start", spans["backward"][0], backward[0][0])
    note("backward compute end", spans["backward"][1], max(stop for _, stop in backward))
    note("optimizer start", spans["optimizer"][0], optimizer[0])
    note("optimizer end", spans["optimizer"][1], optimizer[1])
    for watched, (profiled, _) in zip(step.comm_launch, launches, strict=True):
        note("bucket launch", start + watched, profiled)
    done = [at for at in step.comm_done if at is not None]
    for watched, profiled in zip(sorted(done), sorted(stop for _, stop in collectives), strict=True):
        note("bucket done", start + watched, profiled)
    compute = union([forward, (backward[0][0], max(stop for _, stop in backward))])
    comm: Intervals = union((at, stop) for (at, _), (_, stop) in zip(launches, collectives, strict=True))
    overlap = figures(step).overlap
    assert overlap is not None
    differences["overlap (points)"].append(100 * (overlap - total(intersect(comm, compute)) / total(comm)))


def compare_sharded(step: Step, events: Events, differences: Differences) -> None:
    """The same for a step with FSDP2: the times of its collectives, their overlap and what is exposed of them."""
    start, end = step.start_ns, step.start_ns + step.duration_ns
    gathers = within(events["c10d::_allgather_base_"], start, end)
    gathered = within(events["gloo:all_gather"], start, end)
    reductions = within(events["c10d::_reduce_scatter_base_"], start, end)
    inner = within(events["gloo:all_reduce"], start, end)
    reduced = [within(events[COPIES], stop, end)[0] for _, stop in inner]
    assert len(gathers) == len(gathered) == step.comm_op.count("all_gather"), "not the same all-gathers"
    assert len(reductions) == len(reduced) == step.comm_op.count("reduce_scatter"), "not the same reduce-scatters"
    launches = sorted(at for at, _ in gathers + reductions)
    for watched, profiled in zip(step.comm_launch, launches, strict=True):
        differences["launch"].append((start + watched - profiled) / 1e6)
    done = sorted(start + at for at in step.comm_done if at is not None)
    for watched, profiled in zip(done, sorted(stop for _, stop in gathered + reduced), strict=True):
        differences["done"].append((watched - profiled) / 1e6)
    flights = [(at, stop) for (at, _), (_, stop) in zip(gathers + reductions, gathered + reduced, strict=True)]
    waits_from = [*copies_out(events, start, end), *(at for at, _ in reductions)]
    waits = union((at, stop) for at, (_, stop) in zip(waits_from, flights, strict=True))
    comm, figure = union(flights), figures(step)
    exposed = total(intersect(comm, waits))
    assert figure.exposed_ns is not None
    assert figure.overlap is not None
    differences["exposed (ms)"].append((figure.exposed_ns - exposed) / 1e6)
    differences["exposed (points of the step)"].append(100 * (figure.exposed_ns - exposed) / step.duration_ns)
    differences["overlap (points)"].append(100 * (figure.overlap - 1 + exposed / total(comm)))


def copies_out(events: Events, start: int, end: int) -> list[int]:
    """When the copy-out of each all-gather starts, in the order in which these were launched."""
    pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for name in [name for name in events if name.startswith("FSDP::all_gather (")]:
        copied = within(events[name.replace("all_gather", "all_gather_copy_out")], start, end)
        pairs += zip(within(events[name], start, end), copied, strict=True)
    return [copied for _, (copied, _) in sorted(pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="to compare (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="samples in a rank's batch (default: 128, with fsdp2 512)")
    parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp", help="default: %(default)s")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    records: list[StepRecord] = []
    differences: Differences = defaultdict(list)
    with Rounds.of_job() as rounds:
        torch.manual_seed(0)
        model, check = (with_ddp, compare) if args.strategy == "ddp" else (with_fsdp2, compare_sharded)
        batch = args.batch or BATCH[args.strategy]
        events = train(model(), batch, records, rounds, args.steps)
        steps = [sent(record) for record in records][1:-1]  # the profiler saw these from start to end
        for step in steps:
            check(step, events, differences)
        if dist.get_rank() == 0:
            show(steps, differences, args.steps - 1)
    dist.destroy_process_group()


def show(steps: list[Step], differences: Differences, planned: int) -> None:
    """Prints the table."""
    rows = []
    for what, values in differences.items():
        size = sorted(abs(value) for value in values)
        row = [statistics.median(values), statistics.median(size), size[int(0.95 * len(size))], size[-1]]
        rows.append([what, str(len(values)), *(f"{value:.3f}" for value in row)])
    if steps:
        step_ms = statistics.median(step.duration_ns for step in steps) / 1e6
        print(f"steps of {step_ms:.0f} ms; differences in ms, overlap in points")
        print("\n".join(table(["", "compared", "p50", "|p50|", "|p95|", "|max|"], rows)))
    print(rounds_done(len(steps), planned, "step"))


if __name__ == "__main__":
    main()
