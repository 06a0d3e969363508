"""A shift of a rank's mean, in noise that is new in each step and in noise that lasts."""

from __future__ import annotations

import random
from itertools import accumulate
from statistics import fmean, stdev

import pytest

from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness
from ddpwatch.analysis.diagnosis.late.shift import every_step_is_late, fresh, shift

MS = 1_000_000


def lasting_noise(dice: random.Random, steps: int, kept: float, deviation: float) -> list[float]:
    """A first-order autoregression, oldest first."""
    new = [dice.gauss(0, deviation * (1 - kept**2) ** 0.5) for _ in range(steps)]
    return list(accumulate(new, lambda before, one: kept * before + one))


def shift_in(values: list[float], kept: float, deviation: float) -> tuple[float, float]:
    """Of values, oldest first."""
    return shift(fresh(values[::-1], kept, 10 * deviation), kept, (1 - kept**2) * deviation**2)


def test_in_noise_that_is_new_in_each_step_it_is_the_mean() -> None:
    dice = random.Random(2)
    noise = [dice.gauss(0, 1000) for _ in range(65)]
    mean, sure = shift_in([value + 800 for value in noise], 0.0, 1000)
    assert mean == pytest.approx(fmean(noise[1:]) + 800)
    assert sure == pytest.approx(mean / 1000 * 64**0.5, rel=0.15)
    assert shift_in(noise, 0.0, 1000)[1] < 3


def test_where_noise_is_not_known_all_squares_are_noise() -> None:
    dice = random.Random(2)
    assert shift([dice.gauss(8000, 1000) for _ in range(64)], 0.0, None)[1] < 64**0.5


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [8, 64])
def test_by_chance_standard_errors_are_standard(kept: float, steps: int) -> None:
    dice = random.Random(7)
    runs = [lasting_noise(dice, 200 + steps + 1, kept, 1000)[200:] for _ in range(1500)]
    sure = [shift_in(run, kept, 1000)[1] for run in runs]
    assert fmean(sure) == pytest.approx(0, abs=0.1)
    assert stdev(sure) == pytest.approx(1, rel=0.15)


def test_noise_that_lasts_hardly_jumps() -> None:
    """A rank that is suddenly late by one deviation shows more than in its mean alone."""
    dice = random.Random(3)
    found, plain = [], []
    for _ in range(300):
        noise = lasting_noise(dice, 217, 0.9, 1000)[200:]
        late = [noise[0], *(value + 1000 for value in noise[1:])]
        mean, sure = shift_in(late, 0.9, 1000)
        found.append((mean, sure))
        plain.append(fmean(late[1:]) / 1000 * (16 / 19) ** 0.5)  # a mean of 16 steps, each of which says 1/19
    assert fmean(mean for mean, _ in found) == pytest.approx(1000, rel=0.1)
    assert fmean(sure for _, sure in found) > 2 * fmean(plain)


def test_a_rank_that_is_late_in_every_fourth_step_has_no_shift() -> None:
    dice = random.Random(2)
    noise = [dice.gauss(0, 1000) for _ in range(64)]
    for late, shifted in (([value + 4000 * (at % 4 == 0) for at, value in enumerate(noise)], False),
                          ([value + 800 for value in noise], True)):  # fmt: skip
        assert every_step_is_late(late, fmean(late)) == shifted


def test_a_single_jump_names_nobody() -> None:
    """Of a rank that is late by 20 deviations in one step, and is as usual from the next one on."""
    dice = random.Random(5)
    group = GroupLateness((0, 1))
    noise = [lasting_noise(dice, 300, 0.9, 2 * MS) for _ in range(2)]
    noise[0][200] += 40 * MS
    named = [
        streak
        for step, launches in enumerate(zip(*noise, strict=True))
        for streak in group.add_step(step, [int(at) for at in launches], 100 * MS)
    ]
    assert named == []


def test_a_rank_that_is_suddenly_a_little_late_where_noise_lasts() -> None:
    """By 3.2 deviations of what ranks differ by, 7.3 of what is new in a step."""
    dice = random.Random(6)
    group = GroupLateness((0, 1))
    noise = [lasting_noise(dice, 300, 0.9, 2 * MS) for _ in range(2)]
    noise[1][150:] = [value + 9 * MS for value in noise[1][150:]]
    named = []
    for step, launches in enumerate(zip(*noise, strict=True)):
        named += [(step, one.rank, one.since) for one in group.add_step(step, [int(at) for at in launches], 100 * MS)]
    assert [rank for _, rank, _ in named] == [1]
    assert 150 <= named[0][0] < 214
