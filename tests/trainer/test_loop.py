"""The loop, its checkpoints and its end, in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer import TrainConfig, Trainer, TrainerError, loop
from trainer.checkpoint import load_newest
from trainer.distributed import World
from trainer.loop import checkpoint_setup
from trainer.optimization import SCHEDULES, build_schedule
from trainer.stopping import StopAgreement
from trainer.strategies import STRATEGIES

DIGITS = TrainConfig(model="mlp:width=32", data="digits", steps=40, batch_sizes=(32,), lr=2e-2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns_alone(alone: World, strategy: str) -> None:
    trainer = Trainer(replace(DIGITS, strategy=strategy), alone)
    result = trainer.evaluate(trainer.fit())
    assert result.steps == 40
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.5


@pytest.mark.parametrize("samples", [1, 128, 129, 360, 2048])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_tests_in_as_many_batches(samples: int, size: int) -> None:
    """Otherwise a sharded model would gather its parameters once more on some ranks, and wait for the others."""
    worlds = [World(rank, rank, size, torch.device("cpu")) for rank in range(size)]
    dealt = [loop.test_batches(samples, world) for world in worlds]
    assert len({len(batches) for batches in dealt if batches}) == 1
    assert max(len(batch) for batches in dealt for batch in batches) <= loop.TEST_BATCH
    assert sorted(sample for batches in dealt for batch in batches for sample in batch) == list(range(samples))


def test_progress_is_printed_by_step(alone: World, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(replace(DIGITS, steps=12, log_every=5), alone).fit()
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == [f"step {n}/12 loss" for n in (1, 5, 10, 12)]


def test_autocast_computes_in_bfloat16(alone: World) -> None:
    trainer = Trainer(replace(DIGITS, amp=True), alone)
    seen: list[torch.dtype] = []
    trainer.model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.train_step(iter(trainer.stream))
    assert seen == [torch.bfloat16]


def test_schedules_rise_and_fall() -> None:
    for name, end in {"constant": 1.0, "linear": 0.0, "cosine": 0.0}.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = build_schedule(optimizer, name, warmup=4, steps=20)
        rates = []
        for _ in range(20):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert rates[5:] == sorted(rates[5:], reverse=True)
        assert schedule.get_last_lr()[0] == pytest.approx(end)
        assert SCHEDULES[name](0.0) == 1.0


def test_checkpoint_is_complete_or_absent(alone: World, tmp_path: Path) -> None:
    config = replace(DIGITS, steps=6, checkpoint=tmp_path, checkpoint_every=2)
    setup = checkpoint_setup(config)
    assert load_newest(tmp_path, alone, setup) is None
    Trainer(config, alone).fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    (tmp_path / "step-00000008.partial").mkdir()
    found = load_newest(tmp_path, alone, setup)
    assert found is not None
    assert found.shared["step"] == 6


def test_checkpoint_of_another_setup_is_refused(alone: World, tmp_path: Path) -> None:
    config = replace(DIGITS, steps=1, checkpoint=tmp_path, checkpoint_every=1)
    Trainer(config, alone).fit()
    with pytest.raises(TrainerError, match="was made with model 'mlp:width=32', not 'mlp'"):
        load_newest(tmp_path, alone, checkpoint_setup(replace(config, model="mlp")))


def test_unreadable_checkpoint_is_named(alone: World, tmp_path: Path) -> None:
    config = replace(DIGITS, steps=1, checkpoint=tmp_path, checkpoint_every=1)
    Trainer(config, alone).fit()
    (tmp_path / "step-00000001" / "train.pt").write_bytes(b"junk")
    with pytest.raises(TrainerError, match="cannot read checkpoint"):
        load_newest(tmp_path, alone, checkpoint_setup(config))


def test_ranks_agree_on_the_last_step() -> None:
    store = dist.HashStore()
    one, other = StopAgreement(store), StopAgreement(store)
    assert not one.before(7)
    assert not other.before(7)
    one.signal = 15
    assert not one.before(8), "the step that it was about to take is still taken"
    other.signal = 15
    assert other.before(9), "the first note counts"
    assert one.before(9)


def test_a_rank_that_is_one_step_behind_catches_up() -> None:
    store = dist.HashStore()
    ahead, behind = StopAgreement(store), StopAgreement(store)
    ahead.signal = 2
    assert not ahead.before(8)
    assert not behind.before(8)
    assert behind.before(9)
