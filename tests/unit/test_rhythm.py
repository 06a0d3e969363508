"""A rank that is late in the steps of a rhythm: by their mean, and by runs of late ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, stdev

import pytest

from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness, run_length
from ddpwatch.analysis.diagnosis.late.noise import FALSE_ALARMS, FIGURES
from ddpwatch.analysis.diagnosis.late.streak import Streak, explained, newest_run, rhythm, standard_errors

STRIPS = 20_000
MS = 1_000_000


def test_a_rhythm() -> None:
    rng = random.Random(2)
    noise = [(step, round(rng.gauss(0, 1000))) for step in range(128)]
    assert rhythm(noise, 3000, 6.0) is None
    found = rhythm([(step, value + 2500 * (step % 5 == 3)) for step, value in noise], 3000, 6.0)
    assert found is not None
    assert (found.period, found.residue, found.late_ns) == (5, 3, pytest.approx(2500, rel=0.2))
    assert [step for step in range(10) if found.strikes(step)] == [3, 8]
    assert rhythm([(step, 0) for step in range(128)], 3000, 6.0) is None


def test_no_rounding_makes_a_rhythm() -> None:
    assert rhythm([(step, 0.1) for step in range(128)], 3000, 6.0) is None  # type: ignore[misc]  # a variance below 0


@pytest.mark.parametrize("errors", [3.0, 4.5, 6.0])
@pytest.mark.parametrize("count", [32, 64, 128, 512])
def test_what_a_part_of_normal_noise_explains_by_chance(errors: float, count: int) -> None:
    """The share is the square of a correlation, whose distribution is known: (1 - r²) to the power of (n - 4) / 2."""
    least = sqrt(explained(errors, count))
    assert standard_errors(least**2, count) == pytest.approx(errors)

    def area(first: float) -> float:
        width = (1 - first) / STRIPS
        return sum((1 - (first + (at + 0.5) * width) ** 2) ** ((count - 4) / 2) for at in range(STRIPS)) * width

    assert area(least) / (2 * area(0.0)) == pytest.approx(NormalDist().cdf(-errors), rel=0.15)


def test_standard_errors_are_those_of_noise_alone() -> None:
    """What is late in a few steps is no noise: it does not hide itself."""
    rng = random.Random(4)
    noise = [rng.gauss(0, 1000) for _ in range(64)]
    rows = [(step, round(value + 4000 * (step % 4 == 1))) for step, value in enumerate(noise)]
    found = rhythm(rows, 9000, 5.0)
    assert found is not None
    assert 7 < found.sure < 4000 / stdev(noise) * sqrt(16 * 48 / 64)


def run(rows: Sequence[int], *late: int, least: int = 5) -> tuple[int, int] | None:
    """Late in every fifth of these steps, and in some others."""
    return newest_run(sum(1 << at for at, step in enumerate(rows) if step % 5 == 3 or step in late), rows, least)


def test_a_run() -> None:
    rows = list(reversed(range(49)))
    assert run(rows) == run(rows, 12, 20) == (5, 46)
    assert run(rows, 12, 20, 24, 29) is None  # too many in between: it may be late at random
    assert run(rows, least=11) is None
    assert run(rows[:21]) is None  # five are no noise, but a rank that is late in every fifth step might do so
    assert run([step for step in rows if step % 5 == 3]) is None  # every step that is known


@pytest.mark.parametrize(("ranks", "rate"), [(2, 0.005), (1024, 0.03)])
def test_how_long_a_run_is_no_chance(ranks: int, rate: float) -> None:
    allowed = FALSE_ALARMS / 2 / (FIGURES * ranks * 3 * 15)
    assert rate ** run_length(rate, ranks) < allowed < rate ** (run_length(rate, ranks) - 1)


def lateness_of(values: Sequence[float]) -> tuple[GroupLateness, list[tuple[int, Streak]]]:
    """Two ranks, of which the second one is late by so many ms in steps of 40 ms; and who was named in which step."""
    group, named = GroupLateness((0, 1)), list[tuple[int, Streak]]()
    for step, value in enumerate(values):
        named += [(step, streak) for streak in group.add_step(step, [0, round(value * MS)], 40 * MS)]
    return group, named


def test_a_short_rhythm_is_mostly_named_while_it_lasts() -> None:
    """Its late steps are too few for counts, and too short of 4 standard deviations for a run."""
    in_time = 0
    for seed in range(20):
        rng = random.Random(seed)
        late = [rng.gauss(0, 5) + 15 * (at >= 120 and at % 2 == 0) for at in range(164)]
        _, named = lateness_of(late)
        in_time += [(streak.rank, streak.period) for _, streak in named] == [(1, 2)]
    assert in_time >= 16


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_one_mistake_does_not_lead_to_others(share: float) -> None:
    """Noise of two values looks like lateness sooner than normal noise, and in few steps like a rhythm."""
    rng = random.Random(7)
    late = [[12 * (rng.random() < share) + rng.random() / 10 for _ in range(2)] for _ in range(5000)]
    _, named = lateness_of([second - first for first, second in late])
    assert len(named) <= 1


def test_noise_is_known_from_before_a_streak_when_that_is_over() -> None:
    """What the late rank showed as noise is not lost with what it showed as late: its peer is judged by that."""
    rng = random.Random(2)
    noise = [12 * ((rng.random() < 0.5) - (rng.random() < 0.5)) for _ in range(2000)]
    group, named = lateness_of([value + 40 * (500 <= at < 700) for at, value in enumerate(noise)])
    assert [streak.rank for _, streak in named] == [1]
    assert not group.streaks


def test_a_rank_that_is_late_now_and_then_was_late_in_every_step_in_between() -> None:
    rng = random.Random(3)
    values = [rng.gauss(0, 3) + (7 if 150 <= at < 210 else 8 * (rng.random() < 0.25)) for at in range(400)]
    group, named = lateness_of(values)
    _, constant = named[0]
    assert not constant.open
    assert constant.constant
    assert (constant.since, constant.until) == (pytest.approx(150, abs=3), pytest.approx(210, abs=3))
    assert all(streak.since > constant.until for streak in group.streaks.values())
