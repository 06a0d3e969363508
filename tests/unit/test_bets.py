"""Bets on p-values: how rarely chance wins them, and who is named by them since when, until when, in which steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import NormalDist, median

import pytest

from ddpwatch.analysis.diagnosis.late.bets import (
    PERIODS,
    RHYTHM_STAKE,
    SHARES,
    SHIFTS,
    STAKES,
    Bets,
    always_late,
    onset,
    threshold,
    wins,
)
from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness
from ddpwatch.analysis.diagnosis.late.streak import Streak

pytestmark = pytest.mark.same_everywhere
SLOW = pytest.mark.slow  # more of the same

MS = 1_000_000
STEP_NS = 60 * MS
Late = Callable[[int, random.Random], float]


def test_no_bet_wins_by_chance_on_average() -> None:
    """Over all p-values alike, each pays what is placed, but for what lies beyond the limits of p."""
    normal, width = NormalDist(), 0.01
    paid = [
        [factor * normal.pdf(z) * width for factor in wins(normal.cdf(-z))]
        for z in (at * width for at in range(-800, 800))
    ]
    for column in zip(*paid, strict=True):
        assert sum(column) == pytest.approx(1, abs=0.005)
    assert sum(map(always_late, paid)) == pytest.approx(1, abs=0.005)
    assert sum(STAKES) + len(PERIODS) * RHYTHM_STAKE == pytest.approx(1)
    assert len(STAKES) == len(SHIFTS) * len(SHARES)


@pytest.mark.parametrize("least", [30, 100, 300])
def test_chance_reaches_a_capital_in_fewer_than_one_of_so_many_steps(least: float) -> None:
    """Each time, it starts from nothing, so that no stretch of luck counts twice."""
    dice, bets, reached, steps = random.Random(least), Bets(), 0, 20_000
    for step in range(steps):
        bets.add_step(step, dice.random())
        if bets.won()[0] >= least:
            reached, bets = reached + 1, Bets()
    assert 0 < reached <= steps / least


def test_capital_is_won_as_fast_as_the_rank_is_later() -> None:
    """In steps of which it is late in a share."""

    def needed(p: float, share: float) -> int:
        dice, bets, step = random.Random(1), Bets(), 0
        while bets.won()[0] < threshold(8):
            bets.add_step(step, p if dice.random() < share else dice.random())
            step += 1
        return step

    assert needed(0.001, 1.0) <= 6
    assert needed(0.02, 1.0) <= 18
    assert needed(0.001, 0.5) <= 14
    assert needed(0.001, 0.1) <= 120


def test_a_rhythm_wins_in_its_steps() -> None:
    dice, bets = random.Random(2), Bets()
    for step in range(160):
        bets.add_step(step, 0.02 if step % 7 == 3 else dice.random())
    won, rhythm = bets.won()
    assert won >= threshold(8)
    assert rhythm == (7, 3)
    chances = [0.02 if step % 7 == 3 and step >= 50 else 0.5 for step in range(160)]
    assert onset(range(159, -1, -1), chances[::-1], (7, 3)) == 160 - 52


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_since_when_a_rank_is_late_in_noise(share: float, seed: int) -> None:
    """Steps that are late by chance before that do not count, though they are as late as many of those since."""
    dice = random.Random(seed)
    chances = [0.004 if at < 60 and dice.random() < share else dice.random() for at in range(400)]
    assert abs(onset(range(400, 0, -1), chances, None) - 60) <= 12
    assert onset(range(40, 0, -1), [0.8] * 40, None) == 1


def named(
    late: Late, steps: int, *, world: int = 8, sigma: float = 2.0, seed: int = 0, kept: float = 0.0
) -> list[tuple[int, Streak]]:
    """Who is named in which step, where rank 1 is late by so many ms in steps of 60 ms; noise keeps a share."""
    dice, group, found = random.Random(seed), GroupLateness(tuple(range(world))), list[tuple[int, Streak]]()
    level = [0.0] * world
    for step in range(steps):
        level = [kept * value + (1 - kept**2) ** 0.5 * dice.gauss(0, sigma) for value in level]
        launches = [100 + value for value in level]
        launches[1] += late(step, dice)
        found += [(step, streak) for streak in group.add_step(step, [int(at * MS) for at in launches], STEP_NS)]
    return found


def in_turn(at: int, values: Sequence[float]) -> float:
    return values[at % len(values)]


NOISES: list[Late] = [
    lambda step, dice: dice.gauss(100, 2),
    lambda step, dice: dice.uniform(100, 120),
    lambda step, dice: 100 + 12 * (dice.random() < 0.3) + dice.random() / 10,
    lambda step, dice: dice.gauss(100, 1) + dice.uniform(6, 18) * (dice.random() < 0.03),
    lambda step, dice: 100 + in_turn(step, [0, 3, 1]) + dice.gauss(0, 1),
]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=SLOW), 8])
def test_noise_of_any_shape_names_nobody(noise: Late, world: int) -> None:
    dice, group = random.Random(world), GroupLateness(tuple(range(world)))
    for step in range(1500):
        assert group.add_step(step, [int(noise(step, dice) * MS) for _ in range(world)], STEP_NS) == []


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("kept", [0.6, 0.9])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in (1, 2))])
def test_noise_that_lasts_names_nobody(world: int, kept: float, seed: int) -> None:
    assert named(lambda step, dice: 0.0, 800, world=world, kept=kept, seed=seed) == []


@pytest.mark.parametrize("world", [2, 8])
def test_it_is_named_while_it_is_late_and_only_then(world: int) -> None:
    for seed in range(4):
        (found,) = named(lambda step, dice: 8.0 * (100 <= step < 150), 260, world=world, seed=seed)
        step, streak = found
        assert streak.rank == 1
        assert step < 120
        assert (streak.since, streak.until) == (pytest.approx(100, abs=3), pytest.approx(149, abs=3))
        assert (streak.open, streak.constant, streak.period) == (False, True, None)
        assert streak.late_ns == pytest.approx(8 * MS, rel=0.15)


def test_a_fault_that_moves_on_after_thirty_steps() -> None:
    """It moves to the other rank, which is as early before that as this one is late."""
    found = named(lambda step, dice: 10.0 * (60 <= step < 90) - 10.0 * (90 <= step < 120), 160, world=2)
    assert [(streak.rank, pytest.approx(streak.since, abs=2)) for _, streak in found] == [(1, 60), (0, 90)]


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5])
def test_one_that_is_late_at_random(share: float) -> None:
    (found,) = named(lambda step, dice: 15.0 * (dice.random() < share), 300)
    _, streak = found
    assert (streak.rank, streak.constant, streak.period) == (1, False, None)
    assert streak.count == pytest.approx(300 * share, rel=0.25)
    assert streak.since < 30
    assert streak.until > 280


@pytest.mark.parametrize("period", [2, 5, 16])
def test_one_that_is_late_in_a_rhythm(period: int) -> None:
    (found,) = named(lambda step, dice: 10.0 * (step >= 64 and step % period == 0), 64 + 20 * period)
    _, streak = found
    assert (streak.rank, streak.period) == (1, period)
    assert streak.since == pytest.approx(64, abs=2 * period)


def test_a_short_rhythm_is_mostly_named_while_it_lasts() -> None:
    late: Late = lambda step, dice: 15.0 * (step >= 120 and step % 2 == 0)  # noqa: E731
    found = [named(late, 164, world=2, sigma=5 / 2**0.5, seed=seed) for seed in range(20)]
    assert sum([(one.rank, one.period) for _, one in each] == [(1, 2)] for each in found) >= 16


def test_a_single_jump_names_nobody() -> None:
    """Of a rank that is late by 20 deviations in one step, and is as usual from the next one on."""
    for kept in (0.0, 0.9):
        assert named(lambda step, dice: 40.0 * (step == 200), 300, world=2, kept=kept) == []


def test_a_rank_that_is_suddenly_a_little_late_where_noise_lasts() -> None:
    """By 5 deviations of what ranks differ by, 11 of what is new in a step."""
    firsts = []
    for seed in range(6):
        found = named(lambda step, dice: 14.0 * (step >= 150), 300, world=2, kept=0.9, seed=seed)
        assert {streak.rank for _, streak in found} == {1}
        firsts.append(found[0][0])
    assert 150 <= min(firsts) < 180
    assert max(firsts) < 300


def test_one_mistake_does_not_lead_to_others() -> None:
    """Of two ranks, the one that is early after it was late does not make the other one late."""
    found = named(lambda step, dice: 12.0 * (step >= 100 and dice.random() < 0.4), 500, world=2, kept=0.9)
    assert [streak.rank for _, streak in found] == [1]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=SLOW) for seed in range(4, 8))])
def test_a_change_is_a_step_and_no_growth(seed: int) -> None:
    """A drift is one incident, even where the rank was on time before."""

    def since(late: Callable[[int], float]) -> list[int]:
        return [one.since for _, one in named(lambda step, dice: late(step), 200, sigma=0.7, seed=seed)]

    assert len(since(lambda step: 0.2 * max(0, step - 30))) == 1
    assert len(since(lambda step: 3.0 + 0.5 * (step >= 100))) == 1
    assert since(lambda step: 4.0 if step < 100 else 14.0)[1] in range(98, 103)


def test_several_times_as_late_again_and_again_is_a_streak_of_its_own() -> None:
    found = named(lambda step, dice: 5.0 * (step >= 60) + 40.0 * (step >= 200 and step % 5 == 0), 320, sigma=1.0)
    _, often = (streak for _, streak in found)
    assert (often.since, often.period) == (200, 5)
    assert often.late_ns == pytest.approx(45 * MS, rel=0.1)


@pytest.mark.parametrize("sigma", [0.2, 0.5])
def test_steady_growth_is_no_noise(sigma: float) -> None:
    """A rank that is 0.2 ms later in each step is named before it costs an eighth of one."""
    firsts = [named(lambda step, dice: 0.2 * step, 127, world=2, sigma=sigma, seed=seed)[0][0] for seed in range(4)]
    assert median(firsts) * 0.2 * MS < 0.12 * (STEP_NS + median(firsts) * 0.2 * MS)


def test_noise_is_known_from_before_a_streak_when_that_is_over() -> None:
    """What the late rank showed as noise is not lost with what it showed as late: its peer is judged by that."""
    dice = random.Random(2)
    noise = [12 * ((dice.random() < 0.5) - (dice.random() < 0.5)) for _ in range(1000)]
    found = named(lambda step, dice: noise[step] + 40.0 * (500 <= step < 700), 1000, world=2, sigma=0.1)
    assert [streak.rank for _, streak in found] == [1]
    assert not found[0][1].open


def test_what_was_late_before_a_streak_s_end_names_nobody_else() -> None:
    """It showed the other one's noise: without it, that one's own seemed unusual."""
    for seed in range(6):
        dice = random.Random(seed)
        late = GroupLateness((0, 1))
        for number in range(460):
            if number == 400:
                late.release(0, 400)
            noise = [dice.gauss(0, 3e6) + 40e6 * (dice.random() < 0.08) for _ in range(2)]
            assert late.add_step(number, [int(ns) for ns in noise], 100 * MS) == []
