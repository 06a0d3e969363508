"""Steps that wait for a rank that sends nothing: how many are kept, and what they are shown and diagnosed as."""

from __future__ import annotations

import pytest

from ddpwatch.analysis.kept_steps import KEPT, KeptSteps
from ddpwatch.analysis.run import OPEN, Run
from tests.support.frames import hello, step


def introduced(world: int, kept: KeptSteps | None = None) -> Run:
    run = Run(kept=kept)
    for rank in range(world):
        run.apply_message(hello(rank, world))
    return run


@pytest.mark.parametrize(("world", "open_steps"), [(2, OPEN.steps), (128, 1024), (1024, 128), (1 << 20, 64)])
def test_the_more_ranks_the_fewer_steps_wait_for_one_that_is_missing(world: int, open_steps: int) -> None:
    run = Run()
    run.apply_message(hello(0, world))
    numbers = range(open_steps + 100)
    closed = [found.step for number in numbers for found in run.apply_message(step(0, number))]
    assert len(run._open) == open_steps
    assert [*closed, *(found.step for found in run.rest())] == list(numbers)


def test_a_step_that_lacks_a_rank_comes_before_the_next_complete_one() -> None:
    run = introduced(2)
    sent = [step(rank, number) for number in range(40) for rank in (0, 1) if (rank, number) not in ((1, 20), (0, 30))]
    found = [across for one in sent for across in run.apply_message(one)]
    assert [across.step for across in found] == list(range(40))
    assert [across.step for across in found if len(across) == 1] == [20, 30]
    assert not list(run.rest())


def test_steps_are_closed_in_order_though_their_first_frames_come_otherwise() -> None:
    """Rank 1 lost its step 1, and is ahead."""
    run = introduced(2)
    sent = [step(0, 0), step(1, 0), step(1, 2), step(0, 1), step(0, 2)]
    assert [(found.step, len(found)) for one in sent for found in run.apply_message(one)] == [(0, 2), (1, 1), (2, 2)]


def test_a_count_that_starts_again_closes_nothing_that_is_newer() -> None:
    run = introduced(2)
    sent = [step(0, 7), *(step(rank, number) for number in (0, 1) for rank in (0, 1))]
    assert [across.step for one in sent for across in run.apply_message(one)] == [0, 1]
    assert [across.step for across in run.rest()] == [7]


@pytest.mark.parametrize(("keeps", "members"), [(True, [0, 1]), (False, [1])])
def test_a_frame_that_comes_after_its_step_was_closed(keeps: bool, members: list[int]) -> None:
    """It is added to what is kept, and diagnosed no more; else it makes a step of its own."""
    kept = KeptSteps() if keeps else None
    run = introduced(2, kept)
    sent = [step(0, 0), step(0, 1), step(1, 1), step(1, 0)]
    assert [(found.step, len(found)) for one in sent for found in run.apply_message(one)] == [(0, 1), (1, 2)]
    late = next(iter(kept.by_number.values())) if kept else next(run.rest())
    assert (late.step, sorted(late.members)) == (0, members)
    assert not list(run.rest())


def test_what_is_older_than_anything_kept_is_dropped_and_what_waits_is_kept_and_diagnosed() -> None:
    kept = KeptSteps()
    run = introduced(2, kept)
    numbers = range(100, 110 + OPEN.steps)
    closed = [found.step for number in numbers for found in run.apply_message(step(0, number))]
    assert closed == list(numbers[:10])
    assert list(kept.by_number) == list(numbers[-KEPT.steps :])
    run.apply_message(step(1, 99))
    assert 99 not in kept.by_number
    assert 99 not in run._open
    assert run.diagnosis.lost().rank_ns > 0
