"""Faults strike at their place, in their step, on their rank."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.trainer.conftest import ALONE
from trainer.faults import FAULTS, FaultPlan, parse_faults
from trainer.in_order import InOrder


class StruckError(Exception):
    """Instead of the fault."""


def strike() -> None:
    raise StruckError


def plan(spec: str, model: nn.Module, rank: int = 0) -> FaultPlan:
    (fault,) = parse_faults([spec])
    return FaultPlan([replace(fault, strike=strike)], replace(ALONE, rank=rank, size=2), model)


def where_it_strikes(spec: str, step: int = 10, rank: int = 0) -> str | None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    faults = plan(spec, model, rank)
    faults.begin_step(step)
    loss = torch.zeros(())
    for place in ("input", "forward", "backward"):
        try:
            if place == "input":
                faults.at_input()
            elif place == "forward":
                loss = model(torch.ones(1, 2)).sum()
            else:
                loss.backward()  # type: ignore[no-untyped-call]
        except StruckError:
            return place
    return None


PLACES = {
    "slow-backward": "backward", "slow-forward": "forward", "slow-input": "input", "slow-comm": None, "gc": "forward",
    "hang": "backward", "stop": "backward", "raise": "backward", "kill": "backward",
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_place(name: str) -> None:
    assert where_it_strikes(name) == PLACES[name]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ("", [1, 2, 3, 4, 5, 6]), ("step=2", [2]), ("every=3", [3, 6]), ("rank=0", [1, 2, 3, 4, 5, 6]), ("rank=1", []),
        ("since=5", [5, 6]), ("until=3", [1, 2]), ("since=2,until=5", [2, 3, 4]), ("every=2,since=3,until=6", [4]),
    ],
)  # fmt: skip
def test_time_and_rank(options: str, steps: list[int]) -> None:
    assert [step for step in range(1, 7) if where_it_strikes(f"slow-forward:{options}", step)] == steps


def test_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    faults = plan("slow-forward:layer=1", model)
    faults.begin_step(1)
    model[0](torch.ones(1, 2))
    with pytest.raises(StruckError):
        model[1](torch.ones(1, 2))


def test_fatal_faults_spare_the_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RESTART_COUNT", "1")
    assert where_it_strikes("kill") is None
    assert where_it_strikes("slow-backward") == "backward"


@pytest.mark.parametrize("name", ["slow-backward", "slow-forward", "slow-input"])
def test_slow_ones_take_their_time(name: str) -> None:
    (fault,) = parse_faults([f"{name}:ms=20"])
    start = time.monotonic()
    fault.strike()
    assert time.monotonic() - start >= 0.02


def test_gc_collects() -> None:
    import gc

    collected: list[int] = []
    gc.callbacks.append(lambda phase, info: collected.append(info["collected"]))
    try:
        FAULTS["gc"]().strike()
    finally:
        gc.callbacks.pop()
    assert sum(collected) >= 100_000


def test_slow_comm_delays_the_answer_and_not_the_question() -> None:
    model = nn.Linear(2, 2)
    assert plan("slow-comm:ms=50", model).comm_delay_s == pytest.approx(0.05)
    thread, start = InOrder(0.05), time.monotonic()
    futures = [thread.submit(lambda: torch.futures.collect_all([])) for _ in range(2)]  # type: ignore[arg-type,return-value]
    assert not any(future.done() for future in futures)
    futures[1].wait()
    assert futures[0].done()
    assert time.monotonic() - start >= 0.1
