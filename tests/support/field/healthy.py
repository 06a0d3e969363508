"""Cases of which nothing is to be said: jobs that are unusual, and well."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.utils.data import DataLoader

from tests.support.field.case import HEALTHY, Truth, case
from tests.support.field.job import Job
from tests.support.field.loops import Samples, validate, wide


@case("nobody: it is well", HEALTHY)
def plain_compute(job: Job) -> None:
    """Real compute on shared cores, with its natural noise."""
    job.build(wide(8, 512), layer_ms=0.0)
    for _ in job.steps(400):
        job.train(torch.randn(96, 512))


@case("nobody: it is well", HEALTHY)
def epochs_with_validation(job: Job) -> None:
    """A loader that keeps up; short validations of all ranks, small checkpoints of rank 0."""
    job.build()
    batches = iter(DataLoader(Samples(8 * 300, 0.001), batch_size=8, num_workers=1))
    for step in job.steps(300):
        job.train(job.fetch(batches))
        if step % 50 == 49:
            validate(job, 6)
        if step % 100 == 99 and job.rank == 0:
            torch.save(job.model.module.state_dict(), job.folder / "checkpoint.pt")


@case("huggingface/open-r1#161", HEALTHY)
def acting_and_learning(job: Job) -> None:
    """Turns of acting without gradients, and of updates, as PPO's."""
    job.build()
    for turn in range(6):
        with torch.no_grad():
            for _ in range(32):
                job.model.module(job.batch())
                time.sleep(0.02)
        for _ in job.steps(16 + turn % 2):
            job.train()


@case("huggingface/trl#2887", HEALTHY)
def long_generation(job: Job) -> None:
    """All ranks generate for longer than a hang takes to be one, between updates."""
    job.build()
    for turn in range(2):
        if turn:
            time.sleep(33)
        for _ in job.steps(40):
            job.train()


@case("pytorch/pytorch#62131", HEALTHY)
def local_sgd(job: Job) -> None:
    """Parameters are averaged every four steps once the model has warmed up, and gradients no longer reduced."""
    model = job.build()
    own = [dist.new_group([rank]) for rank in range(job.world)][job.rank]
    model.register_comm_hook(PostLocalSGDState(None, own, 20), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=20)
    job.optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), averager)
    for _ in job.steps(120):
        job.train()


@case("meta-pytorch/torchft#76", Truth(updates=120))
def outer_steps(job: Job) -> None:
    """Ten inner steps without a reduction, then the ranks' differences are reduced, as DiLoCo does."""
    model = job.build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in job.steps(120):
        with model.no_sync():
            job.train()
        if step % 10 == 9:
            with torch.no_grad():
                for parameter, old in zip(model.parameters(), before, strict=True):
                    difference = old - parameter
                    dist.all_reduce(difference)
                    old.sub_(difference / job.world)
                    parameter.copy_(old)


@case("pytorch/pytorch#30439", Truth(updates=30))
def closures(job: Job) -> None:
    """LBFGS calls the closure several times an update."""
    model = job.build(wide(3))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    batch = job.batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = job.loss(batch)
        job.backward(loss)
        return loss

    for _ in job.steps(30):
        optimizer.step(closure)


@case("Red-Hat-AI-Innovation-Team/mini_trainer#79", Truth(updates=100))
def exits_at_once(job: Job) -> None:
    """The job ends by `os._exit`, as some do whose threads would keep it."""
    job.build()
    for _ in job.steps(100):
        job.train()
    job.write_notes()
    dist.barrier()
    os._exit(0)


@case("karpathy/nanoGPT#34", Truth(updates=60))
def accumulation(job: Job) -> None:
    """Gradients of four batches are added up, and reduced once."""
    model = job.build(wide(3, 512))
    for _ in job.steps(60):
        job.optimizer.zero_grad()
        for batch in range(4):
            with model.no_sync() if batch < 3 else nullcontext():
                job.backward(model(torch.randn(8, 512)).square().mean())
        job.optimizer.step()


@case("mozilla/DeepSpeech#384", Truth(("slow_device",), phases=("forward", "backward"), says="lengths"))
def longer_sequences(job: Job) -> None:
    """A curriculum: from some step on, all ranks' sequences are half as long again."""
    job.build()
    for step in job.steps(240):
        job.train(slower=1.5 if step >= 120 else 1.0)


@case("pytorch/pytorch#97783", HEALTHY)
def slow_start(job: Job) -> None:
    """The first steps compile and tune for seconds, on all ranks."""
    job.build()
    for step in job.steps(120):
        job.train(slower=20.0 if step < 3 else 1.0)


@case("m2lines/Samudra#630", HEALTHY)
def unused_looked_for(job: Job) -> None:
    """DDP looks for unused parameters, and all are used."""
    job.build(find_unused_parameters=True)
    for _ in job.steps(150):
        job.train()
