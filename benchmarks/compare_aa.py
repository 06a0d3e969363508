"""How often does `ddpwatch compare` see a difference that is not there, and how often one that is?

Runs are made up: step times whose noise remembers the step before (as caches, clocks and neighbours make it do), with
outliers. Pairs of one kind (A/A) should be called the same, pairs 2, 5 and 10 % apart should not. Recordings given on
the command line are compared as real pairs: each with the first, and the halves of each with each other.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddpwatch.analysis.compare import RunSeries, compare
from ddpwatch.analysis.render import table
from ddpwatch.analysis.render_compare import render_compare
from ddpwatch.analysis.steps import PARTS
from ddpwatch.export.tables import groups
from ddpwatch.recording.reader import Recording
from ddpwatch.reporting import compare_recordings

PAIRS = 50
KINDS = {"independent": 0.0, "remembers half": 0.5, "remembers 0.8": 0.8, "remembers 0.9": 0.9}
LENGTHS = (60, 300, 1000)
SLOWER = (1.02, 1.05, 1.10)


def made_up(name: str, seed: int, steps: int, memory: float, slower: float) -> RunSeries:
    """A run of 100 ms steps: 4 % noise of which ``memory`` stays, and one step in 50 takes half as long again."""
    dice, level, run = random.Random(seed), 0.0, RunSeries(name)
    fresh = (1 - memory**2) ** 0.5
    for _ in range(steps):
        level = memory * level + fresh * dice.gauss(0, 2)
        value = (100 + level + dice.gauss(0, 3) + (50 if dice.random() < 0.02 else 0)) * slower
        run.step.append(value)
        for part in PARTS:
            run.parts[part].append(value / len(PARTS))
    return run


def share(steps: int, memory: float, slower: float) -> str:
    """Of `PAIRS` pairs, how many are called different."""
    verdicts = [
        compare(made_up("A", seed, steps, memory, 1.0), made_up("B", 10_000 + seed, steps, memory, slower)).verdict
        for seed in range(PAIRS)
    ]
    return f"{sum(verdict in ('slower', 'faster') for verdict in verdicts)}/{PAIRS}"


def halves(path: Path) -> str:
    """The first half of a real run against its second: one kind, one process, another time."""
    whole, first, second = RunSeries(path.stem), RunSeries("its first half"), RunSeries("its second half")
    for group in groups(Recording(path)):
        whole.add(group)
    middle = len(whole.step) // 2
    for run, part in ((first, slice(middle)), (second, slice(middle, None))):
        run.step, run.overlap = whole.step[part], whole.overlap[part]
        run.parts = {name: values[part] for name, values in whole.parts.items()}
    return f"{path.stem}: {compare(first, second).text}"


def main(paths: Sequence[str]) -> None:
    rows = []
    for kind, memory in KINDS.items():
        for steps in LENGTHS:
            rows.append([kind, str(steps), share(steps, memory, 1.0), *(share(steps, memory, s) for s in SLOWER)])
    header = ["noise", "steps", "A/A called different", *(f"found: {100 * (s - 1):.0f} %" for s in SLOWER)]
    print("\n".join(table(header, rows)))
    if len(paths) > 1:
        print("\nReal recordings\n" + render_compare(compare_recordings(paths)))
    for path in paths:
        print(halves(Path(path)))


if __name__ == "__main__":
    main(sys.argv[1:])
