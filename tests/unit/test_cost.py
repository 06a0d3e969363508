"""The cost that is told is the one that was put in."""

from __future__ import annotations

import random

import pytest

from ddpwatch.analysis.cost import ENOUGH_PAIRS, Cost, CostMeter
from ddpwatch.messages import Step
from ddpwatch.probe.pace import chosen

MS = 1_000_000
STEP_MS = 100


def measured(extra_ms: float, steps: int = 800, period: int = 8, seed: int = 0, noise_ms: float = 4) -> Cost | None:
    """64 ranks in one noise that drifts; full steps take ``extra_ms`` more CPU time than shadows."""
    meter, noise = CostMeter(), random.Random(seed)
    drift = 0.0
    for number in range(steps):
        drift = 0.9 * drift + noise.gauss(0, noise_ms)
        full = chosen(number, period)
        cpu = 80 + drift + noise.gauss(0, noise_ms) + extra_ms * full
        for rank in range(64):
            meter.add(step(number, rank, full, int(cpu * MS)))
    return meter.cost()


def step(number: int, rank: int, full: bool, cpu_ns: int | None, status: str | None = None) -> Step:
    kind = status or ("ok" if full else "shadow")
    return Step(
        rank=rank,
        step=number,
        status=kind,  # type: ignore[arg-type]
        start_ns=number * STEP_MS * MS,
        duration_ns=STEP_MS * MS,
        own_ns=MS // 20,
        cpu_ns=cpu_ns,
    )


@pytest.mark.parametrize("extra_ms", [0, 3, 10])
def test_the_cost_lies_in_its_interval(extra_ms: float) -> None:
    cost = measured(extra_ms)
    assert cost is not None
    truth = (extra_ms / 8 + 0.05) / STEP_MS
    assert cost.low <= truth <= cost.high
    assert cost.low < cost.ratio < cost.high
    assert cost.full_share == pytest.approx(1 / 8, abs=0.05)


def test_the_interval_is_a_95_percent_one() -> None:
    """Of 200 jobs, about ten may miss."""
    truth = (3 / 8 + 0.05) / STEP_MS
    costs = [measured(3, steps=320, seed=seed) for seed in range(200)]
    missed = sum(cost is None or not cost.low <= truth <= cost.high for cost in costs)
    assert missed <= 18  # of 200; more happens once in a hundred times


def test_more_steps_tell_it_more_closely() -> None:
    few, many = measured(3, steps=300), measured(3, steps=4800)
    assert few is not None
    assert many is not None
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_too_few_pairs_tell_nothing() -> None:
    meter = CostMeter()
    for number in range(3 * ENOUGH_PAIRS - 1):
        meter.add(step(number, 0, number % 2 == 0, 80 * MS))
    assert meter.cost() is None


def test_only_neighbours_are_compared() -> None:
    """Not across a gap, a step without a figure, or one that was aborted."""
    meter = CostMeter()
    for number in range(0, 400, 4):
        meter.add(step(number, 0, True, 90 * MS))
        meter.add(step(number + 1, 0, False, None))
        meter.add(step(number + 2, 0, False, 80 * MS, status="aborted"))
    assert meter.cost() is None
