"""Measures what watching a job on two hosts adds to a step: blocks of steps with and without it, as in `overhead.py`.

    python benchmarks/hosts_cost.py [--rounds 64] [--steps 32]

Takes about seven minutes, and needs root: the hosts are namespaces of this machine, on links of 100 Mbit/s.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.overhead import (
    PLAIN_WARM_UP_STEPS,
    WARM_UP_STEPS,
    WATCHED,
    Job,
    Sample,
    Variant,
    Watched,
    bind,
    compared,
    plain,
    take_turns,
)  # fmt: skip
from tests.support.hosts import why_not
from tests.support.network import START_S, TOOLS, network
from tests.support.rounds import Rounds, rounds_done

HOSTS = 2
ROUND_S = 60.0  # more than a round takes
STEP_MS = 10  # of compute: the gradients (1 MB) take longer on the wire
SETTLE_STEPS = 12  # more than a second, after which the block's own frames are on the wire
RESULT = "BENCHMARK_RESULT"  # names the file for the table to the job


class SettledJob(Job):
    """Measures a block once what the block before has left is no longer on its way."""

    def block(self, variant: Variant, steps: int) -> Sample:
        """See `Job.block`."""
        with variant(self.model):
            super().block(plain, SETTLE_STEPS)
            return super().block(plain, steps)


def train(result: Path, count: int, steps: int) -> None:
    """A rank of the job; rank 0 writes the table."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with Rounds.of_job() as rounds:
        job = SettledJob(STEP_MS, "ddp")
        job.block(plain, PLAIN_WARM_UP_STEPS)
        watched = Watched(job.model)
        bind(dist.get_rank())  # the hosts are one machine
        job.block(watched.variant(WATCHED), WARM_UP_STEPS)
        watched.note_steps()
        comparison = take_turns(job, {WATCHED: watched.variant(WATCHED)}, count, steps, rounds)
    if dist.get_rank() == 0:
        table = compared(comparison) if comparison.done else []
        result.write_text("\n".join([*table, f"{rounds_done(comparison.done, count)}, {steps} steps in a block"]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=32, help="steps in a block (default: %(default)s)")
    args = parser.parse_args()
    if result := os.environ.get(RESULT):
        train(Path(result), args.rounds, args.steps)
        return
    if why := why_not(*TOOLS):
        sys.exit(f"benchmarks/hosts_cost.py {why}")
    with network(HOSTS) as hosts:
        file = hosts.folder / "result"
        with hosts.job("benchmarks/hosts_cost.py", *sys.argv[1:], **{RESULT: str(file)}) as job:
            job.wait(START_S + args.rounds * ROUND_S)
        print(file.read_text())


if __name__ == "__main__":
    main()
