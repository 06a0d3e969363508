"""The step time of the trainer's strategies, which take turns in one run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/strategies.py [STRATEGY ...] [--reference ddp]

Takes about three minutes. No budget: it compares the trainer's strategies with one another. Each round times every
strategy over a few steps, every other round in the opposite order. What disturbs the machine for longer than a round
disturbs all strategies.

The columns:
    step              the median step
    x REFERENCE       how many times as long as the reference's step of the same round (`paired.hodges_lehmann`)
    95 % interval     of that ratio
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TypedDict

import torch.distributed as dist

from tests.support.paired import hodges_lehmann, ratios
from tests.support.rounds import Rounds, rounds_done
from trainer import TrainConfig, Trainer, TrainerError, build_task
from trainer.cli import fail
from trainer.distributed import World, process_group

WARM_UP_STEPS = 3
STRATEGIES = ("bucketed-hooks", "param-hooks", "manual")


class Row(TypedDict):
    """A strategy's line of the table."""

    step_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and returns the exit code."""
    args = build_parser().parse_args(argv)
    world, base = World.from_environment(), TrainConfig(model=args.model, data=args.data, log_every=10**9)
    names = [args.reference, *(name for name in args.strategies if name != args.reference)]
    try:
        for name in names:
            build_task(replace(base, strategy=name), world)
    except TrainerError as error:
        return fail(error)
    with process_group(world), Rounds.of_job() as rounds:
        runners = {name: Runner(replace(base, strategy=name), world) for name in names}
        times = [
            one_round(runners, args.steps, reverse=bool(number % 2))
            for number in rounds.over(range(args.rounds), "strategies")
        ]
        if world.rank == 0:
            show(times, args)
    return 0


def show(times: list[dict[str, float]], args: argparse.Namespace) -> None:
    """Prints the rounds that took place; with ``--json``, stdout is only the table."""
    summary = {name: summarise(times, name, args.reference) for name in (times[0] if times else ())}
    if args.json:
        print(json.dumps(summary, indent=2))
    elif times:
        print("\n".join(table(summary, args.reference)))
    print(rounds_done(len(times), args.rounds), file=sys.stderr if args.json else sys.stdout)


class Runner:
    """A trainer after its warm-up."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.trainer = Trainer(config, world)
        self.batches = iter(self.trainer.stream)
        self.seconds_per_step(WARM_UP_STEPS)

    def seconds_per_step(self, steps: int) -> float:
        """Trains some steps, which all ranks start together; the mean step."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.trainer.train_step(self.batches)
        return (time.perf_counter() - start) / steps


def one_round(runners: dict[str, Runner], steps: int, reverse: bool) -> dict[str, float]:
    """Seconds per step of every strategy."""
    order = reversed(runners) if reverse else runners
    return {name: runners[name].seconds_per_step(steps) for name in order}


def summarise(times: list[dict[str, float]], name: str, reference: str) -> Row:
    """The median step, and its ratio to the reference with the 95 % interval."""
    values = [seconds[name] for seconds in times]
    ratio, low, high = hodges_lehmann(ratios(values, [seconds[reference] for seconds in times]))
    return {"step_ms": median(values) * 1e3, "ratio": ratio, "ratio_low": low, "ratio_high": high}


def table(summary: dict[str, Row], reference: str) -> list[str]:
    """The summary as aligned columns."""
    lines = [f"{'strategy':18}{'step':>10}{f'x {reference}':>12}   95 % interval"]
    for name, row in summary.items():
        interval = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
        lines.append(f"{name:18}{row['step_ms']:7.1f} ms{row['ratio']:12.3f}   {interval}")
    return lines


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", default=STRATEGIES, metavar="STRATEGY", help=", ".join(STRATEGIES))
    parser.add_argument("--reference", default="ddp", help="the strategy to divide by (default: %(default)s)")
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--data", default="text")
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="steps of each strategy per round (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
