"""Which steps are recorded in full: as many as the budget allows, the same ones on all ranks, in no rhythm."""

from __future__ import annotations

import pytest

from ddpwatch.probe.pace import BUDGET, JUDGED, LONGEST, UNSEEN, UNWATCHED, Pace, chosen, pace_of

MS = 1_000_000
PERIODS = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("period", PERIODS)
def test_one_step_of_each_period_is_chosen(period: int) -> None:
    for block in range(200):
        assert sum(chosen(step, period) for step in range(block * period, (block + 1) * period)) == 1


def test_ranks_with_different_periods_choose_the_same_steps_as_far_as_they_can() -> None:
    for longer, shorter in zip(PERIODS[1:], PERIODS, strict=False):
        assert all(chosen(step, shorter) for step in range(4096) if chosen(step, longer))


def test_one_step_in_32_is_not_watched_and_lies_between_two_of_one_kind() -> None:
    unwatched = [step for step in range(32_000) if Pace.is_unwatched(step)]
    assert len(unwatched) == 32_000 / UNWATCHED - 1  # none at the very beginning
    for period in PERIODS:
        pace = Pace()
        pace.period = period
        alike = sum(pace.is_shadow(step - 1) == pace.is_shadow(step + 1) for step in unwatched)
        assert alike > (0.4 if period == 2 else 0.85) * len(unwatched)


@pytest.mark.parametrize("rhythm", [2, 4, 8, 10, 16, 100])
def test_the_choice_has_no_rhythm(rhythm: int) -> None:
    """What a job does every so many steps meets full steps as often as any other step does."""
    steps = range(0, 64_000, rhythm)
    assert sum(chosen(step, 8) for step in steps) / len(steps) == pytest.approx(1 / 8, rel=0.15)


def taught(own_ns: int, step_ns: int, pace: Pace | None = None) -> Pace:
    pace = pace or Pace()
    for _ in range(JUDGED):
        pace.learn(own_ns, step_ns)
    return pace


def test_a_cheap_step_is_always_recorded_in_full() -> None:
    pace = taught(int(BUDGET * 100 * MS / UNSEEN / 2), 100 * MS)
    assert pace.period == 1
    assert not any(pace.is_shadow(step) for step in range(1600))


@pytest.mark.parametrize("times", [1.5, 3, 7, 15])
def test_a_dear_step_is_recorded_in_full_as_often_as_the_budget_allows(times: float) -> None:
    """Its cost, spread over all steps, is within the budget, and more than half of it is used."""
    pace = taught(int(times * BUDGET * 100 * MS / UNSEEN), 100 * MS)
    full = sum(not pace.is_shadow(step) for step in range(64, 64 + 3200)) / 3200
    assert 0.45 <= times * full <= 1.01


def test_a_period_has_an_end_and_comes_back() -> None:
    pace = taught(50 * MS, 100 * MS)
    assert pace.period == LONGEST
    assert taught(1000, 100 * MS, pace).period == 1


def test_a_period_does_not_flutter() -> None:
    """A little less than before is no reason to change."""
    pace = taught(int(3 * BUDGET * 100 * MS / UNSEEN), 100 * MS)
    assert pace.period == 4
    assert taught(int(1.5 * BUDGET * 100 * MS / UNSEEN), 100 * MS, pace).period == 4


def test_shadows_can_be_turned_off() -> None:
    assert pace_of({"DDPWATCH_SHADOW": "0"}) is None
    assert pace_of({}) is not None
