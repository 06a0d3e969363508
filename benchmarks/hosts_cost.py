"""What watching a job on several hosts adds to a step: blocks of steps with and without it, as in `overhead.py`.

    hosts_cost.py RESULT ROUNDS STEPS

Started by `hosts.py` on every host. Rank 0 writes the table to the file RESULT.
"""

from __future__ import annotations

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
    compared,
    plain,
    take_turns,
)  # fmt: skip
from tests.support.rounds import Rounds, rounds_done

STEP_MS = 10  # of compute: the gradients (1 MB) take longer on the wire
SETTLE_STEPS = 12  # more than a second, after which the block's own frames are on the wire


class SettledJob(Job):
    """Measures a block once what the block before has left is no longer on its way."""

    def block(self, variant: Variant, steps: int) -> Sample:
        """See `Job.block`."""
        with variant(self.model):
            super().block(plain, SETTLE_STEPS)
            return super().block(plain, steps)


def bind() -> None:
    """Binds every thread of this process to one core, a different one for each rank, as the hosts are one machine."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[dist.get_rank() % len(cores)]})


def main(result: Path, count: int, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with Rounds.of_job() as rounds:
        job = SettledJob(STEP_MS, "ddp")
        job.block(plain, PLAIN_WARM_UP_STEPS)
        watched = Watched(job.model)
        bind()
        job.block(watched.variant(WATCHED), WARM_UP_STEPS)
        watched.note_steps()
        comparison = take_turns(job, {WATCHED: watched.variant(WATCHED)}, count, steps, rounds)
    if dist.get_rank() == 0:
        table = compared(comparison) if comparison.done else []
        result.write_text("\n".join([*table, f"{rounds_done(comparison.done, count)}, {steps} steps in a block"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
