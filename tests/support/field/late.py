"""Cases of one rank that is later than the others: always, more and more, or now and then."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.utils.data import DataLoader, Dataset

from tests.support.field.case import Truth, case
from tests.support.field.job import WIDTH, Job
from tests.support.field.loops import Samples, wide

COMPUTE = ("forward", "backward")
LATE = ("straggler", "intermittent")


@case("huggingface/transformers#47340", Truth(("straggler",), (2,), COMPUTE, "lead", soon=10), ranks=3)
def bigger_batch(job: Job) -> None:
    """The last rank's batches are half as large again."""
    job.build()
    for _ in job.steps(200):
        job.train(slower=1.5 if job.rank == 2 else 1.0)


@case("NVIDIA/nccl#893", Truth(("straggler",), (1,), COMPUTE, "lead", soon=10), ranks=4)
def slower_device(job: Job) -> None:
    """One device is slower than the three others, by a fifth."""
    job.build()
    for _ in job.steps(200):
        job.train(slower=1.2 if job.rank == 1 else 1.0)


@case("mit-han-lab/gan-compression#47", Truth(("drift", "straggler"), (0,), ("between",), "lead", 25, soon=60))
def growing_plot(job: Job) -> None:
    """Rank 0 draws all its losses again after each step, which takes 0.15 ms longer every time."""
    job.build()
    for step in job.steps(300):
        job.train()
        if job.rank == 0:
            job.pause(0.00015 * step)


@case("wandb/wandb#950", Truth(("straggler",), (0,), ("between",), "lead", soon=10))
def logging_each_step(job: Job) -> None:
    """Rank 0 writes its metrics after each step, which takes 8 ms."""
    job.build()
    for _ in job.steps(200):
        job.train()
        if job.rank == 0:
            job.pause(0.008)


@case("wandb/wandb#8666", Truth(("intermittent",), (0,), ("between",), "lead", 9, soon=60, period=10))
def logging_every_tenth(job: Job) -> None:
    """Rank 0 flushes its metrics every ten steps, for 80 ms."""
    job.build()
    for step in job.steps(300):
        job.train()
        if job.rank == 0 and step % 10 == 9:
            job.pause(0.08)


@case("pytorch/torchtitan#148", Truth(("intermittent", "pause"), (1,), ("gc",), "lead", 24, soon=80), ranks=3)
def collections_apart(job: Job) -> None:
    """One rank's heap is large, and Python's collector walks it now and then."""
    job.build()
    heap = [[number] for number in range(1_500_000)] if job.rank == 1 else []
    gc.disable()
    for step in job.steps(265):
        job.train()
        if job.rank == 1 and step % 25 == 24:
            with job.strike():
                gc.collect()
    heap.clear()


def fetch_late(job: Job, batches: Iterator[Tensor]) -> Tensor:
    """Returns the next batch, for which rank 1 alone has to wait."""
    with job.strike() if job.rank == 1 else nullcontext():
        return next(batches)


@case("deepspeedai/DeepSpeed#1617", Truth(("slow_input", "straggler"), (1,), ("data",), "lead", soon=10))
def slow_disk(job: Job) -> None:
    """One rank reads its samples from a slow disk."""
    job.build()
    batches = iter(DataLoader(Samples(8 * 200, 0.002 if job.rank == 1 else 0.0), batch_size=8))
    for _ in job.steps(200):
        job.train(fetch_late(job, batches))


class Experts(nn.Module):
    """A layer before and one after experts on other ranks, with tokens that travel both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = wide(2), wide(2)

    def forward(self, tokens: Tensor, extra: Job | None = None) -> Tensor:
        """Sends tokens to the experts and back; ``extra`` is who takes longer with them."""
        tokens = self.before(tokens)
        sent = all_to_all_single(torch.empty_like(tokens), tokens)
        if extra is not None:
            extra.pause(0.012)
        return self.after(all_to_all_single(torch.empty_like(sent), sent))


@case("microsoft/Tutel#204", Truth(("straggler",), (1,), ("forward",), "struck", soon=20))
def crowded_expert(job: Job) -> None:
    """The router prefers one rank's expert: the others wait for its tokens inside the forward."""
    model = job.build(Experts())
    for _ in job.steps(200):
        job.optimizer.zero_grad()
        job.backward(model(job.batch(), job if job.rank == 1 else None).square().mean())
        job.optimizer.step()


@case(
    "pytorch/pytorch#50303",
    Truth(LATE, (1,), COMPUTE, "lead", 100, soon=40, cause="CPU starved"),
)
def busy_core(job: Job) -> None:
    """Ranks compute on a core each, until somebody else's process takes one of them."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[job.rank]})
    job.build(wide(8, 512), layer_ms=0.0)
    other = None
    for step in job.steps(300):
        job.train(torch.randn(96, 512))
        if job.rank == 1 and step == 99:
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    if other is not None:
        other.kill()
        other.wait()


class Shards(Dataset[Tensor]):
    """Samples of which every so many are the first of a shard, which has to be fetched."""

    def __init__(self, count: int, each: int, seconds: float) -> None:
        self._count, self._each, self._seconds = count, each, seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if index % self._each == 0:
            torch.random.manual_seed(index)
            Samples.wait(self._seconds)
        return torch.zeros(WIDTH)


@case("mosaicml/composer#1074", Truth(("intermittent", "slow_input"), (1,), ("data",), "lead", 20, soon=90))
def shards_fetched(job: Job) -> None:
    """One rank fetches a shard every twenty batches, within its loop."""
    job.build()
    batches = iter(DataLoader(Shards(8 * 240, 160, 0.15 if job.rank == 1 else 0.0), batch_size=8))
    for _ in job.steps(240):
        job.train(fetch_late(job, batches))


@case("lucidrains/ema-pytorch#9", Truth(("straggler",), (0,), ("optimizer", "between"), "lead", soon=20))
def average_of_weights(job: Job) -> None:
    """Only rank 0 keeps an average of the weights, after each update."""
    job.build()
    for _ in job.steps(200):
        job.train()
        if job.rank == 0:
            job.pause(0.01)
        if job.step % 50 == 49:
            dist.barrier()
