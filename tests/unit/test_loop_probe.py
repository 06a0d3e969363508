"""What a loop without a wrapper shows of its updates, however it computes gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.loop import LoopProbe
from ddpwatch.probe.recorder import StepRecorder
from tests.support.guards import noting

UPDATES = 3
Gradients = Callable[[torch.Tensor, list[torch.Tensor]], Any]


def assigned(loss: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    """As the stages of a zero-bubble pipeline do, that compute those of inputs and of weights apart."""
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def penalised(loss: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def of_a_function(loss: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    """As `torch.func.grad` does."""
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, create_graph=True), strict=True):
        parameter.grad = gradient.detach()


@pytest.mark.parametrize(("compute", "backwards"), [(assigned, 1), (penalised, 1), (of_a_function, 0)])
def test_a_loop_that_asks_for_gradients_itself_makes_steps(compute: Gradients, backwards: int) -> None:
    loop = LoopProbe(ProbeContext(StepRecorder(lambda record: None), noting([]), lambda said: None), lambda: 0)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(UPDATES):
            optimizer.zero_grad()
            compute(model(torch.ones(1, 4)).sum(), list(model.parameters()))
            loop.optimizer_begin(optimizer)
            optimizer.step()
            loop.optimizer_end(optimizer)
        records = loop.records(over=True)
    finally:
        loop.close()
    assert [record.backwards for record in records] == [backwards] * UPDATES
    for record in records:
        assert {"forward", "optimizer", *(["backward"] if backwards else [])} <= {phase for phase, *_ in record.spans}
