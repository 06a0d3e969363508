"""Trains a GPT on two ranks, and says itself what ddpwatch's report says: tokens/s, MFU, and how memory grows.

    DDPWATCH_PEAK_TFLOPS=0.5 torchrun --nproc-per-node=2 benchmarks/counted_job.py 300 [MB]
    ddpwatch report counted.mcap

With MB, rank 1 keeps so many of them in each step. Both leave out the first step.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from trainer.models.gpt import GPT

STEPS, KEPT_MB = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
BATCH, LENGTH, WIDTH = 8, 128, 128


def main() -> None:
    """Trains, and prints its own figures."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(GPT(256, WIDTH, 2, 4, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[bytes] = []
    ends: list[float] = []
    with ddpwatch.watch(model, record="counted.mcap"):
        for _ in range(STEPS):
            tokens = torch.randint(256, (BATCH, LENGTH))
            ddpwatch.count(tokens=tokens.numel())
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 1 and KEPT_MB:
                kept.append(b"x" * round(KEPT_MB * 1e6))
            ends.append(time.monotonic())
    if dist.get_rank() == 0:
        rate = dist.get_world_size() * BATCH * LENGTH * (STEPS - 1) / (ends[-1] - ends[0])
        flops = 6 * sum(parameter.numel() for parameter in model.parameters()) * rate
        peak = 1e12 * dist.get_world_size() * float(os.environ.get("DDPWATCH_PEAK_TFLOPS", "nan"))
        print(f"its own count: {rate:,.1f} tokens/s, MFU {100 * flops / peak:.4f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
