"""Hooks on process groups: there while collectives are recorded, and taken out only where no other thread issues."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from ddpwatch.probe import own_collectives
from ddpwatch.probe.completion import Completions
from ddpwatch.probe.ddp_collectives import in_groups
from ddpwatch.probe.event_log import EventLog
from ddpwatch.probe.guard import Guard
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.known_group import GroupHook, _rests
from ddpwatch.probe.own_collectives import OwnCollectiveProbe
from ddpwatch.probe.recorder import StepRecorder


class HookedGroup:
    """As torch's groups have hooks, and count."""

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[Any], None]] = {}
        self.issued = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.issued

    def register_pre_hook(self, number: int, hook: Callable[[Any], None]) -> None:
        assert number not in self.hooks
        self.hooks[number] = hook

    def unregister_pre_hook(self, number: int) -> None:
        self.hooks.pop(number, None)


def test_a_hook_is_put_in_once_and_nothing_knows_of_it_when_it_is_out() -> None:
    group, said = HookedGroup(), list[object]()
    hook = GroupHook(group, said.append)
    for _ in range(2):
        hook.register()
    (call,) = group.hooks.values()
    call("one")
    hook.silence()
    call("two")
    assert said == ["one"]
    assert hook.remove in in_groups
    hook.remove()
    assert not group.hooks
    assert hook.remove not in in_groups


def test_of_a_group_that_has_gone_nothing_is_left_to_take_out() -> None:
    group = HookedGroup()
    hook = GroupHook(group, print)
    hook.register()
    assert not hook.forgotten()
    del group
    assert hook.forgotten()
    assert hook.remove not in in_groups


def test_hooks_are_there_while_collectives_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = [True]
    monkeypatch.setattr(own_collectives, "others_rest", lambda: rest[0])
    context = ProbeContext(StepRecorder(lambda record: None), Guard(lambda *_: None), lambda message: None)
    seeing, group = OwnCollectiveProbe(context, EventLog(), lambda own_ns: None), HookedGroup()
    seeing._by_hooks = True
    seeing._meet(group)
    assert not group.hooks
    seeing.turn(True)
    assert len(group.hooks) == 1
    seeing.turn(False)
    assert not group.hooks
    seeing.turn(True)
    rest[0] = False  # another thread may be running one
    seeing.turn(False)
    (hook,) = group.hooks.values()
    hook(None)  # and nothing happens
    seeing.turn(True)
    assert len(group.hooks) == 1
    seeing.close()
    assert len(group.hooks) == 1
    assert len([take for take in in_groups if getattr(take, "__self__", None) is getattr(hook, "__self__", 0)]) == 1
    rest[0] = True
    seeing.close()
    assert not group.hooks


def test_what_a_job_that_stands_still_has_issued_is_counted_anew() -> None:
    """In bare steps nothing is noted, and a hang shows by who has issued less. What was noted steps ago misleads."""
    context = ProbeContext(StepRecorder(lambda record: None), Guard(lambda *_: None), lambda message: None)
    seeing, group = OwnCollectiveProbe(context, EventLog(), lambda own_ns: None), HookedGroup()
    seeing._meet(group)
    group.issued = 7
    assert seeing.issued_in(still=False) == []
    assert [count for _, count in seeing.issued_in(still=True)] == [7]
    group.issued = 8
    seeing.on = True
    assert [count for _, count in seeing.issued_in(still=False)] == [7]


@contextmanager
def thread_that(waits: Callable[[], object], ends: Callable[[], object]) -> Iterator[int]:
    thread = threading.Thread(target=waits)
    thread.start()
    assert thread.ident is not None
    yield thread.ident
    ends()
    thread.join()


def settles(thread: int, resting: bool) -> bool:
    """Returns whether it comes to that: a thread takes a moment until it waits."""
    return any(_rests(sys._current_frames()[thread]) is resting for _ in range(1_000_000))


def test_who_waits_in_python_rests_and_who_may_be_in_torch_does_not() -> None:
    event = threading.Event()
    with thread_that(event.wait, event.set) as thread:
        assert settles(thread, True)
    reads, writes = os.pipe()
    with thread_that(lambda: os.read(reads, 1), lambda: os.write(writes, b"1")) as thread:
        assert settles(thread, False)
    builtin: Any = os.read  # called by the standard library itself, as `all_reduce` may be
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(builtin, reads, 1)
        (thread,) = (one.ident for one in pool._threads)
        assert settles(thread, False)
        os.write(writes, b"1")
        pending.result()
        assert settles(thread, True)


def test_threads_of_ddpwatchs_rest() -> None:
    completions = Completions()
    completions._start()
    try:
        for thread in completions._threads:
            assert thread.ident is not None
            assert settles(thread.ident, True)
    finally:
        completions.stop()
