"""RankStrips over a run: nothing is lost but detail, whatever the number of ranks and steps."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.rank_strips import RankStrips
from tests.support.runs import MS, step_of


def across(number: int, ranks: int = 2, **changes: object) -> StepAcrossRanks:
    made = StepAcrossRanks(number)
    for rank in range(ranks):
        made.add_step(replace(step_of(rank, number), **changes))
    return made


def strips_of(*steps: StepAcrossRanks, most: int = 64) -> RankStrips:
    strips = RankStrips(most)
    for step in steps:
        strips.add_step(step)
    return strips


def test_a_short_run_is_known_step_by_step() -> None:
    strips = strips_of(*(across(number, duration_ns=number * MS) for number in range(5, 20)))
    assert (strips.first, strips.stride, strips.columns, strips.ranks) == (5, 1, 15, [0, 1])
    assert strips.longest_ns().tolist() == [[number * MS for number in range(5, 20)]] * 2


def test_a_column_of_a_long_run_has_the_longest_step_and_the_mean_lateness() -> None:
    """Rank 1 is 2 ms late in every second step of 100 ms, of which one took ten times as long."""
    late = [across(number) for number in range(0, 400, 2)]
    steps = late + [across(number, status="unwatched") for number in range(1, 400, 2)]
    steps.append(across(201, duration_ns=1000 * MS, status="unwatched"))
    strips = strips_of(*sorted(steps, key=lambda step: step.step))
    assert strips.columns * strips.stride >= 400
    assert strips.columns * 2 <= 64
    (first, second), (_, share) = strips.longest_ns(), strips.late()
    assert first.tolist() == second.tolist()
    assert [place for place, longest in enumerate(first) if longest > 100 * MS] == [201 // strips.stride]
    assert share[1:] == pytest.approx(0.02, rel=1e-3)  # the first step is warm-up


def test_what_is_not_known_is_not_zero() -> None:
    strips = strips_of(across(1, ranks=1), across(2, status="unwatched"), across(4))
    assert strips.longest_ns().tolist() == [[100 * MS, 100 * MS, 0, 100 * MS], [0, 100 * MS, 0, 100 * MS]]
    assert np.isnan(strips.late()).tolist() == [[True, True, True, False]] * 2


def test_ranks_that_come_later_leave_what_is_known() -> None:
    strips = strips_of(*(across(number, ranks=1 + number // 8) for number in range(32)), across(0), across(-1))
    longest = strips.longest_ns()
    assert strips.ranks == [0, 1, 2, 3]
    assert longest.shape == (4, strips.columns)
    assert strips.columns <= 16
    assert [int((row > 0).argmax()) * strips.stride for row in longest] == [0, 0, 16, 24]
