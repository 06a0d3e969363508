"""Where ddpwatch's errors end, and the job's do not."""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.guard import CLOSING, Guard, reason_of
from ddpwatch.wire.messages import WATCHING


@pytest.fixture
def failures() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def guard(failures: list[tuple[str, str]]) -> Guard:
    return Guard(lambda feature, error: failures.append((feature, reason_of(error))))


def test_an_error_turns_its_feature_off_and_the_rest_goes_on(guard: Guard, failures: list[tuple[str, str]]) -> None:
    calls: list[int] = []

    def fail(value: int) -> None:
        calls.append(value)
        raise KeyError("bucket")

    assert guard.run("stacks", fail, 1) is None
    assert guard.run("stacks", fail, 2) is None
    assert guard.run("heartbeats", lambda: 7) == 7
    assert (calls, guard.off, failures) == ([1], {"stacks"}, [("stacks", "KeyError (bucket)")])


def test_a_jobs_mode_and_class_of_tensors_see_nothing_of_it(guard: Guard) -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"mode {function.__name__}")
            return function(*args, **kwargs or {})

    class Tensor(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"tensor {function.__name__}")
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor = torch.ones(3).as_subclass(Tensor)
    with Mode():
        assert guard.run(WATCHING, lambda: tensor.numel() + tensor.element_size()) == 7
        assert guard.run(WATCHING, lambda: tensor.numel() / 0) is None
        assert seen == []
        assert tensor.numel() == 3
    assert seen == ["mode numel", "tensor numel"]


def test_closing_is_tried_again(guard: Guard) -> None:
    for _ in range(2):
        assert guard.run(CLOSING, lambda: 1 / 0) is None
    assert guard.run(CLOSING, lambda: 7) == 7


def test_an_error_that_cannot_be_told_does_not_reach_the_job(caplog: pytest.LogCaptureFixture) -> None:
    def tell(feature: str, error: Exception) -> None:
        raise ValueError("no room")

    with caplog.at_level(logging.DEBUG):
        guard = Guard(tell)
        assert guard.run(WATCHING, lambda: 1 / 0) is None
    assert guard.off == {WATCHING}


class Alarm:
    """Signal handlers of every kind, which raise what a timeout raises."""

    def __call__(self, *_: Any) -> None:
        self.ring()

    def ring(self, *_: Any) -> None:
        raise TimeoutError("the job's own")


def ring(place: str, *_: Any) -> None:
    raise TimeoutError(f"the job's own, {place}")


@pytest.fixture(params=[Alarm(), Alarm().ring, functools.partial(ring, "here"), lambda *_: ring("there")])
def handler(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handler")
def test_what_a_signal_handler_raises_is_the_jobs(guard: Guard) -> None:
    with pytest.raises(TimeoutError, match="the job's own"):
        guard.run("stacks", signal.raise_signal, signal.SIGUSR1)
    assert guard.off == set()
    assert guard.run("stacks", lambda: 1 / 0) is None
    assert guard.off == {"stacks"}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_passes(guard: Guard, kind: type[BaseException]) -> None:
    def end() -> None:
        raise kind

    with pytest.raises(kind):
        guard.run("stacks", end)
    assert guard.off == set()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DdpwatchError("the collector is gone", "start it"), "the collector is gone (start it)"),
        (OSError(28, "No space left on device", "/secret"), "OSError: No space left on device"),
        (RuntimeError("torch's own assertion"), "RuntimeError"),
        (AttributeError(name="_post_forward"), "AttributeError (_post_forward)"),
        (ImportError("cannot import name 'x' from 'torch'"), "ImportError: cannot import name 'x' from 'torch'"),
    ],
)
def test_reasons_are_in_our_words(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_reason_names_the_innermost_of_our_functions() -> None:
    from ddpwatch.probe.derive import derive_ready

    with pytest.raises(AttributeError) as caught:
        derive_ready(None, None, 0, [], None)  # type: ignore[arg-type]
    assert reason_of(caught.value).endswith(" in derive._ready_offsets")
