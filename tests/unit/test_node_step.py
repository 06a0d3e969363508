"""A node's step: what ranks sent comes back as it was, and nothing else gets through."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddpwatch.wire import node_step
from ddpwatch.wire.messages import FrameError, NodeStep, PhaseName, Span, Step, StepStatus, decode, encode
from ddpwatch.wire.node_step import expand, pack, read, without_hooks
from ddpwatch.wire.transport import Envelope
from tests.support.frames import MS, bare, beat, light, step

pytestmark = pytest.mark.same_everywhere

NS = st.integers(-(2**62) + 1, 2**62 - 1)
COUNT = st.integers(0, 2**53 - 1)
PHASES = st.sampled_from(get_args(PhaseName))
STATUSES = st.sampled_from(get_args(StepStatus))


@st.composite
def steps(draw: st.DrawFn, rank: int, number: int = 0) -> Step:
    """Any step of that number, with columns of one size where a Step wants that."""
    count, hooks = draw(st.integers(0, 4)), draw(st.integers(0, 4))

    def column(values: st.SearchStrategy[Any], size: int = count) -> list[Any]:
        return draw(st.lists(values, min_size=size, max_size=size))

    def optional(values: st.SearchStrategy[Any]) -> list[Any]:
        return column(values) if draw(st.booleans()) else []

    return Step(
        rank=rank, step=number, status=draw(STATUSES), synced=draw(st.booleans()), micro_steps=draw(COUNT),
        epoch=draw(COUNT), start_ns=draw(NS), duration_ns=draw(st.integers(0, 2**62 - 1)),
        spans=[Span(*span) for span in draw(st.lists(st.tuples(PHASES, NS, NS), max_size=4))],
        hook_param=column(NS, hooks), hook_ns=column(NS, hooks), comm_first_seq=draw(st.none() | COUNT),
        comm_group=optional(NS), comm_seq=optional(NS), comm_module=column(NS), comm_label=column(NS),
        comm_op=optional(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"])), comm_bytes=column(NS),
        comm_ready=column(st.none() | NS), comm_launch=column(NS), comm_start=optional(st.none() | NS),
        comm_done=column(st.none() | NS), comm_wait_begin=(waits := optional(st.none() | NS)),
        comm_wait_end=column(st.none() | NS) if waits else [],
        data=draw(st.none() | st.lists(st.tuples(NS, NS), max_size=3)),
        reduced=draw(st.booleans()), clock_error_ns=draw(st.none() | COUNT), own_ns=draw(COUNT),
        sender_ns=draw(COUNT), cpu_ns=draw(st.none() | COUNT), dropped=draw(COUNT),
    )  # fmt: skip


def packed(*ranks: Step, hooks: set[int] | None = None) -> NodeStep:
    """As it is received."""
    message = decode(encode(pack(3, ranks, hooks)))
    assert isinstance(message, NodeStep)
    return message


def of_ranks(count: int, number: int) -> st.SearchStrategy[tuple[Step, ...]]:
    return st.tuples(*(steps(rank, number) for rank in range(count)))


@given(st.tuples(st.integers(1, 5), COUNT).flatmap(lambda drawn: of_ranks(*drawn)))
def test_any_steps_come_back_as_they_were(ranks: tuple[Step, ...]) -> None:
    assert expand(packed(*ranks)) == list(ranks)


def test_ordinary_steps_come_back_as_they_were() -> None:
    late = [step(rank, 7, late_ms=rank, start_ns=10**18 + rank * 317, cpu_ns=5, comm_first_seq=70) for rank in range(4)]
    for ranks in (late, [bare(0, 3), bare(1, 3)], [light(0, 3), step(1, 3), bare(2, 3)]):
        assert expand(packed(*ranks)) == ranks


def test_every_field_of_a_step_is_packed() -> None:
    one = step(
        1, 9, status="aborted", synced=False, micro_steps=2, epoch=7, start_ns=5, duration_ns=6, comm_first_seq=3,
        comm_group=[4, 5], comm_seq=[0, 1], comm_op=["all_gather", "all_reduce"], comm_start=[None, 8], reduced=False,
        comm_wait_begin=[None, 3], comm_wait_end=[None, 5],
        clock_error_ns=0, own_ns=1, sender_ns=2, cpu_ns=0, dropped=4,
    )  # fmt: skip
    changed = [
        name
        for name in Step.__struct_fields__
        if getattr(one, name) != getattr(Step(rank=0, step=0, start_ns=0, duration_ns=0), name)
    ]
    assert changed == list(Step.__struct_fields__)
    assert expand(packed(one)) == [one]


def test_hook_columns_come_back_of_chosen_ranks_only() -> None:
    ranks = [step(rank, late_ms=rank) for rank in range(3)]
    first, second, third = expand(packed(*ranks, hooks={1}))
    assert second == ranks[1]
    for left_out, before in ((first, ranks[0]), (third, ranks[2])):
        assert left_out == msgspec.structs.replace(before, hook_param=[], hook_ns=[])


def test_a_frame_is_expanded_at_the_edge() -> None:
    ranks = [step(rank) for rank in range(2)]
    message = packed(*ranks)
    found = read(Envelope(5, 17, encode(message)))
    assert found == [(one, Envelope(5, 17, encode(one))) for one in ranks]
    other = Envelope(6, 18, encode(beat()))
    assert read(other) == [(beat(), other)]


def test_hooks_are_left_out_later() -> None:
    thin = without_hooks(packed(step(0), step(1, late_ms=3)))
    assert thin == packed(step(0), step(1, late_ms=3), hooks=set())
    broken = NodeStep(node=0, step=0, ranks=[0], packed=b"?")
    assert without_hooks(broken) is broken


@given(st.binary(max_size=200), st.integers(1, 3))
def test_garbage_is_refused(garbage: bytes, ranks: int) -> None:
    for content in (garbage, zstandard.compress(garbage)):
        with pytest.raises(FrameError):
            expand(NodeStep(node=0, step=0, ranks=list(range(ranks)), packed=content))


@given(st.randoms(use_true_random=False))
def test_a_damaged_message_is_refused_or_gives_valid_steps(chance: random.Random) -> None:
    message = packed(step(0), step(1, late_ms=3))
    content = bytearray(zstandard.decompress(message.packed))
    for _ in range(chance.randint(1, 5)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    message.packed = zstandard.compress(bytes(content))
    try:
        found = expand(message)
    except FrameError:
        return
    for one in found:
        assert decode(encode(one)) == one


@pytest.mark.parametrize("beyond", [{"step": 1 << 53}, {"hook_param": [1] * 65_537, "hook_ns": [1] * 65_537}])
def test_what_no_frame_can_hold_is_refused(beyond: dict[str, Any]) -> None:
    """Viewers keep steps encoded."""
    with pytest.raises(FrameError):
        decode(encode(replace(step(), **beyond)))
    with pytest.raises(FrameError):
        expand(pack(0, [replace(step(), **beyond)]))


def test_a_bomb_is_refused_before_it_takes_memory() -> None:
    bomb = zstandard.compress(bytes(1 << 28))
    assert len(bomb) < 1 << 16
    with pytest.raises(FrameError):
        expand(NodeStep(node=0, step=0, ranks=[0], packed=bomb))


def test_a_bomb_of_equal_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes for each of many ranks, which would all get columns of the largest size."""
    at = list(range(65_536))
    ranks = [replace(step(rank), hook_param=at, hook_ns=at) for rank in range(64)]
    with pytest.raises(FrameError, match="oversize"):
        pack(0, ranks)
    with monkeypatch.context() as without_limit:
        without_limit.setattr(node_step, "MAX_UNPACKED", 1 << 40)
        bomb = pack(0, ranks)
    assert len(bomb.packed) < 1 << 18
    with pytest.raises(FrameError, match="bytes"):
        expand(bomb)


def test_what_is_packed_is_what_the_message_says() -> None:
    """The root looks at no more than the message, to see whether an agent may send it."""
    message = packed(step(0, 7), step(1, 7))
    for ranks, number in (([0, 2], 7), ([1, 0], 7), ([0], 7), ([0, 1, 2], 7), ([0, 1], 8)):
        with pytest.raises(FrameError, match="of other ranks, or of another number"):
            expand(replace(message, ranks=ranks, step=number))
    beats = zstandard.compress(msgspec.msgpack.encode([beat(0, 7), beat(1, 7)]))
    with pytest.raises(FrameError, match="Invalid value 'beat'"):
        expand(replace(message, packed=beats))


def test_what_ranks_have_in_common_costs_little() -> None:
    """Eight ranks that differ by noise take a fraction of eight frames."""
    chance = random.Random(0)
    ranks = [light(rank, late_ms=0, start_ns=10**15 + chance.randrange(MS)) for rank in range(8)]
    assert len(encode(packed(*ranks))) * 5 < sum(len(encode(one)) for one in ranks)
