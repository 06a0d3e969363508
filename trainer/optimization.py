"""Optimizers and learning rate schedules, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def build_schedule(optimizer: torch.optim.Optimizer, name: str, warmup: int, steps: int) -> LambdaLR:
    """Build a learning rate schedule: a linear rise over ``warmup`` steps, then the named curve until ``steps``."""
    curve = SCHEDULES[name]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return curve(min(1.0, (step - warmup) / max(1, steps - warmup)))

    return LambdaLR(optimizer, factor)
