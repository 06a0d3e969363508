"""Started by torchrun from ``test_trainer_matrix.py``: runs every case in one job, writes what came out as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.integration.scripts.matrix_names import CAST_HOOKS, EXACT_HOOKS, EXACT_STRATEGIES, LOW_RANK_HOOKS
from trainer import TrainConfig, Trainer
from trainer.comm_hooks import HookOptions
from trainer.distributed import World, process_group
from trainer.strategies import SHARDED

WORLD = World.from_environment()
ALONE = World(0, 0, 1, WORLD.device)
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "log_every": 10_000}
DIGITS = TrainConfig(model="mlp:width=128", data="digits", steps=8, batch_sizes=(8,), bucket_cap_mb=0.05, **SGD)
TEXT = TrainConfig(
    model="gpt:width=32,layers=2,heads=2", data="text:block_size=16,max_kib=64", steps=8, bucket_cap_mb=0.05, **SGD
)
BRANCHES = replace(DIGITS, model="branches:width=64")
OPTIONS = HookOptions(powersgd_start=3)


@dataclass(frozen=True)
class Outcome:
    """What a case came to, as rank 0 sees it.

    ``distance`` is the largest difference of a parameter from the reference, relative to its size (at least a typical
    one); ``detour`` is the length of that difference over the length of the way that training has gone.
    """

    same_on_all_ranks: bool
    distance: float
    detour: float

    @classmethod
    def of(cls, start: Tensor, mine: Tensor, reference: Tensor) -> Outcome:
        theirs = mine.clone()
        dist.broadcast(theirs, src=0)
        same = torch.tensor(int(torch.equal(mine, theirs)))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        scale = reference.abs().clamp(min=reference.abs().mean())
        distance, detour = (mine - reference).abs() / scale, (mine - reference).norm() / (reference - start).norm()
        return cls(bool(same), distance.max().item(), detour.item())


def flat(trainer: Trainer) -> Tensor:
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in trainer.model.parameters())
    return torch.nn.utils.parameters_to_vector(whole).detach()


def run(config: TrainConfig, reference: Tensor) -> Outcome:
    trainer = Trainer(config, WORLD)
    start = flat(trainer)
    trainer.fit()
    return Outcome.of(start, flat(trainer), reference)


def single(config: TrainConfig, batch: int) -> Tensor:
    """One process over the batch of all ranks together; every rank computes it for itself."""
    trainer = Trainer(replace(config, strategy="single", comm_hook=None, batch_sizes=(batch,), accumulate=1), ALONE)
    trainer.fit()
    return flat(trainer)


def exact_cases(models: dict[str, TrainConfig]) -> dict[str, Outcome]:
    outcomes = {}
    for name, config in models.items():
        reference = single(config, config.batch_size(0) * WORLD.size)
        for strategy in EXACT_STRATEGIES:
            outcomes[f"{name} {strategy}"] = run(replace(config, strategy=strategy), reference)
        for hook in EXACT_HOOKS:
            outcomes[f"{name} {hook}"] = run(replace(config, comm_hook=hook), reference)
        for strategy in SHARDED if name == "digits" else ():
            outcomes[f"{name} {strategy}"] = run(replace(config, strategy=strategy), reference)
    return outcomes


def compressed_cases() -> dict[str, Outcome]:
    reference = single(DIGITS, 8 * WORLD.size)
    hooks = ("noop", *CAST_HOOKS, *LOW_RANK_HOOKS)
    return {hook: run(replace(DIGITS, comm_hook=hook, hook_options=OPTIONS), reference) for hook in hooks}


def accumulation_cases() -> dict[str, Outcome]:
    """Four micro-batches of 2 are one batch of 8, with and without the common mistake."""
    small = replace(DIGITS, batch_sizes=(2,), accumulate=4)
    reference = single(DIGITS, 8 * WORLD.size)
    outcomes = {f"accumulate {s}": run(replace(small, strategy=s), reference) for s in EXACT_STRATEGIES}
    for strategy in EXACT_STRATEGIES:
        outcomes[f"wrong {strategy}"] = run(replace(small, strategy=strategy, accumulate_wrong=True), reference)
    return outcomes


def main(out: Path) -> None:
    with process_group(WORLD):
        if WORLD.size == 2:
            models = {"digits": DIGITS, "text": TEXT, "branches": BRANCHES}
            outcomes = exact_cases(models) | compressed_cases() | accumulation_cases()
        else:
            outcomes = exact_cases({"digits": DIGITS})
    if WORLD.rank == 0:
        out.write_text(json.dumps({name: vars(outcome) for name, outcome in outcomes.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
