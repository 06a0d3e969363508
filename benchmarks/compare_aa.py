"""How often does `ddpwatch compare` see a difference that is not there, and how often one that is?

    python benchmarks/compare_aa.py          made-up runs: noise that remembers the step before, outliers
    python benchmarks/compare_aa.py real     a job on two ranks (some minutes)

The real job trains in short runs one after the other, over and over: twice as it is, then with 5 % of its step time
slept away in every forward. A run is compared with the one right before it: two of one kind should be called the same,
the slower one should be found. Taking turns within one job is how to measure on a machine that is not quiet: what
disturbs it disturbs both kinds alike. That two starts of one job may differ is not in these figures.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.compare import Difference, RunSeries, compare
from ddpwatch.analysis.step import PHASES
from ddpwatch.export.tables import steps_of
from ddpwatch.recording.reader import Recording
from ddpwatch.report.format import table

PAIRS = 50
KINDS = {"independent": 0.0, "remembers half": 0.5, "remembers 0.8": 0.8, "remembers 0.9": 0.9}
LENGTHS = (60, 300, 1000)
SLOWER = (1.02, 1.05, 1.10)
WARM_UP, SLEEP_SHARE = 50, 0.05
DIFFERENT = ("slower", "faster")


# -- made-up runs --------------------------------------------------------------------------------------------


def made_up(name: str, seed: int, steps: int, memory: float, slower: float) -> RunSeries:
    """A run of 100 ms steps: 4 % noise of which ``memory`` stays, and one step in 50 takes half as long again."""
    dice, level, run = random.Random(seed), 0.0, RunSeries(name)
    fresh = (1 - memory**2) ** 0.5
    for _ in range(steps):
        level = memory * level + fresh * dice.gauss(0, 2)
        value = (100 + level + dice.gauss(0, 3) + (50 if dice.random() < 0.02 else 0)) * slower
        run.step.append(value)
        for phase in PHASES:
            run.phases[phase].append(value / len(PHASES))
    return run


def share(steps: int, memory: float, slower: float) -> str:
    """Of `PAIRS` pairs, how many are called different."""
    verdicts = [
        compare(made_up("A", seed, steps, memory, 1.0), made_up("B", 10_000 + seed, steps, memory, slower)).verdict
        for seed in range(PAIRS)
    ]
    return f"{sum(verdict in DIFFERENT for verdict in verdicts)}/{PAIRS}"


def simulated() -> None:
    """Prints the table."""
    rows = []
    for kind, memory in KINDS.items():
        for steps in LENGTHS:
            rows.append([kind, str(steps), share(steps, memory, 1.0), *(share(steps, memory, s) for s in SLOWER)])
    header = ["noise", "steps", "A/A called different", *(f"found: {100 * (s - 1):.0f} %" for s in SLOWER)]
    print("\n".join(table(header, rows)))


# -- real runs -----------------------------------------------------------------------------------------------


def train(file: str, pairs: int, steps: int) -> None:
    """One rank of the job: runs of ``steps`` steps, every third of them slower."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import ddpwatch

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    ddpwatch.watch(model, record=file)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(64, 256)

    def step(sleep_s: float) -> float:
        begin = time.perf_counter()
        time.sleep(sleep_s)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    usual = torch.tensor(median([step(0.0) for _ in range(WARM_UP)]))
    dist.broadcast(usual, 0)
    for run in range(3 * pairs):
        for _ in range(steps):
            step(SLEEP_SHARE * float(usual) if run % 3 == 2 else 0.0)
    dist.destroy_process_group()


def runs_of(file: Path, steps: int) -> Iterator[list[StepAcrossRanks]]:
    """The job's runs, one after the other."""
    run: list[StepAcrossRanks] = []
    for across in sorted(steps_of(Recording(file)), key=lambda one: one.step):
        if across.step >= WARM_UP:
            run.append(across)
        if len(run) == steps:
            yield run
            run = []


def series(name: str, run: list[StepAcrossRanks]) -> RunSeries:
    """A run as `compare` takes it."""
    found = RunSeries(name)
    for across in run:
        found.add(across)
    return found


def told(found: list[Difference]) -> list[str]:
    """How often each verdict was given, and what was found."""
    counts = Counter(difference.verdict for difference in found)
    ratios = sorted(difference.ratio for difference in found if difference.ratio is not None)
    widths = [(d.high - d.low) / 2 for d in found if d.high is not None and d.low is not None]
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return [
        words, f"{sum(difference.verdict in DIFFERENT for difference in found)}/{len(found)}",
        f"{100 * median(ratios):+.1f} %", f"{100 * ratios[0]:+.1f} to {100 * ratios[-1]:+.1f} %",
        f"±{100 * median(widths):.1f} %",
    ]  # fmt: skip


def real(pairs: int, steps: int) -> None:
    """Trains, then compares."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.mcap"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        arguments = ["--train", str(file), "--pairs", str(pairs), "--steps", str(steps)]
        subprocess.run([*command, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _until_closed(file)
        runs = [series(f"run {place}", run) for place, run in enumerate(runs_of(file, steps))]
    plain = [compare(a, b) for a, b in zip(runs[0::3], runs[1::3], strict=True)]
    slower = [compare(a, b) for a, b in zip(runs[1::3], runs[2::3], strict=True)]
    rows = [[f"A/A, {steps} steps", *told(plain)], ["A/B, 5 % slept", *told(slower)]]
    print("\n".join(table(["pairs", "verdicts", "different", "median", "all", "interval"], rows)))
    print(f"step: {median(value for run in runs[0::3] for value in run.step):.1f} ms")


def _until_closed(file: Path) -> None:
    """The collector ends after the job."""
    if not file.exists():
        raise SystemExit("the job was not recorded: see what it said above")
    while not Recording(file).phases[0].index.complete:
        time.sleep(0.2)


def main() -> None:
    """Does what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=["made-up", "real"], default="made-up")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, default=100, help="of a run")
    parser.add_argument("--train", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train, arguments.pairs, arguments.steps)
    elif arguments.kind == "real":
        real(arguments.pairs, arguments.steps)
    else:
        simulated()


if __name__ == "__main__":
    main()
