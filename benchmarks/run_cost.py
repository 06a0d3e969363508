"""Measures what `ddpwatch run` adds to the duration of a short job of two ranks.

    duration     of `torchrun demo/train.py` alone: the median of its rounds (s)
    adds         to that, by jobs in turns: seconds, with a 95 % interval (`paired.hodges_lehmann`), and their range

The first round, which writes bytecode, is left out: an installed ddpwatch has its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

from ddpwatch.common.text import table
from tests.support.paired import hodges_lehmann

TOOLS = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
KINDS = {
    "alone": [],
    "ddpwatch run --headless": [str(TOOLS / "ddpwatch"), "run", "--headless", "--"],
    "alone again": [],
}
SETTLE_S = 1.5  # for the collector, which outlives the command


def main() -> None:
    """Prints a row for each kind of start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=15)
    chosen = parser.parse_args()
    script = [str(ROOT / "demo" / "train.py"), "--steps", str(chosen.steps)]
    job = [str(TOOLS / "torchrun"), "--standalone", "--nproc-per-node=2", *script]
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(chosen.rounds + 1):
        for kind in list(KINDS) if turn % 2 else list(KINDS)[::-1]:
            found[kind].append(_duration([*KINDS[kind], *job]))
        print(f"round {turn} of {chosen.rounds}", file=sys.stderr)
    alone = found.pop("alone")[1:]
    rows = [["alone", f"{median(alone):.2f}", "", "", ""]]
    for kind, durations in found.items():
        added = [one - base for one, base in zip(durations[1:], alone, strict=True)]
        value, low, high = hodges_lehmann(added)
        interval = f"{value:+.2f} ({low:.2f} to {high:.2f})"
        rows.append([kind, f"{median(durations[1:]):.2f}", f"{mean(added):+.2f}", interval, _range(added)])
    print("\n".join(table(["", "duration", "adds: mean", "Hodges-Lehmann", "range"], rows)))


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _duration(command: list[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="ddpwatch-cost-", ignore_cleanup_errors=True) as directory:
        environment = {**os.environ, "DDPWATCH_DIR": directory, "PYTHONDONTWRITEBYTECODE": ""}
        began = time.monotonic()
        subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
        took = time.monotonic() - began
        time.sleep(SETTLE_S)
    return took


if __name__ == "__main__":
    main()
