"""What noise is: how large, and how long it lasts."""

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.diagnosis.late.residuals import Residuals, correlation, deviations, spread, tail
from ddpwatch.analysis.diagnosis.rules.tail import Tail
from ddpwatch.common.statistics import RollingMedian
from tests.support.frames import (
    MS,
)


def test_deviations_are_from_the_median_rank():
    assert deviations([5, 9]) == [-4, 4]
    assert deviations([1, 5, 2, 3]) == [-1, 3, 0, 1]


def test_the_spread_of_noise_is_not_moved_by_a_few_faults():
    rng = random.Random(3)
    clean = [rng.gauss(0, 1000) for _ in range(400)]
    assert spread(sorted(clean), 1) == pytest.approx(1000, rel=0.2)
    assert spread(sorted(value + 50_000 * (n % 80 == 0) for n, value in enumerate(clean)), 1) == pytest.approx(
        1000, rel=0.4
    )


def test_what_is_assumed_of_noise_has_heavy_tails():
    """Student's distribution with three degrees of freedom: of a table."""
    assert [tail(z) for z in (0.0, 1.638, 3.182, 10.215)] == pytest.approx([0.5, 0.1, 0.025, 0.001], rel=0.01)


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("kept", [0.6, 0.9])
def test_what_lasts_of_noise_is_not_new(world, kept):
    rng, group = random.Random(world), Residuals(world)
    level, new = [0.0] * world, []
    for number in range(300):
        level = [kept * value + rng.gauss(0, MS) * (1 - kept**2) ** 0.5 for value in level]
        group.add_step(number, [int(100 * MS + value) for value in level], 60 * MS, 0)
        group.estimate(None)
        group.keep_noise({})
        new.append(group.new[0])
    assert group.is_known
    assert group.kept == pytest.approx(kept, abs=0.15)
    assert abs(correlation(new[150:])) < 0.3


@pytest.mark.parametrize("world", [3, 4, 8])
def test_noise_of_a_late_rank_is_that_of_two_others(world):
    """What is left of others' once the median rank is taken out is less, in a small group."""
    rng, group = random.Random(world), Residuals(world)
    for number in range(300):
        group.add_step(number, [int(rng.gauss(140 if at == 1 else 100, 8) * MS) for at in range(world)], 60 * MS, 0)
    assert group.noise_ns(1) == pytest.approx(8 * 2**0.5 * MS, rel=0.2)


@pytest.mark.parametrize("world", [2, 8])
def test_alike_ranks_have_all_p_values_alike(world):
    """Or larger ones: who is late by less than half of what matters counts as on time."""
    rng, group, found = random.Random(world), Residuals(world), []
    for number in range(600):
        group.add_step(number, [int(rng.gauss(100, 8) * MS) for _ in range(world)], 60 * MS, 0)
        group.estimate(None)
        if number >= 100:
            found += [group.p_value(index, 0) for index in range(world)]
        group.keep_noise({})
    for p in (0.5, 0.1, 0.01):
        assert sum(at <= p for at in found) / len(found) <= 1.1 * p
    assert sum(at <= 0.1 for at in found) / len(found) > 0.05
    assert list(group.p_values(1, 598).values())[-1] == group.p_value(1, 0)


def test_many_ranks_are_compared_with_some_of_them():
    group = Residuals(64)
    for number in range(20):
        group.add_step(number, [100 * MS] * 63 + [150 * MS], 60 * MS, 0)
        group.estimate(None)
        group.keep_noise({63: 50.0 * MS})
    assert group.p_value(63, 0) < 0.01 < 0.3 < group.p_value(62, 0)


@pytest.mark.parametrize(("index", "most"), [(2.0, 2), (3.0, 2)])
def test_chance_goes_beyond_the_tail_as_rarely_as_stated(index, most):
    """In 20,000 steps, 0.2 are expected."""
    rng, tail, beyond = random.Random(4), Tail(), 0
    for number in range(20_000):
        excess = 10.0 * rng.paretovariate(index)
        beyond += number >= 16 and excess > tail.end(100.0)
        tail.add_excess(excess, 100.0)
    assert beyond <= most


def test_a_stall_does_not_hide_the_next_one():
    tail = Tail()
    for number in range(300):
        tail.add_excess(12_000.0 if number % 100 == 99 else 5.0, 100.0)
    assert tail.end(100.0) < 1_000


@given(st.integers(1, 9), st.lists(st.integers(-5, 5), min_size=1, max_size=40))
def test_a_rolling_median_is_that_of_the_newest(size, values):
    rolling = RollingMedian(size)
    for count, value in enumerate(values, 1):
        rolling.add_value(value)
        assert rolling.median == median(values[max(0, count - size) : count])
    rolling.clear()
    assert len(rolling) == 0
