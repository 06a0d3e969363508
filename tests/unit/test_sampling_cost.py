"""The measured cost is the cost that was put in."""

from __future__ import annotations

import random
from functools import cache

import pytest

from ddpwatch.sampling.cost import ENOUGH_PAIRS, SHARE_STEPS, Cost, CostMeter
from ddpwatch.sampling.schedule import BARE_PERIOD, COST_PER_OWN, SamplingSchedule
from ddpwatch.wire.messages import Status, Step

pytestmark = pytest.mark.same_everywhere

MS = 1_000_000
STEP_MS = 100


LIGHT_MS = 0.5  # extra cost of a light step over a bare one
OWN_MS = 0.05  # what hooks measure of themselves
BARE_MS = COST_PER_OWN * OWN_MS  # what a bare step costs
SENDER_MS = 0.4
SENDER_STEPS = 5  # whose frames the sender thread sends when it wakes; its time belongs to the first


def measured(
    extra_ms: float,
    steps: int = 2000,
    period: int = 8,
    seed: int = 0,
    noise_ms: float = 4,
    ranks: int = 2,
    watched: int = 1,
) -> tuple[Cost | None, float]:
    """The measured and the true cost, in drifting noise; ``extra_ms``: of full steps over light steps."""
    meter, noise = CostMeter(), random.Random(seed)
    extra = {"unwatched": 0.0, "shadow": LIGHT_MS, "ok": LIGHT_MS + extra_ms}
    drift = put_in = 0.0
    for number, (kind, known) in enumerate(scheduled(steps, period, watched)):
        drift = 0.9 * drift + noise.gauss(0, noise_ms)
        put_in += extra[kind]
        cpu = 80 + drift + noise.gauss(0, noise_ms) + extra[kind]
        for rank in range(ranks):
            meter.add_step(step(number, rank, kind, int(cpu * MS) if known else None))
    return meter.cost(), (put_in / steps + BARE_MS + SENDER_MS / SENDER_STEPS) / STEP_MS


@cache
def scheduled(steps: int, period: int, watched: int) -> list[tuple[str, bool]]:
    """The kind of each step, and whether its CPU time is known."""
    schedule, found = SamplingSchedule(), []
    schedule.full.value, schedule.watched.value = period, watched
    for number in range(steps):
        kind = "unwatched" if schedule.is_bare(number) else "shadow" if schedule.is_light(number) else "ok"
        found.append((kind, schedule.needs_cpu_time(number) and schedule.needs_cpu_time(number + 1)))
    return found


def step(number: int, rank: int, kind: str, cpu_ns: int | None) -> Step:
    return Step(
        rank=rank,
        step=number,
        status=kind,  # type: ignore[arg-type]
        start_ns=number * STEP_MS * MS,
        duration_ns=STEP_MS * MS,
        own_ns=int(OWN_MS * MS),
        sender_ns=0 if number % SENDER_STEPS else int(SENDER_MS * MS),
        cpu_ns=cpu_ns,
    )


@pytest.mark.parametrize(("period", "watched"), [(1, 1), (8, 1), (32, 1), (16, 2), (64, 2), (32, 4), (32, 8)])
@pytest.mark.parametrize("extra_ms", [0, 3, 10])
def test_the_cost_lies_in_its_interval(extra_ms: float, period: int, watched: int) -> None:
    cost, truth = measured(extra_ms, period=period, watched=watched)
    assert cost is not None
    assert cost.low <= truth <= cost.high
    assert cost.low < cost.ratio < cost.high
    assert cost.full_share == pytest.approx(0.97 if period == 1 else 1 / period, abs=0.03)


@pytest.mark.parametrize(("period", "watched"), [(64, 16), (256, 32), (512, 64)])
@pytest.mark.parametrize("extra_ms", [0, 3, 10])
def test_it_does_so_where_few_steps_are_watched(extra_ms: float, period: int, watched: int) -> None:
    """And most have no CPU time. The shares are those of the newest steps, in which a rare level is one or two."""
    cost, truth = measured(extra_ms, steps=64 * period, period=period, watched=watched)
    assert cost is not None
    off = extra_ms / SHARE_STEPS / STEP_MS
    assert cost.low - off <= truth <= cost.high + off
    assert 0 < cost.full_share <= 2 / period
    assert 0.75 <= cost.pairs / (64 * period * (1 / watched - 1 / period)) <= 1


def test_it_stays_known_while_a_viewer_comes_and_goes() -> None:
    """Most steps change their level then, and at first only the comparisons from before are enough."""
    meter, schedule = CostMeter(), SamplingSchedule()
    extra = {"unwatched": 0.0, "shadow": LIGHT_MS, "ok": LIGHT_MS + 3}
    for number in range(6000):
        attached = 2000 <= number < 4000
        schedule.full.value, schedule.watched.value = (1, 1) if attached else (64, 2)
        kind = "unwatched" if schedule.is_bare(number) else "shadow" if schedule.is_light(number) else "ok"
        meter.add_step(step(number, 0, kind, int((80 + extra[kind]) * MS)))
        if number < 1000 or number % 10:
            continue
        cost, counted = meter.cost(), meter._levels
        truth = (sum(extra[level] for level in counted) / len(counted) + BARE_MS + SENDER_MS / SENDER_STEPS) / STEP_MS
        assert cost is not None, number
        assert cost.ratio == pytest.approx(truth, rel=0.05), number


def test_the_start_of_the_sender_thread_is_no_cost_of_a_step() -> None:
    """The first step has the CPU time of that: imports, sockets, the way to the collector."""
    meter, schedule = CostMeter(), SamplingSchedule()
    schedule.full.value, schedule.watched.value = 8, 1
    for number in range(SHARE_STEPS):
        kind = "unwatched" if schedule.is_bare(number) else "shadow" if schedule.is_light(number) else "ok"
        first = step(number, 0, kind, 80 * MS)
        first.sender_ns = 0 if number else 200 * MS
        meter.add_step(first)
    cost = meter.cost()
    assert cost is not None
    assert cost.ratio == pytest.approx(BARE_MS / STEP_MS)


def test_the_collector_counts_as_its_node_s_ranks_time() -> None:
    """It takes 1.2 % of a core, then another one that takes 0.8 %; of two ranks, one leaves at the end."""
    meter = CostMeter()
    for number, (kind, _) in enumerate(scheduled(SHARE_STEPS, 8, 1)):
        meter.add_step(step(number, 0, kind, 80 * MS))
    without = meter.cost()
    assert without is not None
    assert without.collector is None, "it did not say"
    for collector, share in ((0, 0.012), (1, 0.008)):
        for number in range(20):
            at_ns, here = 500 * MS * (20 * collector + number), 1 if number == 19 else 2
            status = Status(at_ns=at_ns, frames=1, bytes=1, cpu_ns=int((0.1 + share * number / 2) * 1e9), here=here)
            meter.add_status(status)
        cost = meter.cost()
        assert cost is not None
        assert cost.collector == pytest.approx(share / 2)
        assert cost.ratio == pytest.approx(without.ratio + share / 2)
        assert cost.high - cost.low == pytest.approx(without.high - without.low)


def test_without_noise_it_is_exact() -> None:
    cost, truth = measured(3, noise_ms=0)
    assert cost is not None
    assert cost.ratio == pytest.approx(truth, rel=0.05)  # shares are those of the newest steps


@pytest.mark.parametrize(("period", "watched"), [(8, 1), (8, 4), (64, 2)])
def test_the_interval_is_a_95_percent_one(period: int, watched: int) -> None:
    """Of 200 jobs, about ten may miss."""
    missed = 0
    for seed in range(200):
        cost, truth = measured(3, 600, period, seed, ranks=1, watched=watched)  # it reads one rank's steps
        missed += cost is None or not cost.low <= truth <= cost.high
    assert missed <= 18  # of 200; more happens once in a hundred times


def test_more_steps_narrow_the_interval() -> None:
    (few, _), (many, _) = measured(3, steps=600), measured(3, steps=9600)
    assert few is not None
    assert many is not None
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_too_few_pairs_give_no_cost() -> None:
    assert measured(3, steps=BARE_PERIOD * ENOUGH_PAIRS)[0] is None


def test_without_bare_steps_it_is_not_known() -> None:
    meter = CostMeter()
    for number in range(400):
        meter.add_step(step(number, 0, "shadow" if number % 2 else "ok", 80 * MS))
    assert meter.cost() is None


def test_only_neighbours_are_compared() -> None:
    """Not across a gap, a step without a figure, or one that was aborted."""
    meter = CostMeter()
    for number in range(0, 400, 6):
        meter.add_step(step(number, 0, "ok", 90 * MS))
        meter.add_step(step(number + 1, 0, "shadow", None))
        meter.add_step(step(number + 2, 0, "ok", 90 * MS))
        meter.add_step(step(number + 3, 0, "aborted", 80 * MS))
        meter.add_step(step(number + 4, 0, "unwatched", 80 * MS))
    assert not meter.differences


def test_a_rank_that_waits_for_a_core_in_our_hooks_does_not_make_them_costly() -> None:
    """A foreign process on the core of the first rank made 0.6 % of overhead 8.9 %."""
    meters = {starved: CostMeter() for starved in (False, True)}
    for starved, meter in meters.items():
        for number in range(256):
            kind = "shadow" if number % 16 == 10 else "unwatched"
            for rank in (0, 1):
                one = step(number, rank, kind, 80 * MS)
                one.own_ns *= 60 if starved and rank == 0 else 1
                meter.add_step(one)
    assert meters[True].cost() == meters[False].cost()


def test_hooks_that_are_costly_on_all_ranks_raise_the_cost() -> None:
    ratios = []
    for own_ns in (1000, 10_000):
        meter = CostMeter()
        for number in range(256):
            for rank in (0, 1):
                one = step(number, rank, "shadow" if number % 16 == 10 else "unwatched", 80 * MS)
                one.own_ns = own_ns
                meter.add_step(one)
        cost = meter.cost()
        assert cost is not None
        ratios.append(cost.ratio)
    assert ratios[1] - ratios[0] == pytest.approx(COST_PER_OWN * 9000 / (STEP_MS * MS))


def test_a_rank_with_few_bare_steps_decides_nothing() -> None:
    meter, plain = CostMeter(), CostMeter()
    other = step(0, 1, "unwatched", 80 * MS)
    other.own_ns = 0
    for number in range(256):
        one = step(number, 0, "shadow" if number % 16 == 10 else "unwatched", 80 * MS)
        meter.add_step(one)
        plain.add_step(one)
        if number == 0:
            meter.add_step(other)
    found, expected = meter.cost(), plain.cost()
    assert found is not None
    assert found == expected


def test_what_bare_steps_cost_is_that_of_all_of_them() -> None:
    """Those beside a watched step cost more than the others, as their CPU time is read."""
    meter = CostMeter()
    for number in range(512):
        near = number % 32 in (9, 11)
        one = step(
            number, 0, "shadow" if number % 32 == 10 else "unwatched", 80 * MS if near or number % 32 == 10 else None
        )
        one.own_ns, one.sender_ns = 64_000 if near else 2000, 0
        meter.add_step(one)
    cost = meter.cost()
    assert cost is not None
    assert cost.ratio == pytest.approx(COST_PER_OWN * (2 * 64_000 + 29 * 2000) / 31 / (STEP_MS * MS))
