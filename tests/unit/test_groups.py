"""Ranks are compared within their group, once all of its members have sent the step."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import torch
import torch.distributed as dist

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.buckets import bucket_steps
from ddpwatch.analysis.findings import notes
from ddpwatch.analysis.groups import OtherCollectives
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.probe.group_ids import describe, world_backend
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import DEFAULT_GROUP, Group, Hello, Message, Step
from tests.support.frames import MS, hello, layout, state_of, step

LATE_MS = 40
SUBGROUPS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def group(rank: int, ranks: tuple[int, ...]) -> Group:
    return Group(rank=rank, id=100 + ranks[0], ranks=list(ranks), backend="gloo")


def in_group(one: Step, ranks: tuple[int, ...]) -> Step:
    return msgspec.structs.replace(one, comm_group=[100 + ranks[0]] * len(one.comm_label))


def hellos(world: int) -> list[Hello]:
    return [hello(rank, world) for rank in range(world)]


def two_groups(steps: int = 20, seen: Iterable[int] = range(4)) -> RunState:
    """Ranks 2 and 3 start 500 ms after 0 and 1; rank 3 is late."""
    messages: list[Message] = [*hellos(4), *(group(rank, ranks) for rank, ranks in SUBGROUPS.items())]
    for number in range(steps):
        for rank in seen:
            late, wait = (LATE_MS, 0) if rank == 3 else (0, LATE_MS if rank == 2 else 0)
            one = in_group(step(rank, number, late, wait), SUBGROUPS[rank])
            messages.append(msgspec.structs.replace(one, start_ns=one.start_ns + 500 * MS * (rank // 2)))
    return state_of(messages)


def test_ranks_of_other_groups_are_not_compared() -> None:
    across = next(reversed(two_groups().steps.values()))
    assert {rank: across.late_ns(rank) for rank in range(4)} == {0: 0, 1: 0, 2: 0, 3: LATE_MS * MS}
    assert {rank: across.wait_ns(rank) for rank in range(4)} == {0: 0, 1: 0, 2: LATE_MS * MS, 3: 0}


def test_the_slow_rank_is_named_with_its_group() -> None:
    (found,) = [incident for incident in two_groups().diagnosis.incidents() if incident.ranks]
    assert (found.kind, found.ranks, found.phase) == ("straggler", (3,), "backward")
    assert found.evidence.group == [2, 3]
    assert found.evidence.late_ms == found.evidence.excess_ms == LATE_MS
    assert "in its group (ranks 2, 3)" in found.message


def test_a_group_with_an_unseen_member_has_no_lateness_and_no_transfer() -> None:
    """Rank 3 is last, and nobody sees it: what rank 2 waits is not the wire's."""
    across = next(reversed(two_groups(seen=(0, 1, 2)).steps.values()))
    assert (across.late_ns(2), across.wait_ns(2)) == (None, None)
    assert (across.late_ns(0), across.wait_ns(1)) == (0, 0)
    assert {key[3] for key in across.skew.buckets} == {100}


def test_a_job_with_an_unseen_rank_has_no_lateness() -> None:
    steps = [step(rank, 0, 0, LATE_MS) for rank in (0, 1)]
    alone = state_of([*hellos(3), *steps]).steps[0]
    assert [alone.late_ns(rank) for rank in (0, 1)] == [None, None]
    assert [row.transfer for row in bucket_steps(alone).values()] == [None, None]
    assert [row.busbw for row in bucket_steps(alone).values()] == [None, None]


def test_busbw_counts_the_ranks_of_the_group() -> None:
    four, two = two_groups(1).steps[0], StepAcrossRanks(0)
    for rank in (0, 1):
        two.add_step(step(rank, 0))
    assert {b.busbw for b in bucket_steps(two).values()} == {b.busbw for b in bucket_steps(four).values()}


def test_collectives_with_other_sequence_numbers_are_not_compared() -> None:
    across = StepAcrossRanks(0)
    for rank, seqs in ((0, [0, 1]), (1, [0, 2])):
        across.add_step(msgspec.structs.replace(step(rank, 0), comm_first_seq=5, comm_seq=seqs))
    assert [key[1] for key in across.skew.buckets] == [0]


def test_other_collectives_are_counted_and_are_no_buckets() -> None:
    others = OtherCollectives()
    for number, first in enumerate((10, 15, 20, 27)):
        others.add_step(msgspec.structs.replace(step(0, number), comm_first_seq=first, comm_seq=[0, 1]))
    assert others.per_step(0) == (3 + 3 + 5) / 3
    assert others.per_step(7) is None


@pytest.mark.parametrize(
    ("release", "source", "said"), [("2.13.0", "host", 1), ("2.15.0+cu132", "host", 0), ("2.15.0", "cuda events", 1)]
)
def test_collectives_that_would_be_seen_are_buffers_and_no_note_says_that_nobody_times_them(
    release: str, source: str, said: int
) -> None:
    builder = ReportBuilder()
    for rank in range(2):
        builder.apply_message(hello(rank, torch=release, timing_source=source))
        builder.apply_message(Group(rank=rank, id=DEFAULT_GROUP, ranks=[0, 1]))
    for number in range(9):
        for rank in range(2):
            builder.apply_message(step(rank, number, comm_first_seq=3 * number, comm_seq=[0, 1]))
    assert [note.kind for note in notes(builder.report())].count("other_collectives") == said


def test_layouts_of_several_groups_are_kept() -> None:
    """As with pipeline stages: both call their module 0, and have other layers."""
    other = msgspec.structs.replace(layout(2), group=102, params=["e", "f", "g", "h"])
    first = msgspec.structs.replace(layout(0), group=100)
    state = state_of([*hellos(4), *(group(rank, ranks) for rank, ranks in SUBGROUPS.items()), first, other])
    assert [state.layouts.bucket_layer(0, rank) for rank in range(4)] == ["c", "c", "g", "g"]
    assert [state.layouts.layer(0, rank) for rank in (1, 3)] == ["a", "e"]


def test_the_backend_is_that_of_the_device() -> None:
    """Where none was chosen, torch has one for each kind of device."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "undefined"
        assert describe(dist.group.WORLD, torch.device("cpu")).backend == world_backend() == "gloo"
    finally:
        dist.destroy_process_group()
