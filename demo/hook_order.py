"""Show that gradient hooks fire in the reverse order of the forward, and where they do not.

Run it as ``python demo/hook_order.py``; it needs one process and no communication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A chain of two layers, and a shortcut around it that is computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shortcut = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut to the chain."""
        chain = self.second(torch.relu(self.first(x)))
        total: Tensor = chain + self.shortcut(x)
        return total


class OtherOrder(nn.Module):
    """Layers that are declared in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.runs_last, self.runs_first, self.runs_second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Run them in the order of their names."""
        y: Tensor = self.runs_last(torch.relu(self.runs_second(torch.relu(self.runs_first(x)))))
        return y


class Branches(nn.Module):
    """Two branches of the same depth over the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.right = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Add them."""
        total: Tensor = self.left(x) + self.right(x)
        return total


class Shared(nn.Module):
    """A layer that is used at the start and again at the end (like a tied embedding)."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Use it twice."""
        y: Tensor = self.shared(torch.relu(self.middle(torch.relu(self.shared(x)))))
        return y


class Unused(nn.Module):
    """A layer that a forward does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skipped, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Leave one out."""
        y: Tensor = self.last(torch.relu(self.first(x)))
        return y


@dataclass(frozen=True)
class Case:
    """A model and what its hooks teach."""

    title: str
    build: Callable[[], nn.Module]
    lesson: str


CASES = (
    Case(
        "a chain",
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        "Backward walks the chain from its end. Reverse order is the rule that DDP's first buckets count on.",
    ),
    Case(
        "declared in another order",
        OtherOrder,
        "What counts is the order in which layers ran. DDP learns it in its first step and rebuilds its buckets.",
    ),
    Case(
        "a shortcut",
        Residual,
        "Among nodes whose gradient is known, autograd takes the one that forward created last: still the reverse.",
    ),
    Case(
        "two branches",
        Branches,
        "Both could start at once; autograd works through the one that ran last, then through the other.",
    ),
    Case(
        "a layer used twice",
        Shared,
        "Its gradient is complete only with its first use: it fires last, although it also ran last. NOT the reverse.",
    ),
    Case(
        "a layer not used",
        Unused,
        "It never fires. Whoever waits for it waits forever; hence find_unused_parameters, and flags in our buckets.",
    ),
)


@dataclass(frozen=True)
class Observation:
    """Layers in the order of their last call in forward, and in the order in which their gradients were complete."""

    forward: list[str]
    fired: list[str]

    @property
    def is_reverse(self) -> bool:
        """Tell whether one is the other backwards."""
        return self.fired == self.forward[::-1]


def observe(model: nn.Module) -> Observation:
    """Run forward and backward once, and note the order of both."""
    forward: list[str] = []
    fired: list[str] = []
    for name, layer in model.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_hook(partial(_note_call, forward, name))
            for parameter in layer.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(partial(_note_fire, fired, name))
    model(torch.ones(2, 4)).sum().backward()
    return Observation(forward, fired)


def _note_call(order: list[str], name: str, *_: object) -> None:
    if name in order:  # used again: its last use counts
        order.remove(name)
    order.append(name)


def _note_fire(order: list[str], name: str, _: Tensor) -> None:
    if name in order:  # a layer's gradient is complete with its last parameter
        order.remove(name)
    order.append(name)


def main() -> int:
    """Show every case."""
    for case in CASES:
        seen = observe(case.build())
        verdict = "reverse" if seen.is_reverse else "NOT the reverse"
        print(f"{case.title}: {verdict}")
        print(f"  forward   {' -> '.join(seen.forward)}")
        print(f"  gradients {' -> '.join(seen.fired)}")
        print(f"  {case.lesson}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
