"""How often `ddpwatch compare` finds a difference that is not there, and how often one that is.

    python benchmarks/compare_aa.py                 made-up runs, with correlated noise and outliers
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/compare_aa.py real        a real job

The made-up runs take about two minutes, the real job about four. No budget; docs/recordings.md has the results.

The real job trains in short runs one after the other: two as they are, then one that sleeps for 5 % of the step time in
every forward, over and over. Each run is compared with the one before it: the first two should be called the same, the
third slower. Runs that alternate within one job are how to measure on a machine that is not quiet: what disturbs it
disturbs both kinds. Differences between two starts of one job are not part of these figures.

The columns, made-up:
    noise                   how much of a step's noise the next step keeps
    A/A called different    of pairs of equal runs
    found: N %              of pairs in which the second run is that much slower
The columns, real:
    different               how many pairs were called slower or faster
    median, all             the ratios found
    interval                half the width of their 95 % intervals, median
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.compare import Difference, RunSeries, compare
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.text import table
from ddpwatch.export.tables import steps_of
from ddpwatch.recording.reader import Recording
from tests.support.rounds import Rounds, rounds_done

PAIRS = 50
NOISE = {"independent": 0.0, "keeps 0.5": 0.5, "keeps 0.8": 0.8, "keeps 0.9": 0.9}
LENGTHS = (60, 300, 1000)
SLOWER = (1.0, 1.02, 1.05, 1.10)
WARM_UP_STEPS, SLEEP_SHARE = 50, 0.05
RUNS_PER_ROUND = 3  # plain, plain, slower
DIFFERENT = ("slower", "faster")


# -- made-up runs --------------------------------------------------------------------------------------------


def made_up(name: str, seed: int, steps: int, kept: float, slower: float) -> RunSeries:
    """A run of 100 ms steps with 4 % noise, of which the next step keeps a share; one step in 50 takes 50 ms more."""
    dice, level, run = random.Random(seed), 0.0, RunSeries(name)
    fresh = (1 - kept**2) ** 0.5
    for _ in range(steps):
        level = kept * level + fresh * dice.gauss(0, 2)
        value = (100 + level + dice.gauss(0, 3) + (50 if dice.random() < 0.02 else 0)) * slower
        run.step.append(value)
        for phase in PHASES:
            run.phases[phase].append(value / len(PHASES))
    return run


def called_different(pairs: int, steps: int, kept: float, slower: float) -> str:
    """How many pairs of runs are called different."""
    verdicts = [
        compare(made_up("A", seed, steps, kept, 1.0), made_up("B", 10_000 + seed, steps, kept, slower)).verdict
        for seed in range(pairs)
    ]
    return f"{sum(verdict in DIFFERENT for verdict in verdicts)}/{pairs}"


def simulated(rounds: Rounds, pairs: int) -> None:
    """Compares made-up runs and prints the table; a round is one of its rows."""
    kinds = list(product(NOISE.items(), LENGTHS))
    rows = [
        [noise, str(steps), *(called_different(pairs, steps, kept, slower) for slower in SLOWER)]
        for (noise, kept), steps in rounds.over(kinds, "rows")
    ]
    header = ["noise", "steps", "A/A called different", *(f"found: {100 * (s - 1):.0f} %" for s in SLOWER[1:])]
    print("\n".join(table(header, rows)))
    print(f"{rounds_done(len(rows), len(kinds), 'row')}, {pairs} pairs for each figure")


# -- real runs -----------------------------------------------------------------------------------------------


def train(file: Path, rounds: Rounds, pairs: int, steps: int) -> None:
    """Trains and records the job: rounds of three runs of ``steps`` steps, of which the third is slower."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import ddpwatch

    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(64, 256)

    def step(sleep_s: float) -> float:
        start = time.perf_counter()
        time.sleep(sleep_s)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    with ddpwatch.watch(model, record=file):
        usual = torch.tensor(median([step(0.0) for _ in range(WARM_UP_STEPS)]))
        dist.broadcast(usual, 0)
        sleep_s = SLEEP_SHARE * float(usual)
        for _ in rounds.over(range(pairs), "pairs"):
            for sleep in (0.0, 0.0, sleep_s):
                for _ in range(steps):
                    step(sleep)


def runs_of(file: Path, steps: int) -> Iterator[RunSeries]:
    """The recorded job's complete runs, in order."""
    run: list[StepAcrossRanks] = []
    for number, across in enumerate(sorted(steps_of(Recording(file)), key=lambda one: one.step)):
        if across.step >= WARM_UP_STEPS:
            run.append(across)
        if len(run) == steps:
            yield series(f"steps to {number}", run)
            run = []


def series(name: str, run: list[StepAcrossRanks]) -> RunSeries:
    """A run as `compare` takes it."""
    found = RunSeries(name)
    for across in run:
        found.add_step(across)
    return found


def summary(found: list[Difference]) -> list[str]:
    """The cells of one kind of pairs: the verdicts, and what was found."""
    counts = Counter(difference.verdict for difference in found)
    ratios = sorted(difference.ratio for difference in found if difference.ratio is not None)
    widths = [(d.high - d.low) / 2 for d in found if d.high is not None and d.low is not None]
    return [
        ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()),
        f"{sum(difference.verdict in DIFFERENT for difference in found)}/{len(found)}",
        f"{100 * median(ratios):+.1f} %", f"{100 * ratios[0]:+.1f} to {100 * ratios[-1]:+.1f} %",
        f"±{100 * median(widths):.1f} %",
    ]  # fmt: skip


def real(rounds: Rounds, pairs: int, steps: int) -> None:
    """Trains; then rank 0 compares the runs and prints the table."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "runs.mcap"
        train(file, rounds, pairs, steps)
        if dist.get_rank() == 0:
            wait_until_complete(file)
            show(list(runs_of(file, steps)), pairs, steps)


def show(runs: list[RunSeries], pairs: int, steps: int) -> None:
    """Prints the table."""
    plain, again, slower = (runs[place::RUNS_PER_ROUND] for place in range(RUNS_PER_ROUND))
    if slower:
        equal = [compare(a, b) for a, b in zip(plain, again, strict=False)]
        different = [compare(a, b) for a, b in zip(again, slower, strict=False)]
        rows = [[f"A/A, {steps} steps", *summary(equal)], ["A/B, 5 % slept", *summary(different)]]
        print("\n".join(table(["pairs", "verdicts", "different", "median", "all", "interval"], rows)))
        print(f"step: {median(value for run in plain for value in run.step):.1f} ms")
    print(rounds_done(len(slower), pairs, "pair"))


def wait_until_complete(file: Path) -> None:
    """Waits for the collector, which ends after the job."""
    if not file.exists():
        raise SystemExit("the job was not recorded; hint: see its warnings above")
    while not Recording(file).parts[0].index.complete:
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=["made-up", "real"], default="made-up", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="of a run of the real job (default: %(default)s)")
    args = parser.parse_args()
    if args.kind == "made-up":
        with Rounds() as rounds:
            simulated(rounds, args.pairs)
        return
    if "RANK" not in os.environ:
        sys.exit("a real job needs a process group; hint: start it with torchrun, as --help shows")
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with Rounds.of_job() as rounds:
        real(rounds, args.pairs, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
