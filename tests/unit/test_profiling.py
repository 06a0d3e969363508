"""A profile of the main thread: what it records, and that nothing of the job ever meets it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from math import inf
from typing import cast

import pytest
import torch
from torch.autograd import profiler

from ddpwatch.probe import profiling
from ddpwatch.probe.guard import Guard
from ddpwatch.probe.profiling import OWN_PROFILER, Profile, Profiling, see_own_profilers
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.wire.messages import OUTSIDE, StackSamples, Step, decode, encode
from ddpwatch.wire.profile_trace import unpack
from tests.support.jobs import wait_for

TENSOR = torch.ones(8, 8)
EVENTS = 4  # of a step: aten::mm, and thrice what that calls


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """The guard of a job whose profilers are seen; it fails in nothing."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    monkeypatch.setattr(profiling, "_has_own", False)
    failures: list[object] = []
    guard = Guard(lambda feature, error: failures.append((feature, error)))
    close = see_own_profilers(guard)
    yield guard
    close()
    monkeypatch.setattr(profiling, "_current", None)
    assert not torch.autograd._profiler_enabled()
    assert not failures


@pytest.fixture
def begun(job: Guard, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """A profile of steps 3 to 9, in step 5."""
    monkeypatch.setattr(profiling, "_current", profile := Profile(range(3, 9), 0, job))
    assert [turn_and_train(profile, slot) for slot in range(1, 6)] == [False, False, True, True, True]
    assert torch.autograd._profiler_enabled()
    return profile


def turn_and_train(profile: Profile, slot: int) -> bool:
    is_profiled = profile.turn(slot)
    torch.mm(TENSOR, TENSOR)
    return is_profiled


def end_by_pending_call(profile: Profile) -> None:
    profile.cancel()
    wait_for(profile.done.is_set, "the pending call")


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_it_has_all_steps_but_the_first_two(begun: Profile) -> None:
    turns = [turn_and_train(begun, slot) for slot in range(6, 12)]
    assert turns == [True, True, True, True, False, False]  # the step that ends it is not as usual
    assert begun.done.is_set()
    assert [slot for slot, _ in begun.starts] == list(range(5, 10))
    products = [event for event in begun.events() if event.name == "aten::mm"]
    starts = [at for _, at in begun.starts]
    assert len(products) == 4
    for product, start, end in zip(products, starts, starts[1:], strict=False):
        assert start < product.start < product.end < end


def test_it_has_as_many_steps_as_there_is_room_for(job: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MOST_EVENTS", 4 * EVENTS)
    monkeypatch.setattr(profiling, "_current", profile := Profile(range(3, 100), 0, job))
    turns = [turn_and_train(profile, slot) for slot in range(3, 11)]
    assert turns == [True] * 7 + [False]
    assert [slot for slot, _ in profile.starts] == [5, 6, 7, 8, 9]
    monkeypatch.setattr(profiling, "MOST_EVENTS", 3 * EVENTS - 1)
    monkeypatch.setattr(profiling, "_current", profile := Profile(range(3, 100), 0, job))
    assert [turn_and_train(profile, slot) for slot in range(3, 6)] == [True, True, False]
    assert profile.obstacle == f"{EVENTS} calls of operators in a step are too many"
    assert list(profile.events()) == []


def test_who_waits_for_it_no_more_ends_it_wherever_training_is(begun: Profile) -> None:
    end_by_pending_call(begun)
    assert not torch.autograd._profiler_enabled()
    assert [slot for slot, _ in begun.starts] == [5]  # which is not whole
    assert not begun.turn(6)


def test_another_thread_ends_it_by_a_call_that_is_pending(begun: Profile) -> None:
    in_thread(begun.cancel).join()
    wait_for(begun.done.is_set, "the pending call")
    assert not torch.autograd._profiler_enabled()


def test_one_that_never_starts_ends_nonetheless(job: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_current", profile := Profile(range(3, 9), 0, job))
    in_thread(profile.cancel).join()
    wait_for(profile.done.is_set, "the pending call")
    assert not profile.turn(3)


def test_a_signal_s_handler_that_raises_meanwhile_reaches_the_job(
    begun: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    def stop(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(profiler, "_disable_profiler", stop)
            with pytest.raises(KeyboardInterrupt):
                end_by_pending_call(begun)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not begun.done.is_set()
    begun.end_here()  # as at exit
    assert begun.done.is_set()


def test_it_takes_too_long_if_no_step_starts(begun: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not begun.is_late
    now = profiling.time.monotonic_ns() + profiling.LEAST_NS
    monkeypatch.setattr(profiling.time, "monotonic_ns", lambda: now)
    assert begun.is_late


def test_who_follows_the_order_ends_it_if_no_step_starts_any_more(job: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEAST_NS", 0), ("LOOK_S", 0.001), ("REPORTED_S", 0)):
        monkeypatch.setattr(profiling, name, value)
    recorder = StepRecorder(lambda record: None)
    following, order, found = Profiling(3, recorder, job), StackOrder(7, 3, 0, 6, 3, profiler=True), []
    following.add_step(Step(rank=3, step=2, start_ns=0, duration_ns=50_000_000))
    thread = in_thread(lambda: found.append(following.samples(order, range(3, 9), threading.Event(), inf)))
    wait_for(lambda: recorder.profile is not None, "the order")
    assert recorder.profile is not None
    assert all(turn_and_train(cast("Profile", recorder.profile), slot) for slot in range(3, 7))
    wait_for(lambda: not thread.is_alive(), "the end of the profile")
    assert recorder.profile is None
    samples = decode(encode(found[0]))
    assert isinstance(samples, StackSamples)
    assert (samples.slots, samples.obstacle) == ([5], "")
    assert None not in (samples.run_ns, samples.wait_ns, samples.preempted, samples.major_faults)
    calls = {line.function: calls for line, calls in zip(samples.lines, samples.calls, strict=True)}
    assert calls == {"aten::mm": 1, "aten::resolve_conj": 3, OUTSIDE: 0}
    assert [event.name for event in unpack(samples.trace)[1]].count("aten::mm") == 1  # of the whole step


def test_nothing_starts_or_ends_inside_a_backward(begun: Profile, job: Guard) -> None:
    """Autograd would take it back."""

    def hook(gradient: torch.Tensor) -> None:
        begun.end_here()
        found.append((begun.done.is_set(), begun.turn(6), begun.done.is_set(), Profile(range(3, 9), 0, job).turn(3)))

    found: list[object] = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(hook)
    tensor.sum().backward()
    assert found == [(False, True, False, False)]
    end_by_pending_call(begun)


def test_what_encloses_the_start_of_another_profile_is_in_neither(begun: Profile, job: Guard) -> None:
    """torch would write into the memory of the first one."""
    with profiler.record_function("epoch"):
        begun.end_here()
        another = Profile(range(3, 9), 0, job)
        assert all(turn_and_train(another, slot) for slot in range(3, 7))
    for slot in range(7, 10):
        turn_and_train(another, slot)
    names = {event.name for each in (begun, another) for event in each.events()}
    assert "aten::mm" in names
    assert "epoch" not in names


def test_a_fork_ends_it_first(begun: Profile) -> None:
    child = os.fork()
    if not child:
        os._exit(int(torch.autograd._profiler_enabled()))
    assert os.waitpid(child, 0)[1] == 0
    assert begun.done.is_set()


def test_the_job_s_own_profiler_ends_it_and_there_is_none_after_that(begun: Profile, job: Guard) -> None:
    with profiler.profile() as own:
        torch.mm(TENSOR, TENSOR)
    assert begun.done.is_set()
    assert begun.obstacle == OWN_PROFILER
    assert [event.name for event in own.function_events].count("aten::mm") == 1
    another = Profile(range(3, 9), 0, job)
    assert not another.turn(3)
    assert another.obstacle == OWN_PROFILER


def test_a_profiler_of_another_thread_of_the_job_s_waits_until_it_has_ended(begun: Profile) -> None:
    def profile() -> None:
        with profiler.profile() as own:
            torch.mm(TENSOR, TENSOR)
        found.append(own)

    found: list[profiler.profile] = []
    thread = in_thread(profile)
    wait_for(lambda: not thread.is_alive(), "the other thread")
    assert [event.name for event in found[0].function_events].count("aten::mm") == 1
    assert begun.done.is_set()
    assert begun.obstacle == OWN_PROFILER


def test_one_under_way_is_left_alone(job: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    with profiler.profile() as own:
        profile = Profile(range(3, 9), 0, job)
        monkeypatch.setattr(profiling, "_has_own", False)  # it began before the job was watched
        assert not turn_and_train(profile, 3)
    assert profile.obstacle == OWN_PROFILER
    assert [event.name for event in own.function_events].count("aten::mm") == 1


@pytest.mark.parametrize("variable", ["KINETO_USE_DAEMON", "NSYS_PROFILING_SESSION_ID"])
def test_one_from_outside_is_left_alone(variable: str, job: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    profile = Profile(range(3, 9), 0, job)
    assert not profile.turn(3)
    assert profile.obstacle == OWN_PROFILER


def test_only_the_main_thread_is_profiled(job: Guard) -> None:
    profile = Profile(range(3, 9), 0, job)
    in_thread(lambda: profile.turn(3)).join()
    assert profile.done.is_set()
    assert profile.obstacle == "it does not train in its main thread"


def test_an_error_of_it_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    guard = Guard(lambda feature, error: failed.append(feature))
    profile = Profile(range(3, 9), 0, guard)
    monkeypatch.setattr(profiler, "_enable_profiler", lambda *_: 1 / 0)
    assert profile.turn(3)
    assert failed[:1] == ["profiles"]
    assert profile.done.is_set()
    assert profile.obstacle == "torch's profiler has failed"
