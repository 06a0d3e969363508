"""Offset and drift of made-up clocks: the truth is inside the stated interval, whatever the clocks do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.analysis.clock_offset import MAX_DRIFT_PPM, WINDOW_NS, Bound, ClockOffset, at_least, at_most

US, MS, S = 1_000, 1_000_000, 1_000_000_000
BASE = -3 * 10**16  # a year between two boots

Truth = Callable[[int], float]  # the offset (ns) at a time of this clock (ns)


def drifting(ppm: float) -> Truth:
    return lambda at: BASE + at * ppm * 1e-6


def wandering(at: int) -> float:
    """20 ppm, and up to half a ppm more or less: a wave of ten minutes."""
    wave = 600 * S / (2 * math.pi)
    return BASE + at * 20e-6 + 0.5e-6 * wave * (1 - math.cos(at / wave))


def hold(offset: ClockOffset, truth: Truth, start: int, end: int) -> bool:
    low, high = offset.between(start, end)
    return all(low <= truth(at) <= high for at in (start, (start + end) // 2, end))


def feed(offset: ClockOffset, truth: Truth, at: int, below: int, above: int) -> None:
    """A bound from each side, with what it is away from the truth."""
    done = at + 3 * MS
    offset.add_bounds(at_least(done, math.floor(truth(done)) - below), at_most(at, math.ceil(truth(at)) + above))


slack = st.integers(0, 20 * MS)


@given(
    st.floats(-MAX_DRIFT_PPM, MAX_DRIFT_PPM),
    st.lists(st.tuples(st.integers(1, 40_000), slack, slack), min_size=1, max_size=30),
)
@settings(max_examples=50)
def test_the_truth_is_inside_after_every_sample(ppm: float, samples: list[tuple[int, int, int]]) -> None:
    """Between samples a millisecond or 40 s pass; the interval also holds for what comes after them."""
    offset, truth, at = ClockOffset(), drifting(ppm), 0
    for pause_ms, below, above in samples:
        at += pause_ms * MS
        feed(offset, truth, at, below, above)
        assert hold(offset, truth, at, at + 100 * MS)
        assert hold(offset, truth, at, at + 60 * S)
        low, high = offset.drift_ppm
        assert low <= ppm <= high
    assert offset.epoch == 0


@pytest.mark.parametrize("ppm", [-50.0, 50.0])
def test_an_hour(ppm: float) -> None:
    """Transfers take 40 µs and, mostly, much longer."""
    offset, truth, dice = ClockOffset(), drifting(ppm), random.Random(5)
    for at in range(0, 3600 * S, 2 * S):
        feed(offset, truth, at, 40 * US + int(dice.expovariate(1 / MS)), 40 * US + int(dice.expovariate(1 / MS)))
        assert hold(offset, truth, at, at + 200 * MS)
    low, high = offset.drift_ppm
    assert high - low < 15
    assert offset.epoch == 0


def test_a_drift_that_changes_slowly() -> None:
    offset, dice = ClockOffset(), random.Random(3)
    for at in range(0, 1800 * S, S // 2):
        feed(offset, wandering, at, 30 * US + dice.randrange(MS), 30 * US + dice.randrange(MS))
        assert hold(offset, wandering, at, at + 200 * MS)
    assert offset.epoch == 0


def test_a_drift_that_changes_at_once() -> None:
    """By as much as it may within the window."""

    def truth(at: int) -> float:
        return BASE + at * 20e-6 + max(0, at - 40 * S) * 1e-6

    offset = ClockOffset()
    for at in range(0, 200 * S, S):
        feed(offset, truth, at, 0, 0)
        assert hold(offset, truth, at, at + 10 * S)
    assert offset.epoch == 0


def test_what_was_known_20_s_ago_is_known_to_60_us() -> None:
    """The drift may have strayed by half a ppm: 10 µs for each side, and as much for what is known of the drift."""
    offset, truth = ClockOffset(), drifting(20)
    for at in range(0, 80 * S, S):
        transfer = 0 if at < 60 * S else MS
        feed(offset, truth, at, transfer, transfer)
    low, high = offset.between(80 * S, 80 * S)
    assert high - low < 60 * US


def test_the_interval_is_no_wider_than_the_shortest_transfers() -> None:
    """Ten seconds with long transfers only hardly matter: by then the drift is known."""
    offset, dice, truth = ClockOffset(), random.Random(1), drifting(30)
    for at in range(0, 60 * S, S // 5):
        longer = dice.randrange(20 * MS) if at % S or at > 50 * S else 0
        feed(offset, truth, at, 80 * US + longer, 80 * US + longer)
        if at == 50 * S:
            low, high = offset.between(at, at)
            assert high - low <= 160 * US + 10 * US
    low, high = offset.between(60 * S, 60 * S)
    assert high - low <= 2 * 160 * US


@given(st.floats(-100, 100), st.integers(60 * MS, 10**15), st.booleans(), st.integers(1, 400))
@settings(max_examples=30)
def test_a_jump_starts_an_epoch(ppm: float, size: int, back: bool, before: int) -> None:
    """The first sample after it shows the jump, as it is longer than any transfer; then the truth is inside again."""
    steady = drifting(ppm)
    jump = before * S

    def truth(at: int) -> float:
        return steady(at) + (0 if at < jump else -size if back else size)

    offset = ClockOffset()
    for at in range(max(0, jump - 60 * S), jump + 60 * S, S):
        feed(offset, truth, at, 5 * MS, 5 * MS)
        assert hold(offset, truth, at, at + 100 * MS)
    assert offset.epoch == 1


def test_one_side_bounds_nothing() -> None:
    offset = ClockOffset()
    for at in range(0, 10 * S, S):
        offset.add_bounds(at_least(at, BASE))
        assert not offset.bounded
    offset.add_bounds(at_most(10 * S, BASE + MS))
    assert offset.bounded
    low, high = offset.between(10 * S, 10 * S)
    assert low - 2 <= BASE <= BASE + MS <= high + 2


def test_what_is_older_than_the_window_is_dropped() -> None:
    offset = ClockOffset()
    offset.add_bounds(at_least(0, -US), at_most(0, US))
    for at in range(10 * S, WINDOW_NS + 30 * S, 10 * S):
        offset.add_bounds(at_least(at, -MS))
    assert not offset.bounded


def test_bounds_come_in_any_order() -> None:
    """As of ping exchanges, which may be reported late."""
    forth, back = ClockOffset(), ClockOffset()
    times = list(range(0, 4 * S, S // 8))
    for at in times:
        forth.add_bounds(at_least(at, BASE - at % 7 * US), at_most(at, BASE + 9 * US))
    for at in reversed(times):
        back.add_bounds(at_least(at, BASE - at % 7 * US), at_most(at, BASE + 9 * US))
    for offset in (forth, back):
        low, high = offset.between(4 * S, 4 * S)
        assert low <= BASE <= high < low + 40 * US


wild = st.builds(Bound, st.integers(-(1 << 62), 1 << 62), st.integers(-(1 << 63), 1 << 63), st.sampled_from([1, -1]))


@given(st.lists(st.lists(wild, max_size=3), max_size=8))
@settings(max_examples=50)
def test_no_bound_is_an_error(found: list[list[Bound]]) -> None:
    offset = ClockOffset()
    for bounds in found:
        offset.add_bounds(*bounds)
        if offset.bounded and bounds:
            low, high = offset.between(bounds[0].at_ns, bounds[0].at_ns + S)
            assert low <= high


def test_memory_is_bounded() -> None:
    offset, dice, truth = ClockOffset(), random.Random(2), drifting(10)
    for at in range(0, 400 * S, S // 20):
        feed(offset, truth, at, dice.randrange(MS), dice.randrange(MS))
    kept = sum(map(len, offset._chunks))
    assert kept < 700  # of 4,800 in the window
    assert len(offset._polygon) < 20
