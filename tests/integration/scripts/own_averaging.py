"""Ranks that communicate, though not as DDP does by default: ``own_averaging.py FOLDER``. Each loop is a run.

An object of a class as the output; local SGD, whose hook reduces in a group of one rank after a while; and parameters
that are averaged by hand, now and then, with a hook that communicates nothing, and without any reduction.
"""

import contextlib
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import ddpwatch

STEPS = 24
PERIOD = 4


class Answer:
    """What a forward returns: an object, which holds its tensor in a list of objects."""

    def __init__(self, values: torch.Tensor, depth: int = 2) -> None:
        self.parent = self  # a cycle
        self.parts = [values] if depth == 0 else [None, Answer(values, depth - 1)]


class Answering(nn.Linear):
    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(super().forward(x))


def values_of(output: object) -> torch.Tensor:
    while isinstance(output, Answer):
        output = output.parts[-1]
    assert isinstance(output, torch.Tensor)
    return output


def train(
    name: str,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    reduces: bool = True,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    os.environ["DDPWATCH_RECORD_DIR"] = f"{sys.argv[1]}/{name}"
    with ddpwatch.watch(ddp):
        for step in range(STEPS):
            with contextlib.nullcontext() if reduces else ddp.no_sync():
                values_of(ddp(torch.ones(2, 8))).sum().backward()
            optimizer.step()
            after_step(step)
            optimizer.zero_grad()


def averaging(ddp: nn.Module) -> Callable[[int], None]:
    """Averages the parameters by hand after every few steps."""

    def average(step: int) -> None:
        for parameter in ddp.parameters() if step % PERIOD == PERIOD - 1 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    return average


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def wrapped(module: nn.Module) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        ddp = DistributedDataParallel(module)
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)

    train("object", *wrapped(Answering(8, 8)))
    ddp, optimizer = wrapped(nn.Linear(8, 8))
    ddp.register_comm_hook(PostLocalSGDState(None, alone, PERIOD), post_localSGD_hook)
    train("local_sgd", ddp, PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(PERIOD, PERIOD)))
    ddp, optimizer = wrapped(nn.Linear(8, 8))
    ddp.register_comm_hook(None, noop_hook)
    train("idle_hook", ddp, optimizer, after_step=averaging(ddp))
    ddp, optimizer = wrapped(nn.Linear(8, 8))
    train("no_sync", ddp, optimizer, reduces=False, after_step=averaging(ddp))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
