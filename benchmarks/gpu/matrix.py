"""Kinds of DDP jobs, watched and unwatched, under NCCL in a world of one: equal parameters, and stamps that come.

    python benchmarks/gpu/matrix.py

Takes a quarter of a minute. Without a GPU, the same on the CPU over Gloo.

The columns:
    case         what is special about the job
    equal        whether the parameters and buffers are bit-identical with and without a probe
    repeatable   whether those of two unwatched jobs are; if not, `equal` says nothing
    more MiB     by how much the probe raises the peak of GPU memory
    ok           steps that were recorded in full, of 12; the first is warm-up
    buckets      of the last two steps
    done         collectives with a completion, of all that were launched
    in order     whether each was launched, started and done in that order
    error        of the probe, or of the job
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.job import Watched, nccl_alone
from benchmarks.gpu.part import Row, run
from ddpwatch.probe.record import StepRecord

STEPS, WIDTH = 12, 512


class Net(nn.Module):
    """Linear layers.

    Args:
        unused: Whether a layer takes part in every third forward only.
        norm: Whether a batch norm has buffers.
        checkpointed: Whether activations are computed again in the backward.
    """

    def __init__(self, unused: bool = False, norm: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.extra = nn.Linear(WIDTH, WIDTH) if unused else None
        self.checkpointed = checkpointed
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes an output for a batch."""
        self.calls += 1
        for layer in self.layers:
            x = (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)).relu()
        if self.extra is not None and self.calls % 3 == 0:
            x = self.extra(x)
        normed: torch.Tensor = self.norm(x)
        return normed


def plain(ddp: DistributedDataParallel, data: torch.Tensor) -> None:
    ddp(data).float().square().mean().backward()


def accumulating(ddp: DistributedDataParallel, data: torch.Tensor) -> None:
    with ddp.no_sync():
        plain(ddp, data)
    plain(ddp, data)


def autocast(ddp: DistributedDataParallel, data: torch.Tensor) -> None:
    with torch.autocast(data.device.type, torch.bfloat16):
        loss = ddp(data).float().square().mean()
    loss.backward()


def in_join(ddp: DistributedDataParallel, data: torch.Tensor) -> None:
    with ddp.join():
        plain(ddp, data)


def on_side_stream(ddp: DistributedDataParallel, data: torch.Tensor) -> None:
    side, current = torch.cuda.Stream(data.device), torch.cuda.current_stream(data.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        plain(ddp, data)
    current.wait_stream(side)


def power_sgd(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=4, matrix_approximation_rank=1, random_seed=1)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def comm_hook(ddp: DistributedDataParallel, name: str) -> None:
    ddp.register_comm_hook(None, getattr(default_hooks, name))


def built_in(ddp: DistributedDataParallel, name: str) -> None:
    ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))


def mixed_precision() -> dict[str, Any]:
    return {"mixed_precision": _MixedPrecision(torch.float16, torch.float16, torch.float16)}


class Case(NamedTuple):
    """A kind of job.

    Attributes:
        net: Arguments of `Net`.
        ddp: Arguments of DDP.
        hook: Registers a comm hook.
        before_watch: Whether it does so before the probe comes.
        backward: Forward and backward.
        momentum: Of SGD.
        on_cpu: Whether it also works there.
    """

    net: Mapping[str, bool] = MappingProxyType({})
    ddp: Callable[[], dict[str, Any]] = dict
    hook: Callable[[DistributedDataParallel], None] = lambda ddp: None
    before_watch: bool = False
    backward: Callable[[DistributedDataParallel, torch.Tensor], None] = plain
    momentum: float = 0.0
    on_cpu: bool = True


CASES = {
    "plain": Case(),
    "static graph": Case(ddp=lambda: {"static_graph": True}),
    "unused parameters": Case(net={"unused": True}, ddp=lambda: {"find_unused_parameters": True}),
    "bucket view": Case(ddp=lambda: {"gradient_as_bucket_view": True}),
    "bf16 hook": Case(hook=partial(comm_hook, name="bf16_compress_hook"), on_cpu=False),  # torch refuses that
    "fp16 hook": Case(hook=partial(comm_hook, name="fp16_compress_hook")),
    "PowerSGD": Case(hook=power_sgd, on_cpu=False),  # it waits for Gloo on both of Gloo's threads
    "built-in fp16": Case(hook=partial(built_in, name="FP16_COMPRESS")),
    "built-in all-reduce": Case(hook=partial(built_in, name="ALLREDUCE")),
    "hook before watch": Case(hook=partial(comm_hook, name="fp16_compress_hook"), before_watch=True),
    "batch norm": Case(net={"norm": True}),
    "checkpointing": Case(net={"checkpointed": True}),
    "accumulation": Case(backward=accumulating),
    "autocast": Case(backward=autocast),
    "join": Case(backward=in_join),
    "momentum": Case(momentum=0.9),
    "device_ids": Case(ddp=lambda: {"device_ids": [0]}, on_cpu=False),
    "side stream": Case(backward=on_side_stream, on_cpu=False),
    "mixed precision": Case(ddp=mixed_precision, on_cpu=False),
}


def on_gpu() -> Iterator[Row]:
    device = torch.device("cuda", 0)
    nccl_alone(device)
    yield from all_cases(device, CASES)
    dist.destroy_process_group()


def simulated() -> Iterator[Row]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield from all_cases(torch.device("cpu"), [name for name, case in CASES.items() if case.on_cpu])
    dist.destroy_process_group()


def all_cases(device: torch.device, names: Iterable[str]) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in names:
        try:
            first, again = (train(CASES[name], device, watch=False) for _ in range(2))
            watched = train(CASES[name], device, watch=True)
        except Exception as error:
            yield row(name, error=f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        more = None if watched.peak is None or again.peak is None else (watched.peak - again.peak) / (1 << 20)
        yield row(name, first.digest == watched.digest, first.digest == again.digest, more, watched)


class Trained(NamedTuple):
    """What became of a job.

    Attributes:
        peak: Of GPU memory, in bytes.
    """

    digest: str
    peak: int | None
    records: list[StepRecord]
    errors: list[Exception]


def train(case: Case, device: torch.device, watch: bool) -> Trained:
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream that has multiplied matrices
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ddp = DistributedDataParallel(Net(**case.net).to(device), bucket_cap_mb=2, **case.ddp())
    if case.before_watch:
        case.hook(ddp)
    job = Watched(ddp, device, watch=watch)
    if not case.before_watch:
        case.hook(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2, momentum=case.momentum)
    data = torch.randn(64, WIDTH, device=device)
    for _ in range(STEPS):
        case.backward(ddp, data)
        job.update(optimizer)
        optimizer.zero_grad()
    digest = job.finish()
    return Trained(digest, torch.cuda.max_memory_allocated() if cuda else None, job.records, job.errors)


def row(
    name: str,
    equal: bool | None = None,
    repeatable: bool | None = None,
    more_mib: float | None = None,
    watched: Trained | None = None,
    error: str | None = None,
) -> Row:
    steady = [record for record in watched.records if record.status == "ok"] if watched else []
    buckets = [bucket for record in steady for bucket in record.buckets]
    done = [bucket for bucket in buckets if bucket.done is not None]
    errors = [f"{type(one).__name__}: {one}".splitlines()[0] for one in watched.errors] if watched else []
    return {
        "case": name,
        "equal": equal,
        "repeatable": repeatable,
        "more MiB": more_mib,
        "ok": len(steady),
        "buckets": ", ".join(str(len(record.buckets)) for record in steady[-2:]),
        "done": f"{len(done)} of {len(buckets)}",
        "in order": all(b.launch <= (b.start or b.launch) <= (b.done or 0) for b in done),
        "error": error or next(iter(errors), None),
    }


if __name__ == "__main__":
    sys.exit(run("matrix", __doc__, on_gpu, simulated))
