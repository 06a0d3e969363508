"""Whether the figures of two data-parallel groups in one job are those of two jobs.

    python benchmarks/groups.py [--rounds 6]

Takes about three minutes. Each round runs one job of four ranks in two groups, and two jobs of two ranks, one per group
(``tests/integration/scripts/groups.py``): in the first group one rank skips batches, in the second one rank is slow.
The order changes with every round. Layers sleep instead of computing, so that all jobs do the same beside other load.

A round in which a figure is unknown does not count: on a machine that is very busy, a job may be over before its
collector runs.

The columns, for each rank and figure (medians of the rounds, in ms; overlap in percent):
    one job           as part of the job with two groups
    two jobs          as part of a job of its own
    difference        one job less two jobs, with its 95 % interval (`paired.hodges_lehmann`)
    ± of one job      how far the rounds of the job with two groups lie apart: half their range
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from ddpwatch import open_recording
from ddpwatch.common.text import table
from tests.support.paired import hodges_lehmann
from tests.support.rounds import Rounds, rounds_done

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "integration" / "scripts" / "groups.py"
OVERLAP, TRANSFER, NAMED = "overlap", "transfer", "named"
FIGURES = {"step": "step_ms", "late": "late_ms_p50", "wait": "wait_ms_p50", "exposed": "exposed_ms", OVERLAP: "overlap"}
GROUP = 2  # ranks
WORLD = 2 * GROUP
Values = dict[tuple[int, str], Any]  # by rank and figure; None where a figure is unknown


def main() -> int:
    """Measures, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    args = parser.parse_args()
    one: list[Values] = []
    two: list[Values] = []
    with tempfile.TemporaryDirectory() as folder, Rounds() as rounds:
        for number in rounds.over(range(args.rounds), "one job and two jobs"):
            jobs = (of_one_job, of_two_jobs) if number % 2 else (of_two_jobs, of_one_job)
            found = {job: job(Path(folder)) for job in jobs}
            if None not in [value for values in found.values() for value in values.values()]:
                one.append(found[of_one_job])
                two.append(found[of_two_jobs])
    if one:
        print("\n".join(compared(one, two)))
    print(rounds_done(len(one), args.rounds))
    return 0


def of_one_job(folder: Path) -> Values:
    """The figures of both groups in one job."""
    return figures(run(folder, WORLD), 0)


def of_two_jobs(folder: Path) -> Values:
    """The figures of the groups as jobs of their own, one after the other."""
    found: Values = {}
    for first in range(0, WORLD, GROUP):
        found |= figures(run(folder, GROUP, first), first)
    return found


def run(folder: Path, ranks: int, first: int = 0) -> Path:
    """Trains one job, and returns its recording."""
    recording = folder / "run.mcap"
    recording.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DDPWATCH_STEPS": "full"}
    done = subprocess.run(
        [*command, str(recording), str(first)], env=environment, capture_output=True, text=True, start_new_session=True
    )
    if done.returncode:
        raise RuntimeError(f"a job of {ranks} ranks: {done.stderr[-2000:]}")
    return recording


def figures(recording: Path, first: int) -> Values:
    """What is shown of each rank, as rank of the whole job; overlap in percent."""
    opened, found = open_recording(recording), Values()
    report, transfers = opened.metrics(), defaultdict[int, list[float]](list)
    for bucket in opened.buckets():
        if bucket.transfer_ms is not None:
            transfers[bucket.rank].append(bucket.transfer_ms)
    late = {rank for row in report["incidents"] if row["kind"] == "straggler" for rank in row["ranks"]}
    for row in report["ranks"]:
        rank = row["rank"]
        found |= {(first + rank, name): row[key] for name, key in FIGURES.items()}
        found[first + rank, OVERLAP] = None if row["overlap"] is None else 100 * row["overlap"]
        found[first + rank, TRANSFER] = median(transfers[rank]) if transfers[rank] else None
        found[first + rank, NAMED] = rank in late
    return found


def compared(one: list[Values], two: list[Values]) -> list[str]:
    """The table."""
    rows = []
    for rank in range(WORLD):
        for name in (*FIGURES, TRANSFER):
            joint, apart = ([values[rank, name] for values in kind] for kind in (one, two))
            value, low, high = hodges_lehmann([a - b for a, b in zip(joint, apart, strict=True)])
            rows.append([
                str(rank), name, f"{median(joint):.2f}", f"{median(apart):.2f}", f"{value:+.2f}",
                f"{low:+.2f} … {high:+.2f}", f"{(max(joint) - min(joint)) / 2:.2f}",
            ])  # fmt: skip
        named = [str(sum(values[rank, NAMED] for values in kind)) for kind in (one, two)]
        rows.append([str(rank), "rounds in which it is a straggler", *named, "", "", ""])
    return table(["rank", "", "one job", "two jobs", "difference", "95 % interval", "± of one job"], rows)


if __name__ == "__main__":
    sys.exit(main())
