"""A run that gets slower and slower: since when, until when, and what it cost."""

import random
from collections.abc import Callable

import pytest

from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.rules.run_drift import RunDrift


def drifts(steps: int, longer: Callable[[int], float], noise: float = 3.0) -> list[Incident]:
    """Those of a run whose steps take 100 µs, and longer by that."""
    rng, run = random.Random(5), RunDrift(DeviceCauses())
    for number in range(steps):
        run.add_step(number, round(1000 * (100 + longer(number) + rng.gauss(0, noise))), number)
    return run.incidents()


def test_it_lasts_while_steps_get_slower() -> None:
    (found,) = drifts(640, lambda number: number / 16)
    assert (found.open, found.since_step, found.until_step) == (True, 0, 639)
    assert found.gain == pytest.approx(1 - 100 / 140, abs=0.02)
    assert found.cost_ns == pytest.approx(1000 * sum(number / 16 for number in range(640)), rel=0.1)
    assert "get slower and slower" in found.message


def test_bare_steps_cost_as_much_as_those_around_them() -> None:
    run = RunDrift(DeviceCauses())
    for number in range(0, 2560, 4):
        run.add_step(number, round(1000 * (100 + number / 64)), number)
    (found,) = run.incidents()
    assert found.cost_ns == pytest.approx(1000 * sum(number / 64 for number in range(2560)), rel=0.05)


def test_a_run_that_recovers_keeps_it_in_the_list() -> None:
    (found,) = drifts(2000, lambda number: number / 16 if number < 640 else 0)
    assert not found.open
    assert found.until_step == 639
    assert found.cost_ns == pytest.approx(1000 * sum(number / 16 for number in range(640)), rel=0.1)
    assert "got slower and slower" in found.message


def test_a_run_that_stays_slow_keeps_it_in_the_list() -> None:
    (found,) = drifts(20_000, lambda number: min(number, 640) / 16)
    assert not found.open
    assert 640 <= (found.until_step or 0) < 4 * 640


def test_it_may_start_late() -> None:
    (found,) = drifts(4800, lambda number: max(0, number - 4000) / 16)
    assert found.open
    assert found.since_step == pytest.approx(4000, abs=256)


def test_one_after_the_other() -> None:
    found = drifts(2560, lambda number: number % 1280 / 16)
    assert [one.open for one in found] == [False, True]
    assert found[1].since_step == pytest.approx(1280, abs=128)


@pytest.mark.parametrize("noise", [1.0, 10.0])
def test_noise_is_none(noise: float) -> None:
    assert drifts(40_000, lambda number: 0, noise) == []


def test_a_step_is_none() -> None:
    assert drifts(4000, lambda number: 40 if number > 2000 else 0) == []
