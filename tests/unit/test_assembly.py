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
