"""A rank that stands still takes its stacks, once; and its heartbeats say what it does."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from ddpwatch.analysis.diagnosis.hangs.call_stack import call_stack
from ddpwatch.probe import stacks
from ddpwatch.probe.activity import ActivityMonitor
from ddpwatch.probe.heartbeat import EVAL_PAUSE_NS, Heartbeat
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.stacks import REST_NS, StackTaker, dump
from ddpwatch.wire.messages import Beat, decode, encode
from tests.support.frames import beat, step
from tests.support.guards import noting

S = 1_000_000_000


@contextmanager
def waiting_thread() -> Iterator[threading.Thread]:
    """A thread that is known to stand still in `held_up`."""
    here, go = threading.Event(), threading.Event()

    def held_up() -> None:
        here.set()
        go.wait()

    thread = threading.Thread(target=held_up)
    thread.start()
    here.wait()
    try:
        yield thread
    finally:
        go.set()
        thread.join()


def beats(*still_s: float, **about: Any) -> list[Beat]:
    """Heartbeats of a rank that has been standing still for that long."""
    return [Beat(rank=3, at_ns=int(s * S), since_ns=0, **{"step": 4, "phase": "backward", **about}) for s in still_s]


def test_the_stacks_are_taken_once_from_the_thread_that_stands_still() -> None:
    with waiting_thread() as thread:
        assert thread.ident is not None
        taker = StackTaker(3, thread.ident)
        taken = [stack for each in beats(1, 2.9, 3.1, 4, 50) if (stack := taker.take_beat(each)) is not None]
    (stack,) = taken
    assert decode(encode(stack)) == stack
    assert (stack.rank, stack.at_ns, stack.since_ns, stack.step) == (3, int(3.1 * S), 0, 4)
    assert stack.threads >= 2
    read = call_stack(stack)
    assert read is not None
    assert "in wait" in read.frames[0]
    assert read.site.startswith("test_stacks.py:")
    assert read.site.endswith(" in held_up")
    assert "StackTaker" not in stack.text
    assert "in dump" not in stack.text


def test_what_may_last_and_long_steps_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "dump", lambda thread: ("stack", 1))
    taker = StackTaker(3, 1)
    assert not any(map(taker.take_beat, beats(10, 100, activity="validation", activity_since_ns=1)))
    taker = StackTaker(3, 1)
    for number in range(8):
        taker.add_step(step(3, number, duration_ns=20 * S))
    assert not any(map(taker.take_beat, beats(10, 39)))
    assert taker.take_beat(beats(41)[0]) is not None


def test_a_rank_that_often_stands_still_takes_its_stacks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "dump", lambda thread: ("stack", 1))
    taker = StackTaker(0, 1)
    taken = []
    for half_second in range(400):
        at_ns = half_second * S // 2
        since_ns = half_second // 10 * 5 * S  # five seconds in each step
        found = taker.take_beat(
            Beat(rank=0, at_ns=at_ns, since_ns=since_ns, step=half_second // 10 + 1, phase="forward")
        )
        taken += [] if found is None else [found.at_ns]
    assert min(b - a for a, b in itertools.pairwise(taken)) >= REST_NS
    assert len(taken) > 4


def test_a_hang_soon_after_another_shows_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "dump", lambda thread: ("stack", 1))
    taker, again = StackTaker(3, 1), {"since_ns": 4 * S, "step": 5}
    second = [msgspec.structs.replace(each, **again) for each in beats(5, 7.5, 8.5)]
    assert [taker.take_beat(each) is not None for each in (*beats(3.5), *second)] == [True, False, False, True]


def test_a_pause_shows_the_training_thread_and_a_hang_after_it_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "dump", lambda thread: ("training\n\nother", 2))
    taker = StackTaker(3, 1)
    for number in range(8):
        taker.add_step(step(3, number, duration_ns=S // 5))
    taken = [found for each in beats(0.1, 0.28, 0.4, 0.9, 3.1, 3.6) if (found := taker.take_beat(each)) is not None]
    assert [(one.at_ns, one.text) for one in taken] == [(0.4 * S, "training"), (3.1 * S, "training\n\nother")]
    assert not any(map(taker.take_beat, beats(40, activity="save", activity_since_ns=1)))  # it is known what it does


def test_the_training_thread_comes_first_and_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting_thread() as one, waiting_thread() as other:
        assert one.ident is not None
        assert other.ident is not None
        for first in (one, other):
            text, threads = dump(first.ident or 0)
            assert text.startswith(f"Thread 0x{first.ident:016x} (most recent call first):\n")
            assert threads == len(text.split("\n\n")) + 1 == text.count("Thread 0x") + 1
        monkeypatch.setattr(stacks, "MOST_CALLS", 2)
        text, _ = dump(one.ident)
        assert text.partition("\n\n")[0].count("File ") == 2
        monkeypatch.setattr(stacks, "MAX_TEXT", 100)
        assert dump(one.ident)[0] == text[:100]


def test_a_frame_that_is_being_destroyed_does_no_harm() -> None:
    """Its locals let other threads go on while they end. C has called it: there, Python 3.13.0's own dump crashes."""
    inside, go = threading.Event(), threading.Event()

    class Ends:
        def __del__(self) -> None:
            inside.set()
            go.wait()

    def has_locals(number: int) -> None:
        _ends = Ends()

    thread = threading.Thread(target=lambda: list(map(has_locals, [1])))
    thread.start()
    inside.wait()
    try:
        text, _ = dump(thread.ident or 0)
    finally:
        go.set()
        thread.join()
    calls = [line.rpartition(" in ")[2] for line in text.partition("\n\n")[0].splitlines()[1:]]
    assert calls[:4] == ["wait", "wait", "__del__", "<lambda>"]


def test_a_heartbeat_says_what_the_rank_does(tmp_path: Any) -> None:
    seen: list[Beat] = []
    recorder = StepRecorder(lambda record: None)
    monitor = ActivityMonitor(0, lambda mark: None, lambda: None, lambda *wait: None, noting([]))
    heart = Heartbeat(0, recorder, doing=lambda: monitor.doing)

    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            seen.append(heart.beat(time.monotonic_ns(), 0))
            torch.save({}, tmp_path / "one")
            return index

    class Noting:
        def __reduce__(self) -> Any:
            seen.append(heart.beat(time.monotonic_ns(), 0))
            return int, ()

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(heart.beat(time.monotonic_ns(), 0))
        return graph.forward

    list(DataLoader(Data()))
    torch.save(Noting(), tmp_path / "two")
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    monitor.close()
    seen.append(heart.beat(time.monotonic_ns(), 0))
    assert [each.activity for each in seen] == ["data", "save", "compile", ""]
    assert all(0 < each.activity_since_ns <= each.at_ns for each in seen[:3])
    assert all(decode(encode(each)) == each for each in seen)


class Module:
    """A watched module."""

    in_eval = False

    def __init__(self, group: int = 0, count: int | None = None) -> None:
        self._issued = [] if count is None else [(group, count)]

    def issued_in(self) -> list[tuple[int, int]]:
        return self._issued


def test_a_validation_shows_in_the_heartbeats() -> None:
    """Its forwards as well as the model's mode, in which it may do what no hook sees."""
    now = [1000]
    recorder, module = StepRecorder(lambda record: None, lambda: now[0]), Module()
    heart = Heartbeat(0, recorder, lambda: [module])
    assert heart.beat(1100, 0).activity == ""
    module.in_eval = True
    assert (heart.beat(1100, 0).activity, heart.beat(1100, 0).activity_since_ns) == ("validation", 1000)
    module.in_eval = False
    now[0] = 2000
    recorder.validation_begin(in_eval=True)
    now[0] = 3000
    recorder.validation_end()
    assert (heart.beat(3100, 0).activity, heart.beat(3100, 0).activity_since_ns) == ("validation", 2000)
    assert heart.beat(3000 + EVAL_PAUSE_NS, 0).activity == ""
    module.in_eval = True
    assert heart.beat(3000 + EVAL_PAUSE_NS, 0).activity == "validation"
    recorder.forward_begin()
    assert heart.beat(3100, 0).activity == ""


def test_collectives_are_counted_by_group() -> None:
    modules = [Module(7, 12), Module(0, 30), Module(7, 12), Module(3)]
    found = Heartbeat(0, StepRecorder(lambda record: None), lambda: modules).beat(1, 0)
    assert found.issued_in == [(0, 30), (7, 12)]
    assert found.issued == 42
    assert beat(0).issued_in == []
