"""Measures how often `ddpwatch compare` finds a difference that is not there, and one that is, in made-up runs.

    python benchmarks/compare_aa.py [--pairs 50]

Takes about two minutes. No budget. The columns:
    noise                   how much of a step's noise the next step keeps; beside it, outliers
    A/A called different    of pairs of equal runs
    found: N %              of pairs in which the second run is that much slower
"""

from __future__ import annotations

import argparse
import random
from itertools import product

from ddpwatch.analysis.compare import RunSeries, compare
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.text import table
from tests.support.rounds import Rounds, rounds_done

PAIRS = 50
NOISE = {"independent": 0.0, "keeps 0.5": 0.5, "keeps 0.8": 0.8, "keeps 0.9": 0.9}
LENGTHS = (60, 300, 1000)
SLOWER = (1.0, 1.02, 1.05, 1.10)
DIFFERENT = ("slower", "faster")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="for each figure (default: %(default)s)")
    pairs, kinds = parser.parse_args().pairs, list(product(NOISE.items(), LENGTHS))
    with Rounds() as rounds:
        rows = [
            [noise, str(steps), *(called_different(pairs, steps, kept, slower) for slower in SLOWER)]
            for (noise, kept), steps in rounds.over(kinds, "rows")
        ]
    header = ["noise", "steps", "A/A called different", *(f"found: {100 * (s - 1):.0f} %" for s in SLOWER[1:])]
    print("\n".join(table(header, rows)))
    print(f"{rounds_done(len(rows), len(kinds), 'row')}, {pairs} pairs for each figure")


if __name__ == "__main__":
    main()
