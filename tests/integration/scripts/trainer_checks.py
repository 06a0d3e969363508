"""Started by torchrun from ``test_trainer_checks.py``: one job, many questions, answers as JSON."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trainer import TrainConfig, Trainer
from trainer.channel import Channel
from trainer.checkpoint import load_newest
from trainer.comm_hooks import HookOptions, build_comm_hook
from trainer.distributed import World, process_group
from trainer.loop import checkpoint_setup
from trainer.strategies import DDP, Strategy
from trainer.strategies.bucketed_hooks import BucketedHooks

WORLD = World.from_environment()
DIGITS = TrainConfig(
    model="mlp:width=128",
    data="digits",
    batch_sizes=(16,),
    bucket_cap_mb=0.05,
    optimizer="sgd",
    lr=0.03,
    log_every=10_000,
)
Answers = dict[str, Any]


# -- aggregations against their formulas -------------------------------------------------------------------------


def one_backward(hook: str, options: HookOptions, samples: int = 4) -> Tensor:
    """The gradients that a comm hook leaves, after every rank has seen other data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    strategy = DDP(model, Channel(WORLD), comm_hook=build_comm_hook(hook, options, WORLD))
    draw = torch.Generator().manual_seed(WORLD.rank)
    strategy.begin_step(samples)
    strategy.backward(strategy.forward(torch.randn(samples, 6, generator=draw)).square().mean())
    return gradients(model)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def everyones(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(WORLD.size)]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def difference(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def aggregations() -> Answers:
    local = everyones(one_backward("noop", HookOptions()))
    samples = 4 + 8 * WORLD.rank
    uneven = everyones(one_backward("noop", HookOptions(), samples))
    counts = torch.tensor([4.0 + 8 * rank for rank in range(WORLD.size)])
    shares = torch.arange(1.0, WORLD.size + 1)
    weights = tuple(shares.tolist())
    return {
        "weighted": difference(one_backward("weighted", HookOptions(weights=weights)), shares @ local / shares.sum()),
        "weighted by samples": difference(
            one_backward("weighted", HookOptions(), samples), counts @ uneven / counts.sum()
        ),
        "median": difference(one_backward("gathered", HookOptions(aggregate="median")), local.quantile(0.5, dim=0)),
        "trimmed mean": difference(
            one_backward("gathered", HookOptions(aggregate="trimmed-mean")), local.sort(dim=0).values[1:-1].mean(dim=0)
        ),
    }


# -- parameters that some ranks do not use -----------------------------------------------------------------------


class Choosy(nn.Module):
    """Every rank uses the shared layer and one of its own; nobody uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.own = nn.ModuleList(nn.Linear(4, 4) for _ in range(WORLD.size))
        self.idle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.own[WORLD.rank](self.shared(x))
        return hidden


def unused() -> Answers:
    torch.manual_seed(0)
    model = Choosy()
    ours = BucketedHooks(copy.deepcopy(model), Channel(WORLD), bucket_cap_mb=1e-4)
    theirs = DDP(copy.deepcopy(model), Channel(WORLD), bucket_cap_mb=1e-4, find_unused_parameters=True)
    worst = 0.0
    for step in range(3):
        for strategy in (ours, theirs):
            strategy.model.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + WORLD.rank)
            strategy.backward(strategy.forward(torch.randn(5, 4, generator=draw)).square().mean())
        worst = max(worst, difference(gradients(ours.model), gradients(theirs.model)))
    return {
        "difference": worst,
        "buckets": len(ours.buckets),
        "without gradient": [name for name, p in ours.model.named_parameters() if p.grad is None],
        "ddp without gradient": [name for name, p in theirs.model.named_parameters() if p.grad is None],
    }


# -- checkpoint and resume ---------------------------------------------------------------------------------------


def trained(config: TrainConfig, directory: Path | None = None) -> Trainer:
    trainer = Trainer(config, WORLD)
    if directory is not None:
        found = load_newest(directory, WORLD, checkpoint_setup(config))
        assert found is not None
        trainer.restore(found)
    trainer.fit()
    return trainer


def flat(trainer: Trainer) -> Tensor:
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def resumed(config: TrainConfig) -> tuple[Trainer, Trainer, dict[str, Any]]:
    """A run of 30 steps; one broken off after 25 (in its second epoch) and resumed; what its hook remembered."""
    folder = [tempfile.mkdtemp() if WORLD.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    config = replace(config, schedule="cosine", warmup_steps=5, checkpoint=Path(folder[0]), steps=30)
    config = replace(config, batch_sizes=(32,))  # an epoch has 22 of them
    broken = Trainer(config, WORLD, must_stop=lambda step: step > 25)
    broken.fit()
    broken.save_checkpoint()
    return trained(config), trained(config, Path(folder[0])), copy.deepcopy(broken.strategy.state_dict())


def resume() -> Answers:
    answers: Answers = {}
    for name in ("manual", "bucketed-hooks", "ddp"):
        straight, again, _ = resumed(replace(DIGITS, strategy=name, model="resnet:width=8,blocks=1"))
        answers[name] = bool(torch.equal(flat(straight), flat(again)))
    straight, again, remembered = resumed(replace(DIGITS, comm_hook="powersgd"))
    probe = Trainer(replace(DIGITS, comm_hook="powersgd"), WORLD)
    probe.strategy.load_state_dict(copy.deepcopy(remembered))
    answers["powersgd"] = difference(flat(again), flat(straight))
    answers["powersgd memory"] = equal(remembered, probe.strategy.state_dict()) and len(remembered["error_dict"]) > 1
    answers["powersgd goes on"] = again.strategy.state_dict()["iter"] == straight.strategy.state_dict()["iter"] - 1
    return answers


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


# -- learning ----------------------------------------------------------------------------------------------------


def learning() -> Answers:
    """Training loss after 200 steps on digits, with PowerSGD of rank 4 and with all-reduce."""
    config = replace(DIGITS, steps=200, batch_sizes=(32,), bucket_cap_mb=0.1)
    powersgd = replace(config, comm_hook="powersgd", hook_options=HookOptions(powersgd_rank=4))
    return {"all-reduce": training_loss(trained(config)), "powersgd": training_loss(trained(powersgd))}


@torch.no_grad()
def training_loss(trainer: Trainer) -> float:
    images, labels = zip(*(trainer.data.train[i] for i in range(1437)), strict=True)
    return functional.cross_entropy(trainer.model(torch.stack(images)), torch.stack(labels)).item()


# -- the timeline that a strategy tells --------------------------------------------------------------------------


class Notebook:
    """Writes down what a strategy tells, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        def note(*arguments: object) -> object:
            self.events.append((name, *map(str, arguments[:2])))
            return len(self.events)

        return note


def stories() -> Answers:
    """What every strategy tells about its third step."""
    answers = {}
    for name in ("manual", "param-hooks", "param-hooks-sync", "bucketed-hooks"):
        trainer = Trainer(replace(DIGITS, strategy=name, steps=2, bucket_cap_mb=0.02), WORLD)
        trainer.fit()
        answers[name] = story_of_a_step(trainer.strategy, trainer)
    return answers


def story_of_a_step(strategy: Strategy, trainer: Trainer) -> list[str]:
    notebook: Any = Notebook()
    strategy.watch_with(notebook, notebook.layout)
    trainer.train_step(iter(trainer.stream))
    # A completion is told by the collective's thread, maybe after the step.
    while sum(event[0] == "bucket_done" for event in notebook.events) < sum(
        event[0] == "bucket_launch" for event in notebook.events
    ):
        time.sleep(0.001)
    return [event[0] for event in notebook.events]


CHECKS = {"aggregations": aggregations, "unused": unused, "resume": resume, "learning": learning, "stories": stories}


def main(out: Path, names: list[str]) -> None:
    with process_group(WORLD):
        answers = {name: CHECKS[name]() for name in names}
    if WORLD.rank == 0:
        out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
