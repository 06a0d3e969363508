"""What watching costs: the same job with and without, block by block in one run, as ratios with their intervals.

    torchrun --standalone --nproc-per-node=2 benchmarks/overhead.py

The reference step has 300 parameters in about 25 buckets and takes around 100 ms on two cores. Every way to train is a
DDP module of its own with the same weights and data; blocks of steps alternate between them, and each block is compared
with the plain block of the same round, so that a noisy machine is equally noisy to all. `plain again` is the noise
floor. The idle sender thread and the optimizer's hooks of ddpwatch are there in every block; they are not in its cost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ddpwatch
from ddpwatch.analysis.render import table

LAYERS, WIDTH, BATCH = 150, 256, 192
Block = Callable[[], float]


class Way:
    """One way to train: a model, and what surrounds a block of its steps."""

    def __init__(self, prepare: Callable[[DistributedDataParallel], None], profiled: bool = False) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1.6)
        prepare(self.ddp)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.data = torch.randn(BATCH, WIDTH)
        self.profiled = profiled

    def block(self, steps: int) -> float:
        """Trains; seconds per step (median), with all ranks starting together."""
        dist.barrier()
        times = []
        with profile(activities=[ProfilerActivity.CPU]) if self.profiled else nullcontext():
            for _ in range(steps):
                begin = time.perf_counter()
                self.ddp(self.data).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                times.append(time.perf_counter() - begin)
        return statistics.median(times)


def python_hooks(ddp: DistributedDataParallel) -> None:
    """A Python hook per parameter that does nothing but take the time."""

    def stamp(param: torch.Tensor) -> None:
        time.monotonic_ns()

    for param in ddp.parameters():
        param.register_post_accumulate_grad_hook(stamp)


def ways() -> dict[str, Way]:
    """What is compared."""

    def nothing(ddp: DistributedDataParallel) -> None:
        pass

    def watched(ddp: DistributedDataParallel) -> None:
        ddpwatch.watch(ddp)

    return {
        "plain": Way(nothing),
        "plain again": Way(nothing),
        "ddpwatch": Way(watched),
        "a Python hook per parameter": Way(python_hooks),
        "torch.profiler, always on": Way(nothing, profiled=True),
    }


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contestants = ways()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for way in contestants.values():
        way.block(3)  # warm-up bucket, rebuild, caches
    order = random.Random(1)
    for _ in range(args.rounds):
        for name in order.sample(list(contestants), len(contestants)):
            seconds[name].append(contestants[name].block(args.steps))
    if dist.get_rank() == 0:
        report(seconds)
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]]) -> None:
    rows = []
    for name, values in seconds.items():
        ratios = [value / plain for value, plain in zip(values, seconds["plain"], strict=True)]
        low, high = interval(ratios)
        cost = f"{100 * (statistics.median(ratios) - 1):+.2f} %"
        rows.append(
            [
                name,
                f"{1000 * statistics.median(values):.1f}",
                cost,
                f"{100 * (low - 1):+.2f} … {100 * (high - 1):+.2f} %",
            ]
        )
    print("\n".join(table(["", "step ms (p50)", "cost (p50)", "95 % interval"], rows)))


if __name__ == "__main__":
    main()
