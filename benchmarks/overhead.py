"""What watching costs: the same job with and without, block by block in one run, as ratios with their intervals.

    torchrun --standalone --nproc-per-node=2 benchmarks/overhead.py
    DDPWATCH_STEPS=all torchrun …  (with every step watched; few: with fewer than usual)

The reference step has 300 parameters in about 25 buckets and takes 100 ms. Each rank is bound to a core of its own, as
launchers bind them (it halves the noise). All ways to train share one DDP module (where two lie in memory makes up to
1 % between them): what a way adds is put on before a block of its steps and taken off after it. Blocks take turns in an
order that changes, and each is compared with the plain blocks of its round, so that a noisy machine is equally noisy to
all. `plain again` against `plain` is the noise floor. Of the rounds' ratios the table gives the middle and its 95 %
interval (`paired.middle`).

Besides the duration, which holds whatever else the machine does (also what the collector takes from the ranks' cores),
the CPU time of the rank's process is compared. The idle sender thread and collector are there in every block; they are
not in its cost.

The last table is what ddpwatch says about itself in the same run: the difference between its full, its shadow and its
unwatched steps, the share of full steps that it has chosen, and what that makes (`ddpwatch.sampling.cost`).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from paired import middle
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.profiler import ProfilerActivity, profile

import ddpwatch
from ddpwatch.messages import Step
from ddpwatch.probe import session
from ddpwatch.probe.recorder import StepRecord
from ddpwatch.report.format import table
from ddpwatch.sampling.cost import CostMeter

LAYERS, WIDTH, BATCH = 150, 128, 512
WARM_STEPS = 64  # ddpwatch finds its pace

PLAIN = ("plain", "plain again")
WATCHED, PROFILED = "ddpwatch", "torch.profiler, always on"

Way = Callable[[DistributedDataParallel], AbstractContextManager[None]]


class Sample(NamedTuple):
    """Seconds per step: by the clock, and of CPU time in this process."""

    wall: float
    cpu: float


class Job:
    """The reference job on this rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.4)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.data = torch.randn(BATCH, WIDTH)

    def block(self, way: Way, steps: int) -> Sample:
        """Trains in one way; what a step took on average, with all ranks starting together."""
        with way(self.ddp):
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                self.ddp(self.data).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            return Sample((time.perf_counter() - begin) / steps, (time.process_time() - cpu) / steps)


@contextmanager
def plain(ddp: DistributedDataParallel) -> Iterator[None]:
    """Nothing is added."""
    yield


class Watched:
    """ddpwatch, put on and taken off: its hooks on forward and optimizer are what all else hangs on."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        ddpwatch.watch(ddp)
        (self._probe,) = session._session._probes
        places = ddp._forward_pre_hooks, ddp._forward_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks
        self._hooks = [(hooks, dict(hooks)) for hooks in places]
        self._off(ddp)

    @contextmanager
    def __call__(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """Puts it on for a block."""
        for hooks, ours in self._hooks:
            hooks.update(ours)
        yield
        self._off(ddp)

    def _off(self, ddp: DistributedDataParallel) -> None:
        for hooks, ours in self._hooks:
            for key in ours:
                del hooks[key]
        self._probe.reducer_group.switch(ddp, False)


@contextmanager
def python_hooks(ddp: DistributedDataParallel) -> Iterator[None]:
    """A Python hook per parameter that does nothing but take the time."""

    def stamp(param: torch.Tensor) -> None:
        time.monotonic_ns()

    handles = [param.register_post_accumulate_grad_hook(stamp) for param in ddp.parameters()]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def profiled(ddp: DistributedDataParallel) -> Iterator[None]:
    """torch.profiler, always on."""
    with profile(activities=[ProfilerActivity.CPU]):
        yield


def bind() -> None:
    """Binds every thread of this process to one core, another one for each rank."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[int(os.environ["LOCAL_RANK"]) % len(cores)]
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def note_steps() -> list[tuple[Any, ...]]:
    """Notes of every step what its cost is told from. No more than that: it happens in the steps that are measured."""
    recorder = session._session.recorder
    emit, notes = recorder._emit, []

    def noted(record: StepRecord) -> None:
        emit(record)
        notes.append((record.step, record.status, record.start, record.end, record.own_ns, record.cpu_ns))

    recorder._emit = noted
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16, help="steps in a block")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    job = Job()
    job.block(plain, 12)  # DDP's warm-up and rebuild, caches
    watched = Watched(job.ddp)
    bind()
    job.block(watched, WARM_STEPS)
    notes = note_steps()
    tables = [
        take_turns(job, {**dict.fromkeys(PLAIN, plain), **ways}, rounds, args.steps)
        for rounds, ways in (
            (args.rounds, {WATCHED: watched}),
            (max(8, args.rounds // 8), {"a Python hook per parameter": python_hooks}),
            # The last: a process that has profiled once is not as before.
            (max(8, args.rounds // 8), {PROFILED: profiled}),
        )
    ]
    if dist.get_rank() == 0:
        for samples in tables:
            compare(samples)
            print()
        profiler_against_ddpwatch(added(tables[0], WATCHED, "wall"), added(tables[-1], PROFILED, "wall"))
        by_itself(notes, args.steps)
    dist.destroy_process_group()


def take_turns(job: Job, ways: dict[str, Way], rounds: int, steps: int) -> dict[str, list[Sample]]:
    """Blocks of each, in an order that changes with every round."""
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    order = random.Random(1)
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            samples[name].append(job.block(ways[name], steps))
    return samples


def compare(samples: dict[str, list[Sample]]) -> None:
    """Every way against the plain blocks of the same rounds; of these, the second against the first."""
    rows = []
    for name, values in samples.items():
        row = [name, f"{1000 * statistics.median(value.wall for value in values):.1f}"]
        for column in Sample._fields:
            row += ["{:+.2f} %|{:+.2f} … {:+.2f}".format(*(100 * share for share in added(samples, name, column)))]
        rows.append([cell for entry in row for cell in entry.split("|")])
    print("\n".join(table(["", "step ms (p50)", "duration", "95 % interval", "CPU time", "95 % interval"], rows)))


def added(samples: dict[str, list[Sample]], name: str, column: str) -> tuple[float, float, float]:
    """What a way adds, as a share of the plain blocks of the same rounds: the middle and its interval."""
    way, one, other = ([getattr(value, column) for value in samples[key]] for key in (name, *PLAIN))
    against = one if name in PLAIN else [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    return middle([value / plain - 1 for value, plain in zip(way, against, strict=True)])


def profiler_against_ddpwatch(watched: tuple[float, float, float], profiled: tuple[float, float, float]) -> None:
    """How many times as much the profiler takes; at least so many, by the ends of the two intervals."""
    if watched[2] <= 0:
        print("ddpwatch took nothing that could be told from zero: there is no ratio to torch.profiler")
        return
    times = f"{profiled[0] / watched[0]:.0f}" if watched[0] > 0 else "any number of"
    print(
        f"torch.profiler adds {times} times what ddpwatch adds, at least {math.floor(profiled[1] / watched[2])} times"
    )


def by_itself(notes: list[tuple[Any, ...]], steps: int) -> None:
    """What the dashboard and the report would say of this run.

    The last step of a block ends when the next block of its kind begins; others have trained in between.
    """
    meter, own = CostMeter(), []
    for number, (step, status, start, end, own_ns, cpu_ns) in enumerate(notes):
        last = number % steps == 0  # the first that was noted is the last of the block before
        meter.add(
            Step(
                rank=0, step=step, status="aborted" if last else status, start_ns=start, duration_ns=end - start,
                own_ns=own_ns, cpu_ns=cpu_ns,
            )
        )  # fmt: skip
        if status == "ok":
            own.append(own_ns)
    cost = meter.cost()
    if cost is None:
        print("too few unwatched steps to compare with; hint: more --rounds")
        return
    rows = [
        [f"{more} step − {less} one (ms of CPU time)", f"{known.interval()[0] / 1e6:.2f} of {known.count}"]
        for (less, more), known in meter.differences.items()
    ]
    rows += [
        ["a full step's cost as its hooks see it (ms)", f"{statistics.median(own) / 1e6:.2f}"],
        ["recorded in full", f"1 step in {1 / cost.full_share:.1f}"],
        ["watching costs", f"{100 * cost.ratio:.2f} % ({100 * cost.low:.2f} … {100 * cost.high:.2f})"],
    ]
    print("\n".join(table(["ddpwatch about itself", ""], rows)))


if __name__ == "__main__":
    main()
