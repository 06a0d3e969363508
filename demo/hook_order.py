"""Shows when gradient hooks fire in the reverse order of the forward, and when they do not.

    python demo/hook_order.py

It needs one process and no communication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A chain of two layers, and a shortcut around it that runs last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shortcut = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the shortcut to the chain."""
        chain = self.second(torch.relu(self.first(x)))
        total: Tensor = chain + self.shortcut(x)
        return total


class OtherOrder(nn.Module):
    """Layers whose order of declaration is not the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs_last, self.runs_first, self.runs_second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Runs them in the order of their names."""
        y: Tensor = self.runs_last(torch.relu(self.runs_second(torch.relu(self.runs_first(x)))))
        return y


class Branches(nn.Module):
    """Two branches of the same depth over the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.right = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the branches."""
        total: Tensor = self.left(x) + self.right(x)
        return total


class Shared(nn.Module):
    """A layer that runs first and again last, like a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the shared layer before and after the middle one."""
        y: Tensor = self.shared(torch.relu(self.middle(torch.relu(self.shared(x)))))
        return y


class Unused(nn.Module):
    """A layer that the forward does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skipped, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Skips a layer."""
        y: Tensor = self.last(torch.relu(self.first(x)))
        return y


@dataclass(frozen=True)
class Case:
    """A model, and what its hooks show."""

    title: str
    build: Callable[[], nn.Module]
    lesson: str


CASES = (
    Case(
        "a chain",
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        "Backward walks the chain from its end. DDP's first buckets assume this reverse order.",
    ),
    Case(
        "declared in another order",
        OtherOrder,
        "The order in which layers ran counts. DDP learns it in its first step and rebuilds its buckets.",
    ),
    Case(
        "a shortcut",
        Residual,
        "Of the nodes that are ready, autograd takes the one that forward created last: still the reverse.",
    ),
    Case(
        "two branches",
        Branches,
        "Both could start at once; autograd finishes the one that ran last, then takes the other.",
    ),
    Case(
        "a layer used twice",
        Shared,
        "Its gradient is complete only after its first use: it fires last although it also ran last.",
    ),
    Case(
        "a layer not used",
        Unused,
        "It never fires, so waiting for it never ends; hence find_unused_parameters and the trainer's flags.",
    ),
)


@dataclass(frozen=True)
class Observation:
    """Layers in the order of their last call in forward, and in the order in which their gradients became complete."""

    forward: list[str]
    fired: list[str]

    @property
    def is_reverse(self) -> bool:
        """Whether gradients became complete in the reverse order of the forward."""
        return self.fired == self.forward[::-1]


def observe(model: nn.Module) -> Observation:
    """Runs forward and backward once, and records the order of both."""
    forward: list[str] = []
    fired: list[str] = []
    for name, layer in model.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_hook(partial(_move_to_end, forward, name))
            for parameter in layer.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(partial(_move_to_end, fired, name))
    model(torch.ones(2, 4)).sum().backward()
    return Observation(forward, fired)


def _move_to_end(order: list[str], name: str, *_: object) -> None:
    """Appends the layer: its last call counts, and its gradient is complete with its last parameter."""
    if name in order:
        order.remove(name)
    order.append(name)


def main() -> int:
    """Prints every case."""
    for case in CASES:
        seen = observe(case.build())
        verdict = "the reverse" if seen.is_reverse else "NOT the reverse"
        print(f"{case.title}: {verdict}")
        print(f"  forward   {' -> '.join(seen.forward)}")
        print(f"  gradients {' -> '.join(seen.fired)}")
        print(f"  {case.lesson}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
