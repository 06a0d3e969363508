"""The tests that the benchmark of diagnosis compares the engine with, against the normal distribution's own."""

from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pytest

from ddpwatch.analysis.diagnosis.late.bets import FALSE_ALARMS
from tests.support.diagnosis_oracle import Figure, Powers, powers

pytestmark = pytest.mark.same_everywhere

SOON = 10
NORMAL = NormalDist()


def asked(
    size: float, strikes: npt.NDArray[np.int64], *, steps: int = 200, kept: float = 0.0, ranks: int = 8
) -> Powers:
    """What is found of a fault of so many standard deviations, in normal noise that keeps a share from step to step."""
    noise = np.random.default_rng(1).standard_normal((2000, ranks))
    for step in range(1, len(noise)):
        noise[step] = kept * noise[step - 1] + (1 - kept**2) ** 0.5 * noise[step]
    shift = np.zeros(steps)
    shift[strikes] = size
    periodic = len(set(np.diff(strikes).tolist())) == 1 and strikes[1] - strikes[0] > 1
    return powers([Figure(shift, noise, 0, np.arange(steps))], int(strikes[0]), periodic, SOON)


@pytest.mark.parametrize("size", [0.5, 0.7, 0.9])
def test_the_oracle_is_as_powerful_as_a_test_of_the_mean(size: float) -> None:
    strikes = np.arange(140, 200)
    expected = NORMAL.cdf(size * len(strikes) ** 0.5 + NORMAL.inv_cdf(FALSE_ALARMS))

    assert asked(size, strikes).knowing == pytest.approx(expected, abs=0.07)


def test_of_lasting_noise_only_what_is_new_counts() -> None:
    strikes, kept = np.arange(140, 200), 0.6
    new = 1.3 / (1 - kept**2) ** 0.5 * np.array([1.0] + [1 - kept] * (len(strikes) - 1))
    expected = NORMAL.cdf(float((new**2).sum() ** 0.5) + NORMAL.inv_cdf(FALSE_ALARMS))

    assert asked(1.3, strikes, kept=kept).knowing == pytest.approx(expected, abs=0.07)


@pytest.mark.parametrize(
    "strikes",
    [
        pytest.param(np.arange(150, 200), id="constant"),
        pytest.param(np.arange(40, 200, 4), id="periodic"),
        pytest.param(np.random.default_rng(2).choice(np.arange(40, 200), 40, replace=False), id="random"),
    ],
)
def test_to_search_costs_power(strikes: npt.NDArray[np.int64]) -> None:
    found = asked(0.85, np.sort(strikes))

    assert found.searching < found.knowing - 0.05
    assert found.knowing_soon < found.knowing


def test_a_fault_at_random_hides_best() -> None:
    """Its steps are as many as those of a constant one, but they look like steps without it."""
    strikes = np.sort(np.random.default_rng(2).choice(np.arange(40, 200), 40, replace=False))

    assert asked(1.2, strikes).searching < 0.5 < 0.9 < asked(1.2, np.arange(160, 200)).searching


def test_what_dwarfs_all_noise_is_found() -> None:
    for strikes in (np.arange(190, 200), np.arange(100, 200, 9), np.array([20, 25, 31, 60, 61, 90, 120, 150])):
        assert min(asked(20.0, strikes)) > 0.99


def test_nothing_is_found_where_nothing_is() -> None:
    assert powers([Figure(np.zeros(9), np.zeros((9, 2)), 0, np.arange(9))], 0, False, SOON) == Powers(0, 0, 0, 0)
