"""Cases of how a job is built: what it sends, how even its work is, how many threads it has."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.field.case import Truth, case
from tests.support.field.job import BATCH, WIDTH, Job
from tests.support.field.loops import Samples, wide


@case("Lightning-AI/pytorch-lightning#4092", Truth(("repeated_reduction",), cost="repeated", says="no_sync", soon=20))
def reduced_four_times(job: Job) -> None:
    """Gradients of four batches are added up, and reduced four times."""
    model = job.build(wide(6, 1024), layer_ms=0.0)
    for _ in job.steps(60):
        job.optimizer.zero_grad()
        for _ in range(4):
            job.backward(model(torch.randn(BATCH, 1024)).square().mean())
        job.optimizer.step()


@case("huggingface/accelerate#1153", Truth(("repeated_reduction",), cost="repeated", says="no_sync", soon=20), ranks=3)
def no_sync_misplaced(job: Job) -> None:
    """`no_sync` stands around the backward only, where it has no effect: the forward decides."""
    model = job.build(wide(4, 1024), layer_ms=0.0)
    for _ in job.steps(60):
        job.optimizer.zero_grad()
        for batch in range(2):
            loss = model(torch.randn(BATCH, 1024)).square().mean()
            if batch:
                job.backward(loss)
                continue
            with model.no_sync():
                job.backward(loss)
        job.optimizer.step()


class Embedded(nn.Module):
    """An embedding that most of the gradients belong to, and layers."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(rows, WIDTH), wide(5)

    def forward(self, words: Tensor) -> Tensor:
        """Returns what is made of the words."""
        return self.layers(self.embedding(words).mean(1))


@case("arXiv:2006.15704 (the paper on DDP)", Truth(("exposed_comm",), cost="exposed", says="embedding", soon=60))
def large_embedding(job: Job) -> None:
    """A dense embedding comes last, and nothing hides its 60 MB."""
    job.build(Embedded(120_000))
    for _ in job.steps(100):
        job.train(torch.randint(0, 120_000, (BATCH, 16)))


class Statistics(nn.Module):
    """Layers beside buffers, such as statistics of many features."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = wide(5)
        self.register_buffer("statistics", torch.zeros(size))

    def forward(self, batch: Tensor) -> Tensor:
        """Returns what the layers make of a batch."""
        return self.layers(batch)


@case("ultralytics/ultralytics#24410", Truth(("exposed_comm", "buffers"), says="broadcast_buffers", soon=60))
def buffers_each_step(job: Job) -> None:
    """DDP sends 32 MB of buffers before each forward."""
    job.build(Statistics(8_000_000))
    for _ in job.steps(120):
        job.train()


@case("lightseekorg/TorchSpec#13", Truth(("imbalance",), cost="jitter", says="length", soon=100))
def lengths_vary(job: Job) -> None:
    """Each rank's batch is padded to its longest sequence: a different rank is last each step."""
    job.build()
    dice = random.Random(job.rank)
    for _ in job.steps(300):
        job.train(slower=max(dice.lognormvariate(0, 0.5) for _ in range(2)) / 1.4)


@case("Helsinki-NLP/mammoth#55", Truth(("imbalance",), cost="jitter", says="length|batch", soon=100), ranks=4)
def graphs_vary(job: Job) -> None:
    """Batches of graphs have as many graphs, and anything between half and twice the usual number of nodes."""
    job.build()
    dice = random.Random(100 + job.rank)
    for _ in job.steps(240):
        job.train(slower=2 ** dice.uniform(-1, 1))


@case(
    "pytorch/pytorch#22260",
    Truth(("too_many_threads",), cause="CPU starved", says="OMP_NUM_THREADS"),
    OMP_NUM_THREADS="8",
)
def too_many_threads(job: Job) -> None:
    """Eight threads a rank fight for two cores."""
    job.build(wide(8, 512), layer_ms=0.0)
    for _ in job.steps(120):
        job.train(torch.randn(128, 512))


@case("DIVA-DIA/DIVA-DAF#19", Truth(("slow_input",), (), ("data",), "struck", says="num_workers", soon=20))
def loader_without_workers(job: Job) -> None:
    """The loop loads its samples itself, on all ranks."""
    job.build()
    batches = iter(DataLoader(Samples(8 * 160, 0.002), batch_size=8))
    for _ in job.steps(160):
        with job.strike():
            batch = next(batches)
        job.train(batch)


@case(
    "NVIDIA-NeMo/Automodel#2468",
    Truth(("ranks_apart",), (1,), says="skip", since=80, soon=20, beside=("hang", "death")),
    fails=True,
)
def backward_left_out(job: Job) -> None:
    """One rank skips a batch at step 80, and is one update ahead from then on."""
    job.build(timeout_s=15)
    for step in job.steps(160):
        job.optimizer.zero_grad()
        loss = job.loss()
        if job.rank == 1 and step == 80:
            continue
        job.backward(loss)
        job.optimizer.step()


@case("OpenTSLM/OpenTSLM#49", Truth(("no_steps",), says=r"not model\.module"))
def wrapper_passed_by(job: Job) -> None:
    """The loop calls the module that DDP wraps, so nobody reduces its gradients."""
    model = job.build()
    for _ in job.steps(120):
        job.optimizer.zero_grad()
        job.backward(model.module(job.batch()).square().mean())
        job.optimizer.step()


@case("pytorch/pytorch#118421", Truth(("exposed_comm",), cost="exposed", says="bucket", soon=60))
def buckets_too_small(job: Job) -> None:
    """Hundreds of small parameters in buckets of their own."""
    job.build(nn.Sequential(wide(2), *[nn.LayerNorm(WIDTH) for _ in range(200)]), bucket_cap_mb=0.0005)
    for _ in job.steps(100):
        job.train()


@case("sb-ai-lab/RePlay#100", Truth(("exposed_comm", "imbalance"), cost="jitter", soon=100), ranks=3)
def metrics_reduced_each_step(job: Job) -> None:
    """Two metrics are reduced after each step, of ranks whose batches vary."""
    job.build()
    dice = random.Random(200 + job.rank)
    for _ in job.steps(200):
        job.train(slower=dice.uniform(0.7, 1.3))
        for _ in range(2):
            dist.all_reduce(torch.zeros(1))
