"""Trains, asks what if, changes the bucket cap to the best one, trains again, and compares.

    python demo/whatif.py [--mbit 600] [--keep DIR]

As root, two ranks train in network namespaces with a slow link between them; otherwise over loopback, where there may
be little to gain. Takes about a minute.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ddpwatch.common.units import NS_PER_MS
from ddpwatch.errors import DdpwatchError
from ddpwatch.whatif.answer import Prediction, WhatIfAnswer
from ddpwatch.whatif.command import answer, recorded_in
from ddpwatch.whatif.scenarios import Change
from ddpwatch.whatif.text import render_whatif
from ddpwatch.whatif.wording import statement_of
from demo.shaped_network import run_job, shaped_network, why_not

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
CAPS_MIB = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0)
MODEL = "gpt:width=288,layers=4"
STEPS = 40
MBIT = 600.0
TIMEOUT_S = 180
LEAST_GAIN = 0.02  # of a step


def main(argv: Sequence[str] | None = None) -> int:
    """Trains twice, and prints what was predicted and what was measured; the exit code."""
    args = _parser().parse_args(argv)
    reason = why_not()
    print(f"a link of {args.mbit:g} Mbit/s" if not reason else f"over loopback, as a slow link {reason}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ddpwatch-demo-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with nullcontext() if reason else shaped_network(RANKS, args.mbit):
                return close_the_circle(folder, not reason, args.steps)
        except (DdpwatchError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"whatif.py: error: {error}", file=sys.stderr)
            return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=MBIT, metavar="RATE", help=f"of the link (default: {MBIT:g})")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of each training (default: {STEPS})")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the recordings in DIR")
    return parser


def close_the_circle(folder: Path, in_namespaces: bool, steps: int) -> int:
    """Trains, asks, changes, trains again."""
    before = train(folder / "before.mcap", None, in_namespaces, steps)
    found = answer(recorded_in(before)[0], [Change(cap_mib=cap) for cap in CAPS_MIB])
    print(render_whatif(found, everything=True), flush=True)
    best = best_cap(found)
    if best is None:
        print("no cap gains enough to be worth trying")
        return 0
    print(f"\ntraining again: {statement_of(best.code)}", flush=True)
    after = train(folder / "after.mcap", best.cap_mib, in_namespaces, steps)
    print(outcome(best, recorded_in(after)[0].measured_ns / NS_PER_MS))
    return 0


def best_cap(found: WhatIfAnswer) -> Prediction | None:
    """The scenario that gains most, if it is worth trying."""
    worth = [scenario for scenario in found.scenarios if scenario.sure and scenario.gain > LEAST_GAIN]
    return max(worth, key=lambda scenario: scenario.gain, default=None)


def outcome(best: Prediction, measured_ms: float) -> str:
    """What was predicted and what was measured, in one line."""
    place = "within" if best.low <= measured_ms <= best.high else "outside"
    gained = 1 - measured_ms / (best.step_ms + best.gain_ms)
    return (
        f"{best.change}: predicted {best.step_ms:.0f} ms ({best.low:.0f} to {best.high:.0f}), "
        f"measured {measured_ms:.0f} ms, {place} that; the prediction is {best.step_ms / measured_ms - 1:+.1%} off, "
        f"and a step is {gained:.0%} shorter than before"
    )


def train(file: Path, cap_mib: float | None, in_namespaces: bool, steps: int) -> Path:
    """One training, recorded in full; ``cap_mib`` None for DDP's own buckets."""
    file.unlink(missing_ok=True)
    cap = [] if cap_mib is None else ["--bucket-cap-mb", f"{cap_mib:g}"]
    work = ["--model", MODEL, "--batch-size", "4", "--steps", str(steps), "--record", str(file), *cap]
    command, log = [str(ROOT / "demo" / "train.py"), *work], file.with_suffix(".log")
    if in_namespaces:
        run_job(command, RANKS, log, {"DDPWATCH_DETAIL": "full"})
    else:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            *command,
        ]
        environment = {**os.environ, "DDPWATCH_DETAIL": "full", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            subprocess.run(torchrun, env=environment, stdout=output, stderr=output, timeout=TIMEOUT_S, check=True)
    return file


if __name__ == "__main__":
    sys.exit(main())
