"""A node's steps go up together, soon, in order, and once."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.collector.node_steps import HOLD_NS, HOLD_STEPS, WHOLE_STEPS, NodeStepPacker
from ddpwatch.wire.messages import NodeStep, Step, encode
from ddpwatch.wire.node_step import expand
from tests.support.frames import bare, step

Sent = list[tuple[int, list[int]]]


def sent(found: list[NodeStep]) -> Sent:
    """The number and the ranks of each message."""
    return [(message.step, message.ranks) for message in found]


def packer_of(ranks: int) -> NodeStepPacker:
    """A packer that knows these ranks, and has sent their steps up to 0."""
    packer = NodeStepPacker(0)
    for rank in range(ranks):
        packer.take_step(bare(rank, 0))
    packer.rest()
    return packer


def test_a_step_goes_up_when_all_ranks_have_sent_it() -> None:
    packer = packer_of(3)
    assert packer.take_step(bare(2, 1)) == packer.take_step(bare(2, 2)) == packer.take_step(bare(0, 1)) == []
    assert sent(packer.take_step(bare(1, 1))) == [(1, [0, 1, 2])]
    assert packer.take_step(bare(0, 2)) == []
    assert sent(packer.take_step(bare(1, 2))) == [(2, [0, 1, 2])]


def test_a_rank_that_stops_holds_the_others_back_once() -> None:
    packer = packer_of(2)
    packer.take_step(bare(0, 1))
    assert packer.flush(5) == packer.flush(4 + HOLD_NS) == []
    assert sent(packer.flush(5 + HOLD_NS)) == [(1, [0])]
    assert sent(packer.take_step(bare(0, 2))) == [(2, [0])]
    assert sent(packer.take_step(bare(1, 1))) == [(1, [1])]  # late, and waited for again
    assert packer.take_step(bare(0, 3)) == []
    assert sent(packer.take_step(bare(1, 2))) == [(2, [1])]
    assert sent(packer.take_step(bare(1, 3))) == [(3, [0, 1])]


def test_what_only_waited_for_a_rank_that_ended_goes_up() -> None:
    packer = packer_of(2)
    packer.take_step(bare(0, 1))
    packer.take_step(bare(0, 2))
    assert sent(packer.leave(1)) == [(1, [0]), (2, [0])]


def test_a_step_that_a_rank_dropped_goes_up_with_the_next() -> None:
    packer = packer_of(2)
    packer.take_step(bare(0, 1))
    packer.take_step(bare(0, 2))
    assert sent(packer.take_step(bare(1, 2))) == [(1, [0]), (2, [0, 1])]


def test_memory_is_bounded() -> None:
    packer = packer_of(2)
    found = [message for number in range(1, 3 * HOLD_STEPS) for message in packer.take_step(bare(0, number))]
    assert sent(found) == [(number, [0]) for number in range(1, 2 * HOLD_STEPS)]


def test_ranks_that_are_too_large_for_one_message_go_up_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpwatch.wire.node_step.MAX_UNPACKED", 1000)
    packer = packer_of(4)
    for rank in range(4):
        found = packer.take_step(step(rank, 1, late_ms=rank, hook_param=list(range(20)), hook_ns=list(range(20))))
    assert [rank for message in found for rank in message.ranks] == list(range(4))
    assert len(found) > 1
    assert all(len(encode(one)) * len(message.ranks) <= 1000 for message in found for one in expand(message))


def test_a_step_that_is_too_large_packed_goes_up_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpwatch.wire.node_step.MAX_UNPACKED", 10)
    packer = packer_of(2)
    steps = [step(0, 1), step(1, 1)]
    assert [found for one in steps for found in packer.take_step(one)] == steps


def test_hook_fires_go_up_of_the_rank_that_launched_last_and_of_all_now_and_then() -> None:
    """Steps 1 and 32 are the first full ones of their blocks."""
    packer = packer_of(4)
    found = [
        message
        for number in (1, 2, WHOLE_STEPS - 1, WHOLE_STEPS, WHOLE_STEPS + 1)
        for rank in range(4)
        for message in packer.take_step(step(rank, number, late_ms=9 if rank == 2 else 0))
    ]
    hooked = [[one.rank for one in expand(message) if one.hook_ns] for message in found]
    assert hooked == [[0, 1, 2, 3], [2], [2], [0, 1, 2, 3], [2]]


@given(st.data())
def test_no_step_is_lost_or_doubled_and_every_rank_keeps_its_order(data: st.DataObject) -> None:
    """Whatever ranks skip, however they interleave, when they stop, and when they count again."""
    packer, now = NodeStepPacker(0), 0
    numbers: defaultdict[int, int] = defaultdict(int)
    took: defaultdict[int, list[Step]] = defaultdict(list)
    gave: defaultdict[int, list[Step]] = defaultdict(list)
    for serial in range(data.draw(st.integers(0, 60))):
        rank = data.draw(st.integers(0, 2))
        action = data.draw(st.sampled_from(["next", "next", "next", "skip", "again", "flush", "leave"]))
        found: list[NodeStep] = []
        if action == "flush":
            now += data.draw(st.sampled_from([0, HOLD_NS // 2, HOLD_NS]))
            found = packer.flush(now)
        elif action == "leave":
            found = packer.leave(rank)
        else:
            numbers[rank] = 0 if action == "again" else numbers[rank] + (2 if action == "skip" else 1)
            one = bare(rank, numbers[rank])
            one.own_ns = serial
            took[rank].append(one)
            found = packer.take_step(one)
        for message in found:
            for one in expand(message):
                gave[one.rank].append(one)
    for message in packer.rest():
        for one in expand(message):
            gave[one.rank].append(one)
    assert gave == took
