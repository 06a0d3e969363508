"""What noise is in a group, and how rarely it names somebody."""

import random
from math import asin, pi
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness
from ddpwatch.analysis.diagnosis.late.noise import (
    FALSE_ALARMS,
    THRESHOLDS,
    WINDOWS,
    alarm_counts,
    at_least,
    deviations,
    lasting,
    scale,
)
from ddpwatch.analysis.diagnosis.rules.tail import Tail
from ddpwatch.common.statistics import RollingMedian
from tests.support.frames import (
    MS,
)


def test_deviations_are_from_the_median_rank():
    assert deviations([5, 9]) == [-4, 4]
    assert deviations([1, 5, 2, 3]) == [-1, 3, 0, 1]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("faulty", [range(0), range(100, 160, 3), range(200, 260)])
def test_noise_is_what_it_was_when_it_was_due_whenever_it_is_needed(world, faulty):
    """Who looks at it in every step finds the same as who looks at it now and then."""
    rng = random.Random(world)
    always, rarely = GroupLateness(tuple(range(world))), GroupLateness(tuple(range(world)))
    for number in range(300):
        launches = [int(rng.gauss(0, (1 + number % 7) * MS)) for _ in range(world)]
        launches[-1] += 40 * MS * (number in faulty)
        found, same = (one.add_step(number, launches, 100 * MS + number) for one in (always, rarely))
        assert [(streak.rank, streak.since) for streak in found] == [(streak.rank, streak.since) for streak in same]
        always.noise.estimate_correlation()
        assert always.noise.scale_ns >= 0
        if number % 37 == 36:
            rarely.noise.estimate_correlation()
            assert (always.noise.scale_ns, always.noise.correlation_time) == (
                rarely.noise.scale_ns,
                rarely.noise.correlation_time,
            )


def test_the_scale_of_noise_is_not_moved_by_faults():
    rng = random.Random(3)
    clean = [int(rng.gauss(0, 1000)) for _ in range(400)]
    assert scale(clean) == pytest.approx(1000, rel=0.2)
    assert scale([value + 50_000 * (n % 5 == 0) for n, value in enumerate(clean)]) == pytest.approx(1000, rel=0.4)


@pytest.mark.parametrize("world", [3, 4, 8])
def test_the_median_rank_does_not_make_noise_seem_small(world):
    """Its deviation is 0 in every step: of three ranks, that is a third of all deviations."""
    rng, group = random.Random(world), GroupLateness(tuple(range(world)))
    for number in range(100):
        group.add_step(number, [int(rng.gauss(0, MS)) for _ in range(world)], 100 * MS)
    assert 0.8 * MS < group.noise.scale_ns < 2.0 * MS


@pytest.mark.parametrize(("world", "least"), [(2, 0.9), (8, 0.7)])
def test_the_scale_of_noise_that_lasts_is_known_from_what_changes(world, least):
    """A few steps show a part of it only: the level changes by a tenth from step to step."""
    smallest = []
    for seed in range(10):
        rng, group = random.Random(seed), GroupLateness(tuple(range(world)))
        level, seen = [rng.gauss(0, MS) for _ in range(world)], []
        for number in range(96):
            level = [0.9 * value + rng.gauss(0, MS) * (1 - 0.9**2) ** 0.5 for value in level]
            group.add_step(number, list(map(int, level)), 100 * MS)
            seen.append(group.noise.scale_ns)
        smallest.append(min(seen[40:]))
    assert median(smallest) > least * MS


@pytest.mark.parametrize("noise_ms", [0.2, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_steady_growth_is_no_noise(noise_ms, seed):
    """A rank that is 0.2 ms later in each step of 75 ms was named after 127 steps, when it cost a quarter of a step."""
    rng, group = random.Random(seed), GroupLateness((0, 1))
    for number in range(127):
        launches = [int(rng.gauss(100, noise_ms) * MS) for _ in range(2)]
        late_ns = number * MS // 5
        launches[1] += late_ns
        if found := group.add_step(number, launches, 75 * MS + late_ns):
            break
    assert [streak.rank for streak in found] == [1]
    assert late_ns < 0.12 * (75 * MS + late_ns)


@pytest.mark.parametrize("correlation", [0.3, 0.6, 0.9])
def test_how_long_noise_exceeds_a_threshold(correlation):
    """At 0 deviations, the correlation of the signs is 2/pi arc sin r; a high threshold is exceeded more shortly."""
    correlation_time = (1 + correlation) / (1 - correlation)
    signs = 1 + 2 * sum(2 / pi * asin(correlation**lag) for lag in range(1, 200))
    assert 0.99 * signs < lasting(correlation_time, 0.0) < 1.1 * signs  # of one that is rounded up
    assert correlation_time > lasting(correlation_time, 1.5) > lasting(correlation_time, 4.0) > 1
    assert lasting(1.0, 1.5) == 1


@pytest.mark.parametrize("ranks", [2, 8, 1024])
@pytest.mark.parametrize("probability", [0.05, 0.005])
def test_alarms_by_chance_are_as_rare_as_stated(ranks, probability):
    """The exact binomial tail of each window, over all windows, thresholds and ranks."""
    from math import comb

    chance = 0.0
    for window, needed in zip(WINDOWS, alarm_counts(probability, ranks), strict=True):
        for count in range(needed, window + 1):
            chance += comb(window, count) * probability**count * (1 - probability) ** (window - count)
    assert chance * ranks * len(THRESHOLDS) <= FALSE_ALARMS


@pytest.mark.parametrize("probability", [0.3, 0.9, 1.0])
def test_a_tail_is_that_of_the_binomial_however_many_steps(probability):
    """A rank may have been late for days: there are more ways than a float holds."""
    assert at_least(0, 50, probability) == pytest.approx(1)
    assert at_least(48, 50, 0.9) == pytest.approx(0.1117, abs=1e-4)
    assert at_least(17_000, 20_000, probability) == pytest.approx(float(probability > 0.85))


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
