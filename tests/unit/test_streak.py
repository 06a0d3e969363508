"""A rank's late steps: since when, until when, in which rhythm, and what they cost."""

import random
from statistics import linear_regression

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.late.change import change
from ddpwatch.analysis.diagnosis.late.late_rank import LateRank
from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness
from ddpwatch.analysis.diagnosis.late.onset import onset
from ddpwatch.analysis.diagnosis.late.streak import Rhythm, Streak
from ddpwatch.analysis.diagnosis.late.trend import Trend
from tests.support.frames import (
    MS,
)


def test_every_second_step_though_most_watched_ones_are_late_ones():
    """As chance picked them in a real job: 11 of 18 are even."""
    streak = Streak(0, 100 * MS, 584, 584, 40 * MS, expected=11 / 18)
    for number in (584, 586, 588, 591, 592, 594, 597, 598, 600, 603, 605, 607, 608, 611, 612, 615, 616, 618):
        streak.add_step(number, 0 if number % 2 else 40 * MS, 5 * MS)
    assert (streak.constant, streak.period) == (False, 2)


def test_a_rhythm_that_noise_has_as_well_is_over_soon():
    streak = Streak(0, 100.0, 0, 0, 10.0, rhythm=Rhythm(16, 0, 10.0, 0.0))
    for step_number in range(100 * 16):
        strike = step_number // 16 if step_number % 16 == 0 else None
        streak.add_step(step_number, 0 if strike is None else 10 if strike % 2 == 0 or strike < 8 else -10, 1.0)
    assert not streak.open


def test_what_was_late_before_a_streak_s_end_names_nobody_else():
    """It showed the other one's noise: without it, that one's own seemed unusual."""
    for seed in range(6):
        rng = random.Random(seed)
        late = GroupLateness((0, 1))
        for number in range(460):
            if number == 400:
                late.release(0, 400)
            noise = [rng.gauss(0, 3e6) + 40e6 * (rng.random() < 0.08) for _ in range(2)]
            assert late.add_step(number, [int(ns) for ns in noise], 100 * MS) == []


def test_a_rhythm_costs_as_much_in_steps_that_nobody_watched():
    """Also in those that are so old that they are not kept."""
    streak = Streak(0, 100.0 * MS, 0, 0, 50.0 * MS, rhythm=Rhythm(4, 0, 50.0 * MS, 0.0))
    late = LateRank(streak, (0, 1))
    for number in range(1600):
        watched, struck = number % 7 < 2, number % 4 == 0
        if watched:
            streak.add_step(number, 50 * MS * struck, MS)
        waits = {0: 50 * MS} if watched and struck else {}
        late.add_split(StepSplit(number, 200 * MS, waits=waits, like=None if watched else number // 7 * 7))
    assert late.cost_ns == pytest.approx(400 * 50 * MS, rel=0.1)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_since_when_a_rank_is_late_in_noise(share, seed):
    """Steps that are late by chance before that do not count, though they are as late as many of those since."""
    rng = random.Random(seed)
    size = 1500 if share == 1.0 else 4000
    noise = [rng.gauss(0, 1000) for _ in range(400)]
    values = [value + size * (at < 60 and rng.random() < share) for at, value in enumerate(noise)]
    assert abs(onset(values, size, 1000, [-value for value in noise]) - 60) <= 12
    assert onset([-1000] * 40, size, 1000, noise) == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_change_is_a_step_and_no_growth(seed):
    """A drift is one incident, even where the rank was on time before."""

    def found(late):
        rng = random.Random(seed)
        values = [round(at + rng.gauss(0, 20)) for at in late]
        return change([(number, at, at > 20) for number, at in enumerate(values)], 10)

    assert found([2 * max(0, number - 30) for number in range(128)]) is None
    assert found([0] * 90 + [80] * 16) in range(88, 93)
    assert found([0] * 40 + [60] * 80) in range(38, 43)
    assert found([30] * 60 + [35] * 60) is None


@given(st.lists(st.integers(-(10**9), 10**9), min_size=3, max_size=40), st.integers(1, 10**6))
def test_a_trend_is_the_line_of_the_least_squares(values, first):
    """Points that were dropped leave nothing behind."""
    trend, points = Trend(), list(enumerate(values, first))
    for point in [*points, *points[:1]]:
        trend.add_point(*point)
    trend.drop(*points[0])
    slope, middle = linear_regression(*zip(*points, strict=True))
    line = trend.line(points[-1][0])
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-3)
    assert line.at(points[0][0]) == pytest.approx(middle + slope * first, rel=1e-6, abs=10)
