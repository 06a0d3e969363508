"""Cases of single steps that take far longer: what one rank does alone, or all do together, now and then.

Jobs train on after the last time: what comes after a job's last step is in none.
"""

from __future__ import annotations

import io
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.support.field.case import Truth, case
from tests.support.field.job import Job
from tests.support.field.loops import Samples, validate

STALL = ("pause", "intermittent")


class SlowShare(io.BytesIO):
    """A file on a slow network share."""

    def write(self, data) -> int:  # type: ignore[no-untyped-def]
        """Takes a while for each piece of some size."""
        time.sleep(min(0.2, len(data) / 1e6))
        return super().write(data)


@case("mosaicml/llm-foundry#733", Truth(STALL, (0,), ("checkpoint",), "struck", 39, soon=100, period=40))
def checkpoint_of_rank_0(job: Job) -> None:
    """Rank 0 saves onto a slow share every 40 steps; the others go on, and wait in their next backward."""
    job.build(width=256)
    for step in job.steps(260):
        job.train(job.batch(256))
        if job.rank == 0 and step % 40 == 39:
            with job.strike():
                torch.save(job.model.module.state_dict(), SlowShare())


@case("synthefy/synthefy-nori#86", Truth(STALL, (0,), ("validation",), "struck", 49, soon=110, period=50))
def validation_of_rank_0(job: Job) -> None:
    """Rank 0 validates alone every 50 steps; the others wait for its word whether to stop."""
    job.build()
    for step in job.steps(240):
        job.train()
        if step % 50 == 49:
            stop = torch.zeros(1)
            if job.rank == 0:
                with job.strike():
                    validate(job, 120)
            dist.broadcast(stop, 0)


@case("m2lines/Samudra#677", Truth(STALL, (0,), ("between", ""), "struck", 49, soon=110, period=50))
def upload_of_images(job: Job) -> None:
    """Rank 0 uploads images for 0.6 s every 50 steps."""
    job.build()
    for step in job.steps(320):
        job.train()
        if job.rank == 0 and step % 50 == 49:
            job.pause(0.6)


@case("wandb/wandb#7423", Truth(STALL, (0,), ("between", ""), "struck", 29, soon=70, period=30), ranks=3)
def histograms_of_weights(job: Job) -> None:
    """Rank 0 draws histograms of all weights every 30 steps; the others stand at a barrier."""
    job.build()
    for step in job.steps(260):
        job.train()
        if step % 30 == 29:
            if job.rank == 0:
                job.pause(0.5)
            dist.barrier()


@case("open-mmlab/mmpose#923", Truth((*STALL, "slow_input"), (), ("data",), "struck", 40, soon=90, period=40))
def workers_each_epoch(job: Job) -> None:
    """Workers start again for each epoch of 40 steps, on all ranks."""
    job.build()
    loader = DataLoader(
        Samples(8 * 40), batch_size=8, num_workers=1, multiprocessing_context="spawn", persistent_workers=False
    )
    batches = iter(loader)
    for step in job.steps(200):
        if step % 40:
            job.train(job.fetch(batches))
            continue
        with job.strike():
            batches = iter(loader)
            first = next(batches)
        job.train(first)


@case("mlfoundations/open_clip#703", Truth((*STALL, "slow_input"), (), ("data",), "struck", 4, soon=40))
def freezes_every_fourth(job: Job) -> None:
    """Four workers deliver four batches at once, and then the loop waits for all of them."""
    job.build()
    batches = iter(DataLoader(Samples(8 * 160, 0.045), batch_size=8, num_workers=4, prefetch_factor=1))
    for _ in job.steps(160):
        with job.strike():
            batch = next(batches)
        job.train(batch)


@case("meta-pytorch/torchtune#2093", Truth(STALL, (), ("checkpoint",), "struck", 59, soon=130))
def checkpoint_of_all(job: Job) -> None:
    """All ranks save their part every 60 steps, which takes a fifth of the run."""
    job.build(width=256)
    for step in job.steps(260):
        job.train(job.batch(256))
        if step % 60 == 59:
            with job.strike():
                torch.save(job.model.module.state_dict(), SlowShare())
            dist.barrier()


@case("marin-community/marin#9205", Truth(STALL, (1,), ("between", "forward", ""), "struck", 120, soon=10), ranks=3)
def one_stall(job: Job) -> None:
    """One rank stands still for two seconds, once."""
    job.build()
    for step in job.steps(200):
        if job.rank == 1 and step == 120:
            job.pause(2.0)
        job.train()


@case("mosaicml/streaming#643", Truth(STALL, (), ("between", ""), "struck", 100, soon=10))
def stall_of_all(job: Job) -> None:
    """A file system stands still for two seconds, and with it all ranks."""
    job.build()
    for step in job.steps(180):
        if step == 100:
            job.pause(2.0)
        job.train()


@case("MultimediaTechLab/YOLO#228", Truth(STALL, (), ("validation",), "struck", 49, soon=110))
def validation_of_all(job: Job) -> None:
    """All ranks validate every 50 steps, which takes a third of the run."""
    job.build()
    for step in job.steps(220):
        job.train()
        if step % 50 == 49:
            with job.strike():
                validate(job, 90)
