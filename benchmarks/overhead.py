"""Measures what watching costs: the same job with and without ddpwatch in one run, block by block.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/overhead.py [--rounds 128] [--steps 16]
        [--attached] [--details] [--step-ms 100] [--strategy fsdp2]

Takes about 15 minutes on two cores. ``DDPWATCH_DETAIL=high`` in the environment times nearly every step in full.
Budget: at most 0.3 % of a step while nobody looks.

``--attached`` adds a variant: a dashboard is attached, and watching may cost 1 %. A viewer process reads the stream and
holds the lease during the whole run, but only this variant's blocks sample by it. ``--details`` adds a variant for each
detail that somebody may choose.

The reference step has 300 parameters in about 25 buckets and takes 100 ms; ``--step-ms`` takes a smaller one, of which
torch.profiler's share is another, and fewer steps are watched: give more ``--rounds``. ``--strategy fsdp2`` shards the
same layers into 25 parameter groups. Each rank is bound to one core, as launchers bind them, which halves the noise.
All variants train the same module, because the addresses of two modules alone make up to 1 % of difference: what a
variant adds is attached before a block of steps and detached after it. The order of the blocks changes with every
round, and each block is compared with the plain blocks of its round, so that a noisy machine disturbs all variants
equally.

The columns:
    step ms (p50)     a step, by the clock
    duration          what the variant adds to that, whatever the cause: also the collector's use of the ranks' cores
    CPU time          what the variant adds to the CPU time of the rank's process, its sender thread and its share of
                      the collector included
    95 % interval     of the column before it (`paired.hodges_lehmann`)

"plain again" against "plain" is the noise floor. What the collector takes while no step is watched, in every block, is
no part of the cost, but is printed below. The last tables are ddpwatch's own figure for the same run: the difference
between its full, light and bare steps, what it has sampled, and the resulting cost (`ddpwatch.sampling.cost`).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.profiler import ProfilerActivity, profile

import ddpwatch
from ddpwatch.common.text import table
from ddpwatch.probe import session
from ddpwatch.probe.ddp import DdpProbe
from ddpwatch.probe.fsdp import _COMMS, FsdpProbe
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.sharded_comm import TimedComm
from ddpwatch.run import rundir
from ddpwatch.sampling.cost import CostMeter
from ddpwatch.sampling.lease import DETAILS, Lease
from ddpwatch.sampling.levels import FULL, LEVELS
from ddpwatch.wire.messages import Step, StepStatus
from tests.support.paired import Estimate, hodges_lehmann, ratios
from tests.support.rounds import Rounds, rounds_done

WIDTH = 128
SIZES = {1.5: (2, 128), 10: (15, 512), 100: (150, 512)}  # layers and batch, by the milliseconds that a step takes
WARM_UP_STEPS = 64  # in which ddpwatch finds its sampling schedule
GROUPS = 25  # of parameters, with FSDP2
PLAIN_WARM_UP_STEPS = 12  # which rebuild the buckets and fill the caches

PLAIN = ("plain", "plain again")
WATCHED, ATTACHED, PROFILED = "ddpwatch", "ddpwatch, attached", "torch.profiler, always on"
CHOSEN = ("normal", "high")  # details beyond that of a job by itself
VIEWER = """
import sys
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.sampling.lease import NORMAL_PPM
source = LiveSource(sys.argv[1], NORMAL_PPM)
while True:
    source.read(0.5)
"""

Variant = Callable[[nn.Module], AbstractContextManager[None]]
Note = tuple[int, StepStatus, int, int, int, int | None]  # step, status, start, end, own ns, CPU ns


class Sample(NamedTuple):
    """Seconds per step: by the clock; of CPU time of this process and its share of the collector's; of that share."""

    wall: float
    cpu: float
    collector: float


class Comparison(NamedTuple):
    """A variant against the plain job; of each, one sample per round."""

    variant: str
    planned: int
    samples: dict[str, list[Sample]]

    @property
    def done(self) -> int:
        """The rounds that took place."""
        return len(self.samples[PLAIN[0]])

    def added(self, name: str, column: str) -> Estimate:
        """What a variant adds, as a share of its rounds' plain blocks; these are compared with each other."""
        values, first, second = ([getattr(value, column) for value in self.samples[key]] for key in (name, *PLAIN))
        reference = first if name in PLAIN else [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        return hodges_lehmann([ratio - 1 for ratio in ratios(values, reference)])


def with_ddp(layers: list[nn.Module]) -> nn.Module:
    """The layers in about 25 buckets."""
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.4)


def with_fsdp2(layers: list[nn.Module]) -> nn.Module:
    """The layers in `GROUPS` parameter groups."""
    size = math.ceil(len(layers) / GROUPS)
    model = nn.Sequential(*[nn.Sequential(*layers[at : at + size]) for at in range(0, len(layers), size)])
    for module in (*model, model):
        fully_shard(module)  # in place
    return model


STRATEGIES = {"ddp": with_ddp, "fsdp2": with_fsdp2}


class Job:
    """The reference job on this rank."""

    def __init__(self, step_ms: float, strategy: str) -> None:
        torch.manual_seed(0)
        self.collector_s: Callable[[], float] = float
        count, batch = SIZES[step_ms]
        layers: list[nn.Module] = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = STRATEGIES[strategy](layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.data = torch.randn(batch, WIDTH)

    def block(self, variant: Variant, steps: int) -> Sample:
        """Trains some steps, which all ranks start together; the mean step."""
        with variant(self.model):
            dist.barrier()
            start, cpu, collector = time.perf_counter(), time.process_time(), self.collector_s()
            for _ in range(steps):
                self.model(self.data).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            wall, cpu, collector = (
                time.perf_counter() - start,
                time.process_time() - cpu,
                self.collector_s() - collector,
            )
            share = collector / dist.get_world_size() / steps
            return Sample(wall / steps, cpu / steps + share, share)


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Adds nothing."""
    yield


class Granted(Lease):
    """A lease that grants this budget (ppm of a step) all the time."""

    def __init__(self, ppm: int) -> None:
        super().__init__()
        self._ppm = ppm

    def budget_ppm(self, slot: int, now: int) -> int:
        return self._ppm


class Watched:
    """Attaches ddpwatch and detaches it: without its hooks on forward and optimizer the rest never runs.

    Attributes:
        lease: The job's.
        notes: What `CostMeter` needs of each step, by the name of the variant in whose block the step was closed.
    """

    def __init__(self, model: nn.Module) -> None:
        ddpwatch.watch(model)
        assert session.current is not None
        self._recorder = session.current.recorder
        self.lease = self._recorder.lease
        self.leases = {WATCHED: Lease(), ATTACHED: self.lease, **{name: Granted(DETAILS[name]) for name in CHOSEN}}
        self.notes: dict[str, list[Note]] = {name: [] for name in self.leases}
        (probe,) = session.current._probes
        assert isinstance(probe, (FsdpProbe, DdpProbe))
        self._switch = FsdpSwitch(probe).turn if isinstance(probe, FsdpProbe) else partial(turn_ddp, probe, model)
        module_hooks = model._forward_pre_hooks, model._forward_hooks
        registries: tuple[Any, ...] = *module_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks
        self._hooks = [(registry, dict(registry)) for registry in registries]
        self._detach()

    def variant(self, name: str) -> Variant:
        """Attaches it for one block; the variant that nobody looks at does so without the lease."""
        return partial(self._block, self.leases[name], self.notes[name])

    def granted(self) -> bool:
        """Whether all ranks sample by the lease by now."""
        ppm = self.lease.budget_ppm(self._recorder.steps, time.monotonic_ns())
        dist.all_reduce(least := torch.tensor(ppm), dist.ReduceOp.MIN)
        return bool(least)

    def note_steps(self) -> None:
        """Collects notes from now on, and no more: this code runs in the steps that are measured."""
        emit = self._recorder._emit

        def noted(record: StepRecord) -> None:
            emit(record)
            self._notes += notes_of(record)

        self._recorder._emit = noted

    @contextmanager
    def _block(self, lease: Lease, notes: list[Note], model: nn.Module) -> Iterator[None]:
        self._recorder.lease, self._notes = lease, notes
        self._recorder.saved()  # the blocks in between are no part of the step that starts
        for registry, hooks in self._hooks:
            registry.update(hooks)
        self._switch(True)
        yield
        self._recorder._end_stretch()  # its steps are this block's
        self._detach()
        self._recorder.lease = self.lease

    def _detach(self) -> None:
        for registry, hooks in self._hooks:
            for key in hooks:
                del registry[key]
        self._switch(False)


def notes_of(record: StepRecord) -> list[Note]:
    """The notes of a record's steps: several, if it is of a stretch of bare steps."""
    numbers, starts, ends = range(record.step, record.step + record.steps), (record.start, *record.ends), record.ends
    own_ns = record.own_ns // record.steps
    return [
        (number, record.status, start, end, own_ns, record.cpu_ns)
        for number, start, end in zip(numbers, starts, (*ends, record.end), strict=True)
    ]


def turn_ddp(probe: DdpProbe, ddp: nn.Module, on: bool) -> None:
    """Gives the reducer the module's own group back; the hooks exchange it by themselves."""
    if not on and probe.reducer_group is not None and isinstance(ddp, DistributedDataParallel):
        probe.reducer_group.switch(ddp, False)


class FsdpSwitch:
    """Exchanges FSDP2's communication objects, which ddpwatch stands in front of."""

    def __init__(self, probe: FsdpProbe) -> None:
        comms = [(group, name, getattr(group, name)) for group in probe._live() for name in _COMMS]
        self._timed = [(group, name, comm) for group, name, comm in comms if isinstance(comm, TimedComm)]

    def turn(self, on: bool) -> None:
        """Puts ddpwatch's there, or FSDP2's own."""
        for group, name, comm in self._timed:
            setattr(group, name, comm if on else comm.__wrapped__)


@contextmanager
def profiled(model: nn.Module) -> Iterator[None]:
    """Runs the block under torch.profiler."""
    with profile(activities=[ProfilerActivity.CPU]):
        yield


def bind(rank: int) -> None:
    """Binds every thread of this process to one core, a different one for each rank."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def viewer(wanted: bool) -> Iterator[None]:
    """Runs a viewer that asks for the default budget, on rank 0. Start it before `bind`: it has no core of its own."""
    if not wanted or dist.get_rank():
        yield
        return
    assert session.current is not None
    _, endpoint = rundir.endpoints(session.current.run_id)
    process = subprocess.Popen([sys.executable, "-c", VIEWER, endpoint], start_new_session=True)  # without our signals
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=16, help="steps in a block (default: %(default)s)")
    parser.add_argument("--attached", action="store_true", help="measure with a viewer attached, too")
    parser.add_argument("--details", action="store_true", help="measure with each detail, too")
    parser.add_argument("--step-ms", type=float, choices=SIZES, default=100, help="default: %(default)s")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp", help="default: %(default)s")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with Rounds.of_job() as rounds:
        chosen = [*([ATTACHED] if args.attached else []), *(CHOSEN if args.details else [])]
        measure(Job(args.step_ms, args.strategy), rounds, args.rounds, args.steps, chosen)
    dist.destroy_process_group()


def measure(job: Job, rounds: Rounds, count: int, steps: int, chosen: list[str]) -> None:
    """Trains all variants, then prints the tables on rank 0."""
    job.block(plain, PLAIN_WARM_UP_STEPS)
    watched, attached = Watched(job.model), ATTACHED in chosen
    with viewer(attached):
        bind(int(os.environ["LOCAL_RANK"]))
        job.block(watched.variant(ATTACHED), WARM_UP_STEPS)  # with the job's lease, until that has its page
        job.collector_s = collector_clock()
        while attached and not watched.granted():
            job.block(watched.variant(ATTACHED), steps)
        watched.note_steps()
        names = (WATCHED, *chosen)
        fewer = max(8, count // 8)
        kinds: tuple[tuple[dict[str, Variant], int], ...] = (
            ({name: watched.variant(name) for name in names}, count),
            ({PROFILED: profiled}, fewer),  # last, because profiling changes the process for good
        )
        comparisons = [take_turns(job, variants, planned, steps, rounds) for variants, planned in kinds]
    if dist.get_rank() == 0:
        show(comparisons, {name: watched.notes[name] for name in names}, steps)


def take_turns(job: Job, added: dict[str, Variant], count: int, steps: int, rounds: Rounds) -> Comparison:
    """Trains blocks of the variants and of the plain job, in an order that changes with every round."""
    variants = {**dict.fromkeys(PLAIN, plain), **added}
    name = next(iter(added))
    samples: dict[str, list[Sample]] = {each: [] for each in variants}
    order = random.Random(1)
    for _ in rounds.over(range(count), name):
        for each in order.sample(list(variants), len(variants)):
            samples[each].append(job.block(variants[each], steps))
    return Comparison(name, count, samples)


def collector_clock() -> Callable[[], float]:
    """Waits for the collector, and returns what reads its CPU time (s)."""
    assert session.current is not None
    while session.current.run_id not in (runs := {run.run_id: run.pid for run in rundir.live_runs()}):
        time.sleep(0.1)
    tasks = Path(f"/proc/{runs[session.current.run_id]}/task")
    return lambda: sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def show(comparisons: list[Comparison], notes: dict[str, list[Note]], steps: int) -> None:
    """Prints what was measured; ``notes`` are those of `Watched`."""
    for comparison in comparisons:
        if comparison.done:
            print("\n".join(compared(comparison)))
        print(f"{comparison.variant}: {rounds_done(comparison.done, comparison.planned)}, {steps} steps in a block\n")
    if all(comparison.done for comparison in comparisons):
        watched, profiled = comparisons
        print(profiler_against_ddpwatch(watched.added(WATCHED, "wall"), profiled.added(PROFILED, "wall")))
    for name, noted in notes.items():
        print("\n".join(own_figure(name, noted, steps)))


def compared(comparison: Comparison) -> list[str]:
    """A table of the variant and of the plain job."""
    rows = []
    for name, values in comparison.samples.items():
        row = [name, f"{1000 * statistics.median(value.wall for value in values):.1f}"]
        for column in ("wall", "cpu"):
            value, low, high = (100 * share for share in comparison.added(name, column))
            row += [f"{value:+.2f} %", f"{low:+.2f} … {high:+.2f}"]
        rows.append(row)
    found = table(["", "step ms (p50)", "duration", "95 % interval", "CPU time", "95 % interval"], rows)
    idle = [value.collector / value.wall for name in PLAIN for value in comparison.samples[name]]
    return [*found, f"the collector while no step is watched: {100 * statistics.fmean(idle):.2f} % of each rank's time"]


def profiler_against_ddpwatch(watched: Estimate, profiled: Estimate) -> str:
    """How many times as much the profiler adds; at least so many, by the ends of the two intervals."""
    if watched.high <= 0:
        return "ddpwatch added nothing measurable: there is no ratio to torch.profiler"
    times = f"{profiled.value / watched.value:.0f}" if watched.value > 0 else "any number of"
    least = math.floor(profiled.low / watched.high)
    return f"torch.profiler adds {times} times what ddpwatch adds, at least {least} times"


def own_figure(name: str, notes: list[Note], steps: int) -> list[str]:
    """A table of what the dashboard and the report would show for these blocks.

    The last step of a block ends when the next block of its kind starts, and others have trained in between: it counts
    as aborted.
    """
    meter, own = CostMeter(), []
    for number, (step, status, start, end, own_ns, cpu_ns) in enumerate(notes):
        last = number % steps == 0  # the first note is of the last step of the block before
        meter.add_step(
            Step(
                rank=0, step=step, status="aborted" if last else status, start_ns=start, duration_ns=end - start,
                own_ns=own_ns, cpu_ns=cpu_ns,
            )
        )  # fmt: skip
        if status == FULL:
            own.append(own_ns)
    cost, levels = meter.cost(), Counter(note[1] for note in notes)
    rows = [
        [f"{more} step − {less} step (ms of CPU time)", f"{known.interval()[0] / 1e6:.2f} of {known.count}"]
        for (less, more), known in meter.differences.items()
    ]
    if own:
        rows += [["own cost of a full step, as its hooks measure it (ms)", f"{statistics.median(own) / 1e6:.2f}"]]
    rows += [[f"{level} steps", f"{100 * levels[level] / max(1, len(notes)):.1f} %"] for level in reversed(LEVELS)]
    shown = "–, too few comparisons; hint: more --rounds"
    if cost is not None:
        shown = f"{100 * cost.ratio:.2f} % ({100 * cost.low:.2f} … {100 * cost.high:.2f})"
    return table([f"{name}: its own figure", ""], [*rows, ["cost of watching", shown]])


if __name__ == "__main__":
    main()
