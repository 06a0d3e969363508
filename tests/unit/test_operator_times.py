"""The sums of a profile's events: each operator's own time, by step and phase."""

from __future__ import annotations

import pytest

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.operator_times import MOST_OPERATORS, OperatorTimes, own_times, phases_of
from ddpwatch.wire import profile_trace
from ddpwatch.wire.messages import GPU, MAX_TRACE_BYTES, OUTSIDE, FrameError, Span, Step
from ddpwatch.wire.profile_trace import ProfiledEvent, pack, unpack

STARTS = [(7, 0), (8, 100), (9, 200)]
PHASES = [("forward", 10, 60), ("backward", 60, 95), ("forward", 110, 160)]


def summed(
    *events: ProfiledEvent, phases: list[tuple[str, int, int]] = PHASES
) -> dict[tuple[str, str], tuple[int, ...]]:
    """The sums: by phase and name the calls, and the ns in each of two steps."""
    times = OperatorTimes(STARTS, phases)
    times.add_events(events)
    assert times.slots == [7, 8]
    return {(line.phase, line.function): (calls, ns[0], ns[1]) for line, calls, ns in times.lines()}


def test_an_operator_s_time_is_without_that_of_those_inside_it() -> None:
    events = [
        ProfiledEvent("linear", 10, 50),
        ProfiledEvent("addmm", 15, 45),
        ProfiledEvent("copy", 20, 30),
        ProfiledEvent("copy", 30, 34),
    ]
    other = [ProfiledEvent("linear", 10, 50, lane=2)]  # of another thread
    found = dict.fromkeys(("linear", "addmm", "copy"), 0)
    for event, ns in own_times([*other, *reversed(events)]):
        found[event.name] += ns
    assert found == {"linear": 10 + 40, "addmm": 16, "copy": 14}


def test_it_is_summed_by_step_and_phase_and_what_lies_between_is_outside() -> None:
    found = summed(
        ProfiledEvent("addmm", 12, 22),
        ProfiledEvent("addmm", 30, 40),
        ProfiledEvent("autograd::engine::evaluate_function: AddmmBackward0", 60, 80),
        ProfiledEvent("addmm", 150, 155),
        ProfiledEvent("addmm", 205, 210),  # after the last step
        ProfiledEvent("addmm", -9, -4),  # before the first one
    )
    assert found == {
        ("forward", "addmm"): (3, 20, 5),
        ("backward", "AddmmBackward0"): (1, 20, 0),
        ("forward", OUTSIDE): (0, 30, 45),
        ("backward", OUTSIDE): (0, 15, 0),
        ("", OUTSIDE): (0, 15, 50),
    }
    assert sum(here for _, here, _ in found.values()) == 100  # all of the step


def test_collectives_are_communication_and_a_gpu_s_work_has_no_phase() -> None:
    found = summed(ProfiledEvent("gloo:all_reduce", 20, 30), ProfiledEvent("sgemm", 15, 90, 7, on_gpu=True))
    assert found["sync", "gloo:all_reduce"] == (1, 10, 0)
    assert found[GPU, "sgemm"] == (1, 75, 0)


def test_operators_that_take_least_have_no_name() -> None:
    found = summed(
        *(ProfiledEvent(f"op{n}", n, n + 1) for n in range(99)),
        *(ProfiledEvent(f"op{n}", n, n + 1) for n in range(100, 199)),
    )
    assert len(found) <= MOST_OPERATORS + 5
    assert "" not in {name for _, name in found}
    starts = [(7, 0), (8, 100_000)]
    times = OperatorTimes(starts, [])
    times.add_events(ProfiledEvent(f"op{n}", 100 * n, 100 * n + 1 + (n < 200)) for n in range(500))
    lines = {line.function: (calls, ns.total()) for line, calls, ns in times.lines()}
    assert len(lines) == MOST_OPERATORS + 1
    assert lines["op199"] == (1, 2)
    assert lines[""] == (245, 245)  # one name more is that of what is outside


def test_phases_are_those_of_the_step() -> None:
    step = Step(
        rank=0, step=3, start_ns=1000, duration_ns=100, spans=[Span("forward", 10, 40), Span("backward", 40, 90)]
    )
    assert phases_of([step]) == [
        ("input", 1000, 1010),
        ("forward", 1010, 1040),
        ("backward", 1040, 1090),
    ]
    step.clock_error_ns = 5  # on a GPU
    assert phases_of([step]) == []


EVENTS = [
    ProfiledEvent("addmm", 12, 22, 5),
    ProfiledEvent("linear", 10, 50, 5),
    ProfiledEvent("sgemm", 105, 190, 7, on_gpu=True),
]


def test_a_trace_comes_back_ordered() -> None:
    assert unpack(pack(EVENTS, STARTS)) == (STARTS, sorted(EVENTS, key=lambda event: event.start))
    assert pack([], []) == pack(EVENTS, STARTS[:1]) == b""  # without a whole step


def test_a_trace_has_the_steps_that_a_message_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(EVENTS, STARTS)
    monkeypatch.setattr(profile_trace, "MAX_TRACE_BYTES", len(whole) - 1)
    starts, events = unpack(pack(EVENTS, STARTS))
    assert starts == STARTS[:2]
    assert [event.name for event in events] == ["linear", "addmm"]
    monkeypatch.setattr(profile_trace, "MAX_TRACE_BYTES", 10)
    assert pack(EVENTS, STARTS) == b""
    assert MAX_TRACE_BYTES == 1 << 20


def test_a_damaged_trace_is_refused() -> None:
    packed = pack(EVENTS, STARTS)
    for damaged in (b"", b"\0" * 40, packed[:-3], packed[:9] + b"\xff" + packed[10:]):
        with pytest.raises(FrameError):
            unpack(damaged)
    assert issubclass(FrameError, DdpwatchError)
