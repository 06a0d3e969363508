"""Four ranks in two data-parallel groups, (0, 1) and (2, 3). Layers sleep instead of computing.

    groups.py RECORDING [FIRST]

Rank 3 is slow. In the first group, every tenth batch of rank 1 is bad: it skips that batch and does not count it, while
rank 0 takes the step without synchronising. A job of two ranks is one of these groups alone, that of rank FIRST.
"""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from tests.integration.scripts.group_numbers import BAD_EVERY, NAP_S, SLOW_S, STEPS


class Layer(nn.Linear):
    """A layer whose forward sleeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_S)
        return super().forward(x)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = dist.get_rank() + int(*sys.argv[2:])
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if dist.get_world_size() == 4 else [None, None]
    group = groups[rank // 2]
    model = DistributedDataParallel(nn.Sequential(*[Layer(8, 8) for _ in range(3)]), process_group=group)
    if rank == 3:
        model.module[1].register_full_backward_pre_hook(lambda *_: time.sleep(SLOW_S))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpwatch.watch(model, record=sys.argv[1]):
        for batch in range(STEPS):
            bad = torch.tensor(float(rank == 1 and batch % BAD_EVERY == BAD_EVERY - 1))
            dist.all_reduce(bad, group=group)
            if bad and rank == 1:
                continue
            with model.no_sync() if bad else contextlib.nullcontext():
                model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()  # the faster group waits: alone, it may end before each of its ranks has found a collector
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
