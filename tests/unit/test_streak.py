"""A rank's late steps: since when, until when, in which rhythm, and what they cost."""

from statistics import linear_regression

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.late.late_rank import LateRank
from ddpwatch.analysis.diagnosis.late.streak import Streak, line_through
from tests.support.frames import MS
from tests.unit.test_engine import incidents, late_ones


def test_every_second_step_though_most_watched_ones_are_late_ones():
    """As chance picked them in a real job: 11 of 18 are even."""
    streak = Streak(0, 100 * MS, 584, 584, 40 * MS)
    for number in (584, 586, 588, 591, 592, 594, 597, 598, 600, 603, 605, 607, 608, 611, 612, 615, 616, 618):
        streak.add_step(number, 0 if number % 2 else 40 * MS, 5 * MS, p=0.6 if number % 2 else 0.01)
    assert (streak.constant, streak.period) == (False, 2)


def test_a_first_step_that_is_far_later_does_not_hide_the_others():
    """It was what is typical of them, so that less than half of it was on time, for 36 more watched steps."""
    (found,) = late_ones(incidents([(0, 64), *[(0, 20)] * 19]))
    assert (found.kind, found.ranks, found.steps) == ("straggler", (1,), 20)


def test_a_rhythm_that_noise_has_as_well_is_over_soon():
    streak = Streak(0, 100.0, 0, 0, 10.0, found_in=(16, 0))
    for step_number in range(100 * 16):
        strike = step_number // 16 if step_number % 16 == 0 else None
        late = 0 if strike is None else 10 if strike % 2 == 0 or strike < 8 else -10
        streak.add_step(step_number, late, 1.0, p=(0.02, 0.5, 0.98)[1 - late // 10])
    assert not streak.open


def test_a_rhythm_costs_as_much_in_steps_that_nobody_watched():
    """Also in those that are so old that they are not kept."""
    streak = Streak(0, 100.0 * MS, 0, 0, 50.0 * MS, found_in=(4, 0))
    late = LateRank(streak, (0, 1))
    for number in range(1600):
        watched, struck = number % 7 < 2, number % 4 == 0
        if watched:
            streak.add_step(number, 50 * MS * struck, MS, p=0.01 if struck else 0.6)
        waits = {0: 50 * MS} if watched and struck else {}
        late.add_split(StepSplit(number, 200 * MS, waits=waits, like=None if watched else number // 7 * 7))
    assert late.cost_ns == pytest.approx(400 * 50 * MS, rel=0.1)


@pytest.mark.parametrize(("noise_ms", "cost_ms"), [(0.5, 30.0), (30.0, 21.5)])
def test_a_rank_that_is_late_by_this_and_that_costs_what_each_step_shows(noise_ms, cost_ms):
    """Unless noise explains that: then it is late by what is usual, and chance waits for it longer."""
    streak = Streak(0, 100.0 * MS, 0, 0, 22.0 * MS, noise_ns=noise_ms * MS)
    late, waits = LateRank(streak, (0, 1)), (20, 22, 30, 48)
    for number in range(400):
        ns = waits[number % 4] * MS
        streak.add_step(number, ns, MS, p=0.01)
        late.add_split(StepSplit(number, 200 * MS, waits={0: ns}))
    assert late.cost_ns / 400 / MS == pytest.approx(cost_ms, rel=0.06)


@given(st.lists(st.integers(-(10**9), 10**9), min_size=3, max_size=40), st.integers(1, 10**6))
def test_a_trend_is_the_line_of_the_least_squares(values, first):
    points = list(enumerate(values, first))
    slope, middle = linear_regression(*zip(*points, strict=True))
    for last in (first, points[-1][0]):
        line = line_through(points, last)
        assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-3)
        assert line.end == pytest.approx(middle + slope * last, rel=1e-6, abs=10)
