"""Steps of ranks that count differently are matched by their collectives."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.matching import HOLD_STEPS, StepMatcher
from ddpwatch.wire.messages import Step
from tests.support.frames import step

STEPS = 40


def synced(rank: int, number: int, seq: int, group: int = 0) -> Step:
    return msgspec.structs.replace(step(rank, number), comm_first_seq=seq, comm_group=[group] * 2, comm_seq=[0, 1])


def alone(rank: int, number: int) -> Step:
    return Step(rank=rank, step=number, start_ns=0, duration_ns=1, synced=False)


def unseen(rank: int, number: int) -> Step:
    return Step(rank=rank, step=number, status="unwatched", start_ns=0, duration_ns=1)


def members(group: int) -> tuple[int, ...] | None:
    return {0: (0, 1, 2, 3), 7: (0, 1), 8: (2, 3)}.get(group)


def numbered(steps: list[Step]) -> dict[tuple[int, int], int]:
    """The numbers by rank and local count."""
    matcher = StepMatcher(members)
    found = [pair for one in steps for pair in matcher.add_step(one)] + list(matcher.rest())
    return {(one.rank, one.step): number for number, one in found}


def skipping(rank: int, skips: set[int], without_count: bool) -> list[Step]:
    """A rank that takes some steps alone, or does not count them; its peers take all together."""
    found: list[Step] = []
    for turn in range(STEPS):
        if turn in skips and without_count:
            continue
        number = len(found)
        found.append(alone(rank, number) if turn in skips else synced(rank, number, 2 * turn))
    return found


@given(
    st.sets(st.integers(1, STEPS - 2)),
    st.booleans(),
    st.lists(st.integers(0, 1), min_size=3 * STEPS, max_size=3 * STEPS),
)
def test_a_collective_has_one_step_whatever_the_ranks_count(
    skips: set[int], without_count: bool, order: list[int]
) -> None:
    """A batch that one rank skips: its peers' step is then without a collective, too, but counts."""
    lead = [alone(0, n) if n in skips else synced(0, n, 2 * n) for n in range(STEPS)]
    other = skipping(1, skips, without_count)
    queues, merged = [list(lead), list(other)], []
    for rank in [*order, *[0] * STEPS, *[1] * STEPS]:
        if queues[rank]:
            merged.append(queues[rank].pop(0))
    found = numbered(merged)
    assert {number for (rank, _), number in found.items() if rank == 0} == set(range(STEPS))
    for one in other:
        if one.comm_first_seq is not None:
            assert found[1, one.step] == one.comm_first_seq // 2


def test_a_step_that_a_rank_took_alone_displaces_none() -> None:
    steps = [synced(0, 0, 1), synced(1, 0, 1), alone(1, 1), synced(0, 1, 3), synced(1, 2, 3)]
    assert numbered(steps) == {(0, 0): 0, (1, 0): 0, (0, 1): 1, (1, 2): 1}


def test_bare_steps_are_counted_on() -> None:
    steps = [synced(0, 5, 9), unseen(0, 6), synced(0, 7, 13), synced(1, 2, 9), unseen(1, 3), synced(1, 4, 13)]
    assert numbered(steps) == {(0, 5): 5, (0, 6): 6, (0, 7): 7, (1, 2): 5, (1, 3): 6, (1, 4): 7}


def test_a_step_that_the_lead_did_not_watch_lies_between_those_that_it_did() -> None:
    """Rank 1 has skipped a batch, which shows only now."""
    lead = [synced(0, 5, 9), unseen(0, 6), unseen(0, 7), synced(0, 8, 15)]
    steps = [
        *lead,
        synced(1, 5, 9),
        synced(1, 6, 13),
        synced(1, 7, 15),
        unseen(1, 8),
        synced(0, 9, 19),
        synced(1, 9, 21),
    ]
    found = numbered(steps)
    assert [found[1, n] for n in range(5, 10)] == [5, 6, 8, 9, 10]


def test_groups_count_by_themselves() -> None:
    steps = [synced(0, 0, 1, 7), synced(2, 4, 1, 8), synced(1, 1, 1, 7), synced(3, 0, 1, 8)]
    assert numbered(steps) == {(0, 0): 0, (1, 1): 0, (2, 4): 4, (3, 0): 4}


def test_without_sequence_numbers_local_counts_serve() -> None:
    assert numbered([step(0, 3), step(1, 2)]) == {(0, 3): 3, (1, 2): 2}


def test_nobody_waits_for_a_lead_that_has_gone_or_lost_a_step() -> None:
    matcher = StepMatcher(members)
    assert [number for number, _ in matcher.add_step(synced(0, 0, 1))] == [0]
    assert list(matcher.add_step(synced(1, 0, 3))) == []
    assert [(number, one.rank) for number, one in matcher.add_step(synced(0, 2, 5))] == [(2, 0), (1, 1)]
    assert list(matcher.add_step(synced(1, 3, 7))) == []
    assert [number for number, _ in matcher.leave(0)] == [4]
    assert [number for number, _ in matcher.add_step(synced(1, 4, 9))] == [5]


@pytest.mark.parametrize("count", [HOLD_STEPS, HOLD_STEPS + 5])
def test_few_steps_are_held_back(count: int) -> None:
    matcher = StepMatcher(members)
    list(matcher.add_step(synced(0, 0, 1)))
    released = [pair for n in range(1, 1 + count) for pair in matcher.add_step(synced(1, n, 1 + 2 * n))]
    assert len(released) == count - HOLD_STEPS


def test_short_steps_wait_for_a_lead_that_is_seconds_behind() -> None:
    """Although it took a step alone meanwhile, all are matched by their collectives."""
    short = [msgspec.structs.replace(synced(1, n, 2 * n), start_ns=n * 10_000_000) for n in range(5 * HOLD_STEPS)]
    lead = [alone(0, 1), *(synced(0, n + 1, 2 * n) for n in range(1, len(short)))]
    matcher = StepMatcher(members)
    assert [number for number, _ in matcher.add_step(synced(0, 0, 0))] == [0]
    found = [pair for one in (*short, *lead) for pair in matcher.add_step(one)]
    assert {one.step: number for number, one in found if one.rank == 1 and one.step} == {
        n: n + 1 for n in range(1, len(short))
    }


def test_long_steps_do_not_wait_for_many_more() -> None:
    """On a host without the lead, a run with steps of 3 s showed nothing for more than three minutes."""
    long = [msgspec.structs.replace(synced(1, n, 2 * n), start_ns=n * 3_000_000_000) for n in range(9)]
    matcher = StepMatcher(members)
    released = [[one.step for _, one in matcher.add_step(each)] for each in long]
    assert released == [[], [], [], [], [0, 1, 2, 3, 4], [5], [6], [7], [8]]  # the oldest of five is 12 s old


def test_without_the_lowest_rank_the_next_one_leads() -> None:
    steps = [synced(rank, number + rank, 1 + 2 * number) for number in range(HOLD_STEPS + 9) for rank in (2, 3)]
    found = numbered(steps)
    assert {number - local for (rank, local), number in found.items() if rank == 2} == {0}
    assert [found[3, number + 3] for number in range(HOLD_STEPS, HOLD_STEPS + 9)] == [
        number + 2 for number in range(HOLD_STEPS, HOLD_STEPS + 9)
    ]


def test_what_comes_after_the_goodbye_of_the_lead_is_still_matched() -> None:
    """Rank 1 skipped a batch in the end, which nobody could know before; rank 2 follows rank 1 from then on."""
    matcher = StepMatcher(members)
    for one in (synced(0, 0, 1), synced(0, 1, 3), alone(0, 2), synced(0, 3, 6)):
        list(matcher.add_step(one))
    list(matcher.leave(0))
    steps = [synced(2, 0, 1), synced(1, 0, 1), synced(1, 1, 3), synced(1, 2, 6), synced(1, 3, 8), synced(2, 9, 8)]
    found = [(one.rank, number) for each in steps for number, one in matcher.add_step(each)]
    assert found == [(2, 0), (1, 0), (1, 1), (1, 3), (1, 4), (2, 4)]


@given(st.lists(st.integers(0, 1), min_size=2 * STEPS, max_size=2 * STEPS))
def test_a_group_that_does_not_count_numbers_nothing(order: list[int]) -> None:
    """As where a comm hook issues its collectives in another one: each step has the first collective's number."""
    left = [[synced(rank, number, 6, 7) for number in range(STEPS)] for rank in (0, 1)]
    sent = [left[turn].pop(0) if left[turn] else left[1 - turn].pop(0) for turn in order]
    found = numbered(sent)
    assert all(number == count for (_, count), number in found.items())
    assert len(found) == 2 * STEPS


def test_where_a_lead_leaves_only_ranks_that_wait_are_looked_at() -> None:
    matcher = StepMatcher(members)
    for rank in (2, 1, 3):
        assert matcher.add_step(synced(rank, 0, 0)) == []
    assert list(matcher._held) == [2, 1, 3]
    assert [(number, one.rank) for number, one in matcher.add_step(synced(0, 0, 0))] == [(0, 0), (0, 2), (0, 1), (0, 3)]
    assert matcher._held == {}
    matcher.add_step(synced(3, 1, 2))
    assert [one.rank for rank in (0, 1, 2) for _, one in matcher.leave(rank)] == [3]
    assert matcher._held == {}
