"""Cases of jobs that stop: ranks that wait for each other, or that died."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.support.field.case import HEALTHY, Truth, case
from tests.support.field.job import Job
from tests.support.field.loops import Samples, validate

PATIENCE_S = 14.0  # of a group's collectives


def _train(job: Job, steps: int) -> None:
    """Trains until the group loses its patience."""
    for _ in job.steps(steps):
        with suppress(RuntimeError):
            job.train()
            continue
        break


@case("pytorch/pytorch#33148", Truth(("hang", "death"), (1,), since=149, says=r"ends\.py"), fails=True)
def batches_uneven(job: Job) -> None:
    """One rank has fewer batches than the other, and waits at the barrier after its epoch."""
    job.build(timeout_s=PATIENCE_S)
    _train(job, 150 if job.rank == 1 else 160)
    dist.barrier()


@case("speechbrain/speechbrain#1939", Truth(("hang", "death"), (0,), since=99), fails=True)
def main_process_stops(job: Job) -> None:
    """Rank 0 alone decides to stop, and goes on to its final test."""
    job.build(timeout_s=PATIENCE_S)
    _train(job, 100 if job.rank == 0 else 200)
    if job.rank == 0:
        time.sleep(PATIENCE_S + 4)


@case("lifeiteng/vall-e#93", Truth(("hang", "death"), (1,), since=119), fails=True)
def validates_too_early(job: Job) -> None:
    """One rank's loader ends first: it validates and reduces its loss, while the others train."""
    job.build(timeout_s=PATIENCE_S)
    _train(job, 120 if job.rank == 1 else 200)
    validate(job, 20)
    with suppress(RuntimeError):
        dist.all_reduce(torch.zeros(1))


class Stuck(Samples):
    """Samples of which one never comes."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8 * 120:
            time.sleep(PATIENCE_S + 4)
        return super().__getitem__(index)


@case("pytorch/pytorch#87995", Truth(("hang", "death"), (1,), since=119), fails=True)
def loader_stuck(job: Job) -> None:
    """One rank's loader waits for a file server that does not answer."""
    job.build(timeout_s=PATIENCE_S)
    samples = Stuck(8 * 200) if job.rank == 1 else Samples(8 * 200)
    batches = iter(DataLoader(samples, batch_size=8, num_workers=1))
    for _ in job.steps(200):
        with suppress(RuntimeError):
            job.train(job.fetch(batches))
            continue
        break


@case("fidelity/stoke#31", Truth(("death",), (1,), since=80), fails=True)
def out_of_memory(job: Job) -> None:
    """The kernel kills a rank that has no memory left."""
    job.build(timeout_s=PATIENCE_S)
    for step in job.steps(160):
        if job.rank == 1 and step == 80:
            job.write_notes()
            os.kill(os.getpid(), signal.SIGKILL)
        job.train()


@case("Lightning-AI/pytorch-lightning#8130", Truth(("death",), (2,), since=90), ranks=3, fails=True)
def exception_on_one(job: Job) -> None:
    """One rank's batch is broken, and its exception ends it."""
    job.build(timeout_s=PATIENCE_S)
    for step in job.steps(160):
        if job.rank == 2 and step == 90:
            raise ValueError("a broken sample")
        job.train()


@case("huggingface/accelerate#314", HEALTHY)
def rank_0_prepares(job: Job) -> None:
    """Rank 0 prepares the data for 12 s, while the others stand at a barrier before the first step."""
    job.build()
    if job.rank == 0:
        time.sleep(12)
    dist.barrier()
    for _ in job.steps(60):
        job.train()
