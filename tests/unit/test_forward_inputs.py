"""What a model is called with is counted in sampled steps, whichever way its forward is seen, and nothing is asked."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpwatch.probe import forward_inputs
from ddpwatch.probe.calls import SeenCalls
from ddpwatch.probe.forward_inputs import count_inputs, elements
from ddpwatch.probe.recorder import StepRecorder


class Asked(torch.Tensor):
    """A tensor class of the job's, which must not be asked for anything."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("it is asked")


class Mapping(dict[str, Any]):
    """A dict of the job's, as tokenizers return."""

    def values(self) -> Any:
        raise AssertionError("it is asked")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("it is asked")


class Model(nn.Module):
    """Takes anything."""

    def forward(self, *inputs: Any, **options: Any) -> None:
        """Does nothing."""


@pytest.fixture
def recorder() -> StepRecorder:
    """In step 5, which is sampled."""
    recorder = StepRecorder(lambda record: None)
    recorder.lease.sampled = range(5, 7)
    recorder.begin_update(5, "input", 0)
    return recorder


def test_tensors_are_found_however_nested_without_asking_the_job_s_classes() -> None:
    ids, image = torch.zeros(4, 128, dtype=torch.long), torch.zeros(3, 8, 8)
    assert elements(((ids,), {"labels": ids})) == 2 * 512
    assert elements(
        Mapping(pixels=[image, (image, None)], text="a", asked=Asked(), parameter=nn.Parameter(ids * 1.0))
    ) == (2 * 192 + 512)
    assert elements(object()) == 0


def test_many_arguments_are_counted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_inputs, "MOST_ITEMS", 5)
    endless: list[Any] = []
    endless += [endless, torch.zeros(2)]
    assert 0 < elements(endless) < 20


def test_arguments_that_hold_each_other_are_not_gathered() -> None:
    endless: list[Any] = []
    endless += [endless] * 1000
    tracemalloc.start()
    try:
        elements(endless)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def by_hook(model: nn.Module, call: Callable[..., None]) -> RemovableHandle:
    return model.register_forward_pre_hook(lambda *_: call())


def by_calls(model: nn.Module, call: Callable[..., None]) -> SeenCalls:
    def fail(error: Exception) -> None:
        raise error

    return SeenCalls([(Model, "forward")], begin=call, on_error=fail)


@pytest.mark.parametrize("see", [by_hook, by_calls])
def test_the_call_is_found_whichever_way_the_forward_is_seen(
    see: Callable[[nn.Module, Callable[..., None]], Any], recorder: StepRecorder
) -> None:
    model = Model()
    seen = see(model, lambda: count_inputs(recorder))
    try:
        for _ in range(2):  # of a step whose gradients are accumulated
            model(torch.zeros(2, 8), mask=torch.zeros(8))
        assert recorder.input_elements == {5: 2 * 24}
        recorder.begin_update(7, "input", 0)  # not sampled
        model(torch.zeros(2, 8))
        assert recorder.input_elements == {5: 2 * 24}
    finally:
        seen.remove() if isinstance(seen, RemovableHandle) else seen.close()


def test_outside_of_a_call_nothing_is_counted(recorder: StepRecorder) -> None:
    count_inputs(recorder)
    assert recorder.input_elements == {}
