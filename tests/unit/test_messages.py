"""The codec: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.wire.messages import (
    MAX_FRAME_BYTES,
    Beat,
    BucketLayout,
    Bye,
    Device,
    FrameError,
    Hello,
    Layout,
    Mark,
    Message,
    SampledLine,
    Span,
    Stack,
    StackSamples,
    Status,
    Step,
    decode,
    encode,
    run_before,
    type_name,
)

NS = st.integers(-(2**60), 2**60)
COUNT = st.integers(0, 2**50)
EXAMPLES: list[Message] = [
    Hello(run_id="r", rank=3, world_size=8, host="node", pid=7, ddp={"static_graph": False, "bucket_cap_mb": 25.0}),
    Layout(rank=0, params=["a", "b"], buckets=[BucketLayout(0, 8, [1, 0])]),
    Layout(rank=0, kind="group", params=["a", "b"], buckets=[BucketLayout(0, 8, [1, 0], "layers.0")]),
    Beat(rank=0, at_ns=5, step=1, phase="sync", since_ns=2, last_hook=4, in_flight=[0, 2]),
    Mark(rank=0, name="checkpoint", start_ns=9),
    Device(host="node", kind="cuda", at_ns=1, utilization=97.0),
    Bye(rank=None, by="collector", reason="finished", at_ns=1),
    Status(at_ns=1, frames=3, bytes=99, refused={"oversize": 1}),
    Stack(rank=0, at_ns=5, since_ns=2, step=1, text="Thread 0x1", threads=2),
    StackSamples(
        rank=3, order=7, explained=3, peer=0, start_ns=1, end_ns=9, count=2, longest_ns=5, cpu_ns=1, slots=[4, 5],
        lines=[SampledLine("forward", "a.0", "x.py", 3, "f", "")], sample_slot=[0, 1], sample_line=[0, 0],
        sample_ns=[3, 5], run_ns=2,
    ),
]  # fmt: skip


@st.composite
def steps(draw: st.DrawFn) -> Step:
    hooks = draw(st.lists(st.tuples(COUNT, NS), max_size=20))
    buckets = draw(st.lists(st.tuples(COUNT, COUNT, COUNT, st.none() | NS, NS, st.none() | NS), max_size=8))
    columns = list(zip(*buckets, strict=True)) or [()] * 6
    return Step(
        rank=draw(st.integers(0, 1023)),
        step=draw(COUNT),
        status=draw(st.sampled_from(["ok", "warmup", "aborted", "shadow", "unwatched"])),
        start_ns=draw(NS),
        duration_ns=draw(COUNT),
        spans=[Span("forward", *pair) for pair in draw(st.lists(st.tuples(NS, NS), max_size=4))],
        hook_param=[param for param, _ in hooks],
        hook_ns=[at for _, at in hooks],
        comm_module=list(columns[0]),
        comm_label=list(columns[1]),
        comm_bytes=list(columns[2]),
        comm_ready=list(columns[3]),
        comm_launch=list(columns[4]),
        comm_done=list(columns[5]),
    )


@given(steps())
def test_a_step_survives_the_wire(step: Step) -> None:
    assert decode(encode(step)) == step


@pytest.mark.parametrize("message", EXAMPLES, ids=type_name)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=400))
def test_garbage_is_refused_and_nothing_else_happens(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        decode(garbage)


@given(steps(), st.integers(0, 10_000))
def test_a_cut_frame_is_refused(step: Step, cut: int) -> None:
    frame = encode(step)
    with pytest.raises(FrameError):
        decode(frame[: cut % len(frame)])


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (bytes(MAX_FRAME_BYTES + 1), "oversize"),
        (pickle.dumps(["a", 1]), "invalid"),
        (msgspec.msgpack.encode({"type": "exec"}), "unknown type"),
        (msgspec.msgpack.encode({"type": "beat", "rank": 1 << 30}), "invalid"),
        (msgspec.msgpack.encode({"type": "hello", "rank": "0"}), "invalid"),
        (b"\xc1", "not msgpack"),
    ],
)
def test_refusals_have_a_reason(frame: bytes, reason: str) -> None:
    with pytest.raises(FrameError) as error:
        decode(frame)
    assert error.value.reason == reason


@pytest.mark.parametrize("column", ["hook_ns", "comm_bytes", "comm_done", "comm_seq", "comm_op", "comm_wait_end"])
def test_columns_must_agree_in_length(column: str) -> None:
    raw = msgspec.to_builtins(Step(rank=0, step=0, start_ns=0, duration_ns=1))
    with pytest.raises(FrameError, match="columns differ"):
        decode(msgspec.msgpack.encode({**raw, column: ["all_reduce" if column == "comm_op" else 1]}))


def test_columns_of_samples_must_agree_in_length() -> None:
    raw = msgspec.to_builtins(EXAMPLES[-1])
    with pytest.raises(FrameError, match="columns differ"):
        decode(msgspec.msgpack.encode({**raw, "sample_ns": [3]}))


@pytest.mark.parametrize("column", ["param_bytes", "param_rows", "param_kind"])
def test_columns_of_parameters_must_agree_in_length(column: str) -> None:
    raw = msgspec.to_builtins(Layout(rank=0, params=["a", "b"], buckets=[]))
    with pytest.raises(FrameError, match="columns differ"):
        decode(msgspec.msgpack.encode({**raw, column: ["float32 cpu" if column == "param_kind" else 1]}))


def test_fields_of_the_future_are_ignored() -> None:
    raw = msgspec.to_builtins(EXAMPLES[3])
    assert decode(msgspec.msgpack.encode({**raw, "colour": "blue"})) == EXAMPLES[3]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, ""),
        ({0: "", 1: ""}, ""),
        ({0: "run-1", 1: "run-2", 2: "run-2"}, "run-2"),
        ({0: "", 1: "run-1", 2: "run-2"}, "run-1"),
        ({2: "run-3", 1: "run-2", 3: "run-2", 0: "run-3", 4: ""}, "run-3"),
    ],
)
def test_of_runs_before_the_one_counts_that_most_ranks_name(named: dict[int, str], expected: str) -> None:
    """Of several that as many name, that of the lowest rank, in whatever order their hellos came."""
    assert run_before(named) == expected
