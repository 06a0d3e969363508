"""Where a rank computes, and that nothing in a step assumes the CPU."""

from __future__ import annotations

import pytest
import torch

from trainer import TrainConfig, Trainer, TrainerError
from trainer.distributed import DEVICES, World
from trainer.faults import FAULTS
from trainer.in_order import future_on


def on_host(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int = 1, local_rank: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks, "RANK": 4, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("asked", "gpus", "ranks", "device", "backend"),
    [
        ("auto", 0, 2, "cpu", "gloo"),
        ("auto", 2, 2, "cuda:1", "nccl"),
        ("cuda", 8, 2, "cuda:1", "nccl"),
        ("cpu", 2, 2, "cpu", "gloo"),
        ("cuda", 1, 2, "cuda:0", "gloo"),
    ],
)
def test_each_rank_has_its_device(
    monkeypatch: pytest.MonkeyPatch, asked: str, gpus: int, ranks: int, device: str, backend: str
) -> None:
    """Ranks that share a GPU talk by Gloo: NCCL refuses them."""
    on_host(monkeypatch, gpus, ranks, local_rank=1)
    world = World.from_environment(asked)
    assert (world.rank, world.size) == (4, 8)
    assert (world.device, world.backend) == (torch.device(device), backend)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, gpus=0)
    with pytest.raises(TrainerError, match="there is no GPU here"):
        World.from_environment("cuda")
    with pytest.raises(TrainerError, match=f"known: {', '.join(DEVICES)}"):
        World.from_environment("tpu")


META = World(0, 0, 1, torch.device("meta"))  # computes nothing, and mixes with no other device


@pytest.mark.parametrize(
    ("model", "data"), [("gpt:width=12,layers=1,heads=2", "text"), ("mlp", "digits"), ("resnet", "digits")]
)
def test_a_step_stays_on_its_device(monkeypatch: pytest.MonkeyPatch, model: str, data: str) -> None:
    monkeypatch.setattr(Trainer, "loss", lambda self, forward, inputs, targets: forward(inputs).sum())
    trainer = Trainer(TrainConfig(model=model, data=data, strategy="single", optimizer="sgd"), META)
    loss = trainer.train_step(trainer._batches())
    assert loss.device == META.device
    assert {parameter.device for parameter in trainer.model.parameters()} == {META.device}


def test_a_fault_delays_the_gpu_and_not_only_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("GPU"))
    FAULTS["slow-backward"](ms=0).strike()
    assert waits == ["GPU"]


def test_a_future_knows_the_device_of_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, torch refuses a result on a GPU."""
    asked: list[object] = []
    monkeypatch.setattr(torch.futures, "Future", lambda devices: asked.append(devices))
    for name in ("cpu", "cuda:1"):
        future_on(torch.device(name))
    assert asked == [None, [torch.device("cuda:1")]]
