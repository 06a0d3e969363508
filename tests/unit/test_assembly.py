"""Steps that wait for a rank that sends nothing: how many are kept."""

from __future__ import annotations

import pytest

from ddpwatch.analysis.assembly import OPEN_STEPS, StepAssembler
from tests.support.frames import hello, step


@pytest.mark.parametrize(("world", "open_steps"), [(2, OPEN_STEPS), (128, 1024), (1024, 128), (1 << 20, 64)])
def test_the_more_ranks_the_fewer_steps_wait_for_one_that_is_missing(world: int, open_steps: int) -> None:
    assembler = StepAssembler()
    assembler.apply(hello(0, world))
    numbers = range(open_steps + 100)
    closed = [found.step for number in numbers for found in assembler.apply(step(0, number))]
    assert len(assembler._open) == open_steps
    assert [*closed, *(found.step for found in assembler.rest())] == list(numbers)


def test_a_step_that_lacks_a_rank_comes_before_the_next_complete_one() -> None:
    assembler = StepAssembler()
    for rank in (0, 1):
        assembler.apply(hello(rank, 2))
    sent = [step(rank, number) for number in range(40) for rank in (0, 1) if (rank, number) not in ((1, 20), (0, 30))]
    found = [across for one in sent for across in assembler.apply(one)]
    assert [across.step for across in found] == list(range(40))
    assert [across.step for across in found if len(across) == 1] == [20, 30]
    assert not list(assembler.rest())


def test_a_count_that_starts_again_closes_nothing_that_is_newer() -> None:
    assembler = StepAssembler()
    for rank in (0, 1):
        assembler.apply(hello(rank, 2))
    sent = [step(0, 7), *(step(rank, number) for number in (0, 1) for rank in (0, 1))]
    assert [across.step for one in sent for across in assembler.apply(one)] == [0, 1]
    assert [across.step for across in assembler.rest()] == [7]
