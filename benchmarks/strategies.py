"""Compare the step time of strategies by paired measurements, alternated in one run.

Run it as ``torchrun --nproc-per-node=2 benchmarks/strategies.py``. Each round times every strategy over a few steps,
every other round in the opposite order; a round's times are divided by that of the reference. What disturbs the machine
for longer than a round disturbs both sides of a ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from paired import middle

from trainer import TrainConfig, Trainer, TrainerError, build_task
from trainer.cli import fail
from trainer.distributed import World, process_group

WARM_UP_STEPS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the ratios, and give the exit code."""
    args = build_parser().parse_args(argv)
    world, base = World.from_environment(), TrainConfig(model=args.model, data=args.data, log_every=10**9)
    ways = [args.reference, *(way for way in args.strategies if way != args.reference)]
    try:
        for way in ways:
            build_task(replace(base, strategy=way), world)
    except TrainerError as error:
        return fail(error)
    with process_group(world):
        runners = {way: Runner(replace(base, strategy=way), world) for way in ways}
        rounds = [one_round(runners, args.steps, backwards=bool(number % 2)) for number in range(args.rounds)]
    if world.rank == 0:
        summary = {way: summarise(rounds, way, args.reference) for way in ways}
        print(json.dumps(summary, indent=2) if args.json else "\n".join(table(summary, args.reference)))
    return 0


class Runner:
    """A trainer that is past its warm-up."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.trainer = Trainer(config, world)
        self.batches = iter(self.trainer.stream)
        self.seconds_per_step(WARM_UP_STEPS)

    def seconds_per_step(self, steps: int) -> float:
        """Time some steps, begun by all ranks together."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.trainer.train_step(self.batches)
        return (time.perf_counter() - start) / steps


def one_round(runners: dict[str, Runner], steps: int, backwards: bool) -> dict[str, float]:
    """Time every strategy once."""
    order = list(runners.items())
    return {way: runner.seconds_per_step(steps) for way, runner in (reversed(order) if backwards else order)}


def summarise(rounds: list[dict[str, float]], way: str, reference: str) -> dict[str, float]:
    """Give the median step, the middle of the paired ratios and its 95 % interval."""
    ratio, low, high = middle([times[way] / times[reference] for times in rounds])
    step_ms = median(times[way] for times in rounds) * 1e3
    return {"step_ms": step_ms, "ratio": ratio, "ratio_low": low, "ratio_high": high}


def table(summary: dict[str, dict[str, float]], reference: str) -> list[str]:
    """Lay the summary out for people."""
    lines = [f"{'strategy':18}{'step':>10}{f'x {reference}':>12}   95 % interval"]
    for way, row in summary.items():
        interval = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
        lines.append(f"{way:18}{row['step_ms']:7.1f} ms{row['ratio']:12.3f}   {interval}")
    return lines


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description="Compare step times by paired, alternated measurements.")
    parser.add_argument("strategies", nargs="*", default=["bucketed-hooks", "param-hooks", "manual"])
    parser.add_argument("--reference", default="ddp")
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--data", default="text")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps per strategy and round")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
