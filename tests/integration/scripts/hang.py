"""Two ranks train in steps that are not watched; rank 1 stays in the backward of the sixth, between its two buckets."""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from ddpwatch.probe import session

HANGS = 5


class Stay(torch.autograd.Function):
    """The identity; its gradient comes when it is told to come, or never."""

    come = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Stay.come.wait()
        return gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(Stay.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return output


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddpwatch.watch(model)
    assert session.current is not None
    pace = session.current.recorder.sampling
    assert pace is not None
    pace.is_bare = lambda step: step >= 2  # type: ignore[method-assign]
    Stay.come.set()
    for step in range(HANGS + 1):
        if step == HANGS and dist.get_rank() == 1:
            Stay.come.clear()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
