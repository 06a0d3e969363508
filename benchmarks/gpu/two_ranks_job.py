"""The job of `two_ranks`: two ranks that share a GPU, over NCCL. It knows nothing of ddpwatch.

    torchrun --nproc-per-node=2 benchmarks/gpu/two_ranks_job.py CASE [--device cpu]

Prints a digest of each rank's parameters, and the time of a step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

STEPS, FAULTY_RANK = 60, 1
LATE_MS, HANG_STEP, HANG_S = 60.0, 30, 12.0
LAYERS, BUCKET_MB = 8, 4.0
SIZES = {"cuda": (1024, 512), "cpu": (128, 32)}  # width, batch


class Case(NamedTuple):
    """What is special about a job.

    Attributes:
        strategy: DDP or FSDP2.
        fault: Of the faulty rank: "late host" and "late GPU" between forward and backward, "hang" between two steps.
        reads_loss: Whether each step waits for its loss.
        backend: None is the device's.
        on_cpu: Whether it is run without a GPU, too.
    """

    strategy: str = "ddp"
    fault: str = ""
    reads_loss: bool = False
    backend: str | None = None
    on_cpu: bool = False


CASES = {
    "plain": Case(),
    "hang": Case(fault="hang", on_cpu=True),
    "hang, reads the loss": Case(fault="hang", reads_loss=True),
    "late host": Case(fault="late host"),
    "late GPU": Case(fault="late GPU"),
    "FSDP2": Case(strategy="fsdp2", on_cpu=True),
    "late host, Gloo": Case(fault="late host", backend="gloo"),
}


def share_gpu(rank: int) -> None:
    """NCCL < 2.30 refuses two ranks of a host on one GPU: each says that it is a host of its own."""
    os.environ.update(
        NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket", NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_MNNVL_ENABLE="0", NCCL_NVLS_ENABLE="0", NCCL_RAS_ENABLE="0",
        NCCL_MAX_CTAS="4", NCCL_MULTI_RANK_GPU_ENABLE="1",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    args = parser.parse_args()
    case = CASES[args.case]
    rank = int(os.environ["RANK"])
    share_gpu(rank)
    import torch
    import torch.distributed as dist

    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    dist.init_process_group(case.backend or ("nccl" if device.type == "cuda" else "gloo"))
    width, batch = SIZES[device.type]
    model = made(case, device, width)
    cycles = cycles_per_ms() if case.fault == "late GPU" else 0.0
    start = time.perf_counter()
    train(model, torch.randn(batch, width, device=device), case, case.fault if rank == FAULTY_RANK else "", cycles)
    if device.type == "cuda":
        torch.cuda.synchronize()
    took_ms = (time.perf_counter() - start) / STEPS * 1e3
    print(f"parameters {rank} {digest(model.parameters())}", flush=True)
    if rank == 0:
        print(f"step {took_ms:.3f} ms", flush=True)
    time.sleep(0.5)  # Gloo's thread drops its last work, for which it takes the GIL: else a group's end may wait for it
    dist.destroy_process_group()


def made(case: Case, device: Any, width: int) -> Any:
    """The model, data-parallel."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 16)).to(device)
    if case.strategy == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def cycles_per_ms() -> float:
    """How many cycles `torch.cuda._sleep` takes for a millisecond."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    torch.cuda.synchronize()
    return 20_000_000 / start.elapsed_time(end)


def train(model: Any, data: Any, case: Case, fault: str, cycles: float) -> None:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        if fault == "hang" and step == HANG_STEP:
            time.sleep(HANG_S)
        loss = model(data).square().mean()
        if fault == "late GPU":
            torch.cuda._sleep(round(cycles * LATE_MS))
        elif fault == "late host":
            time.sleep(LATE_MS / 1e3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if case.reads_loss:
            loss.item()


def digest(parameters: Iterator[Any]) -> str:
    """Of this rank's parameters, or of its part of them."""
    found = hashlib.sha256()
    for parameter in parameters:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.update(local.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    main()
