"""DDP broadcasts buffers at the start of a forward: who waits there for another rank is not late itself."""

from __future__ import annotations

import pytest

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import Shift
from ddpwatch.analysis.diagnosis.accounts.buffers import NOBODY, waits_for_buffers
from ddpwatch.analysis.step import buffer_waits, figures, named_stretches
from ddpwatch.wire.messages import Group, Mark, Message, Span, Step
from tests.support.frames import MS, START_NS, STEP_MS, hello, layout, state_of, step

STEPS = 40


def broadcasting(rank: int, number: int, data_ms: int, wait_ms: int, last_ms: int) -> Step:
    """A step that waits for data, then for buffers, and ends when the rank has launched that was delayed most."""
    late = data_ms + wait_ms
    computed, done = 80 + late, 90 + last_ms
    spans = [
        Span("forward", 2 + data_ms, 2 + data_ms), Span("sync", 2 + data_ms, 2 + late),
        Span("forward", 2 + late, 30 + late),
        Span("backward", 31 + late, computed), Span("sync", computed, done), Span("optimizer", done + 1, done + 5),
    ]  # fmt: skip
    for span in spans:
        span.start, span.end = span.start * MS, span.end * MS
    launch = [(50 + late) * MS, (70 + late) * MS]
    return step(
        rank, number, spans=spans, data=[(0, (1 + data_ms) * MS)], comm_launch=launch, comm_ready=launch,
        comm_done=[launch[0] + (last_ms - late + 10) * MS, done * MS], hook_param=[], hook_ns=[],
        start_ns=START_NS + number * (STEP_MS + last_ms) * MS, duration_ns=(STEP_MS + last_ms) * MS,
    )  # fmt: skip


def job(data_ms: dict[int, int], wait_ms: dict[int, int]) -> list[Message]:
    """Four ranks, of which some wait for data, and some for buffers."""
    late = {rank: data_ms.get(rank, 0) + wait_ms.get(rank, 0) for rank in range(4)}
    steps = [
        broadcasting(rank, number, data_ms.get(rank, 0), wait_ms.get(rank, 0), max(late.values()))
        for number in range(STEPS)
        for rank in range(4)
    ]
    return [*(hello(rank, 4) for rank in range(4)), layout(), *steps]


# With Gloo, rank 0 sends to ranks 1 and 2, and rank 1 to rank 3.
@pytest.mark.parametrize(
    ("late", "waits", "waited_ms"),
    [
        pytest.param(2, {0: 40}, 40 + 30 + 30, id="rank 0 waits for a rank that it sends to"),
        pytest.param(0, {1: 40, 2: 40, 3: 40}, 3 * 40, id="all wait for rank 0"),
    ],
)
def test_only_the_rank_that_they_wait_for_is_late(late: int, waits: dict[int, int], waited_ms: int) -> None:
    diagnosis = state_of(job({late: 40}, waits)).diagnosis
    (straggler,) = (found for found in diagnosis.incidents() if found.kind in ("straggler", "slow_input"))
    assert (straggler.ranks, straggler.phase) == ((late,), "data")
    accounts = {(account.name, account.rank): account.ns for account in diagnosis.lost().accounts}
    assert accounts["waiting", late] == STEPS * waited_ms * MS
    assert {rank for name, rank in accounts if name == "waiting"} == {late}


def test_a_collection_costs_what_others_wait_for_buffers_meanwhile() -> None:
    """Rank 0 collects in its wait for data, in every 8th step; nobody launches later than another one then."""
    steps = []
    for number in range(STEPS):
        late = 40 if number % 8 == 7 else 0
        ranks = [broadcasting(rank, number, 0 if rank else late, late if rank else 0, late) for rank in range(4)]
        start = ranks[0].start_ns + MS
        steps += [Mark(rank=0, kind="gc", name="", start_ns=start, end_ns=start + 40 * MS)] if late else []
        steps += ranks
    found = state_of([*(hello(rank, 4) for rank in range(4)), layout(), *steps]).diagnosis.incidents()
    (collections,) = (one for one in found if one.phase == "gc")
    assert (collections.ranks, collections.steps, collections.cost_ns) == ((0,), STEPS // 8, STEPS // 8 * 3 * 40 * MS)


@pytest.mark.parametrize(("late_ms", "awaited"), [(10, NOBODY), (40, 2)])
def test_whom_they_wait_for_is_said_if_clocks_show_it(late_ms: int, awaited: int) -> None:
    """Ranks 2 and 3 are on another host, whose clock may be off by 20 ms. Rank 0 waits for rank 2."""
    across = StepAcrossRanks(0)
    for rank in range(4):
        across.add_step(broadcasting(rank, 0, late_ms if rank == 2 else 0, late_ms if rank == 0 else 0, late_ms))
    near, far = Shift(("a", ""), ("a", ""), 0, 0), Shift(("b", ""), ("a", ""), 0, 20 * MS)
    across.align({0: near, 1: near, 2: far, 3: far})
    assert waits_for_buffers(across)[0].awaited == awaited


def test_ranks_of_another_group_are_not_waited_for() -> None:
    """Ranks 2 and 3 have a group of their own, and come to its broadcast later."""
    groups = [Group(rank=rank, id=1 + rank // 2, ranks=[0, 1] if rank < 2 else [2, 3]) for rank in range(4)]
    messages = job({0: 10, 2: 30, 3: 30}, {1: 40})
    for message in messages:
        if isinstance(message, Step):
            message.comm_group = [1 + message.rank // 2] * 2
    messages[4:4] = groups
    accounts = {(account.name, account.rank): account.ns for account in state_of(messages).diagnosis.lost().accounts}
    assert accounts.get(("waiting", 0), 0) >= STEPS * 10 * MS  # of the 40 ms, those until rank 0 came
    assert not {rank for name, rank in accounts if name == "waiting"} & {2, 3}


def test_it_is_exposed_communication_and_no_forward() -> None:
    found = figures(broadcasting(0, 0, 0, 40, 40))
    assert found.phases_ns["forward"] == 28 * MS
    assert found.phases_ns["exposed_comm"] == found.exposed_ns == (40 + 10) * MS
    assert found.comm_ns is not None
    assert found.comm_ns >= found.exposed_ns
    assert sum(found.phases_ns.values()) == found.step_ns


def test_it_has_a_name_of_its_own() -> None:
    one = broadcasting(0, 0, 0, 40, 40)
    assert buffer_waits(one) == [(2 * MS, 42 * MS)]
    assert [name for name, *_ in named_stretches(one)] == [
        "data", "buffers", "forward", "backward", "sync", "optimizer",
    ]  # fmt: skip


def test_other_waits_are_none_for_buffers() -> None:
    assert not buffer_waits(step())
    assert not buffer_waits(step(spans=[Span("forward", 0, MS), Span("sync", MS, 2 * MS)], comm_wait_begin=[MS, None]))
