"""Loops without a wrapper, one after the other: ``own_loops.py FOLDER``. Each is a run of its own.

Prints a digest of all parameters after each update. With ``DDPWATCH=0`` in the environment the same script is its own
unwatched twin.
"""

import hashlib
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.utils.data import DataLoader, TensorDataset

import ddpwatch

UPDATES = 12
LOOPS: dict[str, Callable[["Net"], None]] = {}


class Net(nn.Module):
    """A small net, its optimizer, and made-up batches."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.make = lambda parameters: optimizer(parameters, **{"lr": 0.1, **options})
        self.random = torch.Generator().manual_seed(dist.get_rank())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch)

    def batch(self) -> torch.Tensor:
        return torch.randn(4, 16, generator=self.random)

    def backward(self) -> torch.Tensor:
        loss = self(self.batch()).square().mean()
        loss.backward()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def told(self) -> None:
        raw = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
        print("parameters", hashlib.sha256(raw).hexdigest()[:16])


def loop(run: Callable[[Net], None]) -> Callable[[Net], None]:
    LOOPS[run.__name__] = run
    return run


@loop
def all_reduce(net: Net) -> None:
    """Averages each gradient by hand. A DataLoader feeds it."""
    optimizer = net.make(net.parameters())
    for (batch,) in DataLoader(TensorDataset(torch.randn(4 * UPDATES, 16, generator=net.random)), batch_size=4):
        net(batch).square().mean().backward()
        for gradient in net.gradients():
            dist.all_reduce(gradient)
        optimizer.step()
        optimizer.zero_grad()
        net.told()


@loop
def own_optimizer(net: Net) -> None:
    """The optimizer scatters gradients and gathers parameters, without waiting at once."""

    class Sharded(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            works = []
            for p in self.param_groups[0]["params"]:
                shard = torch.empty_like(p.grad[: len(p) // 2])
                dist.reduce_scatter_tensor(shard, p.grad)
                own = p[len(shard) * dist.get_rank() :][: len(shard)] - 0.1 * shard
                works.append(dist.all_gather_into_tensor(p.data, own, async_op=True))
            for work in works:
                work.wait()

    optimizer = Sharded(net.parameters(), lr=0.1)
    for _ in range(UPDATES):
        net.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.told()


@loop
def gan(net: Net) -> None:
    """Two models that are updated in turns, without communication."""
    other = nn.Linear(16, 1)
    optimizers = net.make(net.parameters()), net.make(other.parameters())
    for turn in range(UPDATES):
        value = other(net(net.batch())).mean() * (1 if turn % 2 else -1)
        value.backward()
        optimizers[turn % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        net.told()


@loop
def closures(net: Net) -> None:
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    batch = net.batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        return loss

    for _ in range(UPDATES):
        optimizer.step(closure)
        net.told()


@loop
def micro_batches(net: Net) -> None:
    """Their number changes, and two optimizers step for one update."""
    optimizers = net.make(net.layers[0].parameters()), net.make(net.layers[2].parameters())
    for update in range(UPDATES):
        for _ in range(1 + update % 3):
            net.backward()
        for gradient in net.gradients():
            dist.all_reduce(gradient)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        net.told()


@loop
def within_backward(net: Net) -> None:
    """Each parameter has an optimizer, which steps as soon as the gradient is there."""
    optimizers = {parameter: net.make([parameter]) for parameter in net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(UPDATES):
        net.backward()
        net.told()


@loop
def experts(net: Net) -> None:
    """Tokens travel in the forward and in the backward, in a group of the job's own."""
    group = dist.new_group([0, 1])
    optimizer = net.make(net.parameters())
    for _ in range(UPDATES):
        hidden = net.layers[0](net.batch())
        net.layers[2](all_to_all_single(torch.empty_like(hidden), hidden, group=group)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.told()


@loop
def pipeline(net: Net) -> None:
    """The first rank sends what the second takes, and gets its gradient back."""
    optimizer, first = net.make(net.parameters()), dist.get_rank() == 0
    for _ in range(UPDATES):
        if first:
            hidden = net(net.batch())
            dist.send(hidden.detach(), 1)
            dist.recv(gradient := torch.empty_like(hidden), 1)
            hidden.backward(gradient)
        else:
            dist.recv(given := torch.empty(4, 16), 0)
            net(given.requires_grad_()).square().mean().backward()
            dist.send(given.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
        net.told()


@loop
def skipped(net: Net) -> None:
    """Every third batch is left out, and one backward raises."""
    optimizer = net.make(net.parameters())
    for batch in range(UPDATES + UPDATES // 2):
        try:
            if batch == 4:
                raise_in_backward(net(net.batch())).mean().backward()
            net.backward()
        except ValueError as error:
            print(error)
        for gradient in net.gradients():
            dist.all_reduce(gradient)
        if batch % 3 < 2:
            optimizer.step()
            net.told()
        optimizer.zero_grad()


def raise_in_backward(tensor: torch.Tensor) -> torch.Tensor:
    def hook(gradient: torch.Tensor) -> None:
        raise ValueError("a gradient that nobody wants")

    tensor.register_hook(hook)
    return tensor


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, run in LOOPS.items():
        os.environ["DDPWATCH_RECORD_DIR"] = f"{sys.argv[1]}/{name}"
        torch.manual_seed(7)
        print(name)
        with ddpwatch.watch():
            run(Net())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
