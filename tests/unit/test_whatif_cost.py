"""What collectives cost: fitted, shared, read from a sweep."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from ddpwatch.errors import UsageError
from ddpwatch.whatif.cost import (
    Curve,
    Guess,
    WorkSample,
    calibrated,
    curve_of,
    evened,
    in_service,
    link_of,
    ring_bytes,
    shares_of,
    slowdown_of,
    workers_of,
)
from ddpwatch.whatif.model import Wired, comm_slowdown, link_of_sweep, link_share
from ddpwatch.whatif.wire import Wire, WireSize, parse_wire, write_wire

MIB = 1 << 20


def straight(latency: float, per_mib: float, *sizes_mib: float) -> Curve:
    return curve_of([WorkSample(size * MIB, latency + per_mib * size) for size in sizes_mib for _ in range(3)])


def test_a_line_is_found_and_goes_on_beyond_both_ends() -> None:
    curve = straight(500.0, 200.0, 1, 5, 25)
    assert curve.latency == pytest.approx(500)
    for size in (0.25, 1, 3, 12, 25, 60):
        assert curve.work(size * MIB) == pytest.approx(500 + 200 * size)
    assert curve.work(0) == 0


def test_the_rate_may_grow_with_the_size() -> None:
    """From 1 to 4 MiB another MiB costs 100, from 4 to 16 only 50; beyond, it goes on like that."""
    curve = curve_of(
        [WorkSample(n * MIB, work) for n, work in ((1, 200.0), (4, 500.0), (16, 1100.0)) for _ in range(3)]
    )
    assert curve.work(10 * MIB) == pytest.approx(800)
    assert curve.work(20 * MIB) == pytest.approx(1300)


def test_sizes_that_are_close_say_little_about_the_slope() -> None:
    """The larger one came first in each step, and was a little faster."""
    curve = curve_of([WorkSample(n * MIB, 1e6 * ms) for n, ms in ((0.4, 40), (2.0, 200), (2.6, 220)) for _ in range(9)])
    assert curve.work(60 * MIB) == pytest.approx(6000e6, rel=0.25)
    assert Curve(curve.knots, lean=1.0).work(60 * MIB) > 1.03 * curve.work(60 * MIB)
    assert curve.latency < 5e6


def test_doubt_grows_with_the_distance_to_what_was_seen() -> None:
    curve = straight(500.0, 200.0, 1, 5, 25)
    spreads = [Curve(curve.knots, lean=1.0).work(size * MIB) / curve.work(size * MIB) for size in (25, 30, 60, 100)]
    assert spreads == sorted(spreads)
    assert spreads[0] == pytest.approx(1)


def test_sizes_that_hardly_differ_are_one() -> None:
    curve = straight(500.0, 200.0, 5, 5.1, 5.2)
    assert len(curve.knots) == 1
    assert not curve.bends


def test_noise_does_not_make_larger_collectives_cheaper() -> None:
    curve = curve_of([WorkSample(1 * MIB, 300.0), WorkSample(2 * MIB, 280.0), WorkSample(8 * MIB, 900.0)])
    works = [curve.work(size * MIB) for size in (0.5, 1, 2, 4, 8, 16)]
    assert works == sorted(works)
    assert curve_of([WorkSample(size * MIB, 10.0 - size) for size in (1, 2, 4, 8)]).bends  # sizes differ all the same


def test_a_worker_takes_collectives_in_order() -> None:
    assert in_service([0, 1, 2], [10, 15, 21], workers=1) == [0, 10, 15]
    assert in_service([0, 1, 2], [10, 15, 21], workers=2) == [0, 1, 10]
    assert (workers_of("gloo"), workers_of("nccl")) == (2, 1)


def test_the_work_of_collectives_that_shared_the_wire() -> None:
    """Both move from 10 to 30, at half speed each: the first has done 10 + 10, the second 10 + 5."""
    assert shares_of([0, 10], [30, 35], 0.5) == ([20, 15], [(0, 1, 10)])
    assert shares_of([0, 10], [30, 35], 1.0) == ([30, 25], [])
    assert evened([20, 15], [], [9, 3]) == [(20, 0), (15, 0)]


def test_a_small_collective_has_waited_for_a_large_one_in_the_same_queue() -> None:
    """The large one moves alone for 60 ms, and then the small one waits until it is done, for another 40 ms."""
    works, overlaps = shares_of([0, 60e6], [100e6, 101e6], 0.5)
    assert works == [80e6, 21e6]
    (large, doubt), (small, same) = evened(works, overlaps, [10 * MIB, 0.1 * MIB])
    assert large + small == pytest.approx(101e6)
    assert small == pytest.approx(1e6, abs=2 * doubt)
    assert 0.5e6 < doubt == same < 4e6
    assert small > 0


def test_what_collectives_take_together_stays() -> None:
    dice = random.Random(2)
    for _ in range(50):
        launches, dones, sizes, now = [], [], [], 0.0
        for _ in range(9):
            now += dice.uniform(0, 4e7)
            launches.append(now)
            dones.append(max([now, *dones[-1:]]) + dice.uniform(1e6, 9e7))
            sizes.append(dice.choice([0.1, 1, 4]) * MIB)
        works, overlaps = shares_of(in_service(launches, dones, 2), dones, 0.5)
        settled = [work for work, _ in evened(works, overlaps, sizes)]
        assert sum(settled) == pytest.approx(sum(works))
        for i, (work, before) in enumerate(zip(settled, works, strict=True)):
            assert abs(work - before) <= sum(lost for *pair, lost in overlaps if i in pair) + 1


def test_a_slowdown_is_found_between_slow_rows_and_slow_columns() -> None:
    """Columns differ, rows are slow or fast throughout, and what x covers takes 30 % longer."""
    dice = random.Random(4)
    panel = []
    for _ in range(60):
        pace, row = 1 + dice.gauss(0, 0.05), []
        for work in (10.0, 40.0, 20.0, 80.0):
            x = dice.random()
            row.append((x, work * pace * (1 + dice.gauss(0, 0.01)) / (1 - x * 0.3 / 1.3)))
        panel.append(row)
    found = slowdown_of([panel])
    assert found is not None
    assert found[0] == pytest.approx(0.3, abs=4 * found[1])
    assert found[1] < 0.02
    assert slowdown_of([[[(1.0, y) for _, y in row] for row in panel]]) is None


def wire(**changes: object) -> Wire:
    sizes = [
        WireSize(
            nbytes=mib * MIB, alone_ms=0.5 + mib, low_ms=0.4 + mib, high_ms=0.6 + mib, beside_ms=1.2 * (0.5 + mib),
            pair_ms=1.8 * (0.5 + mib),
        )
        for mib in (1, 4, 16, 64)
    ]  # fmt: skip
    return Wire(**{"backend": "gloo", "world_size": 2, "sizes": sizes, "compute_beside": 1.3, **changes})  # type: ignore[arg-type]


def test_a_sweep_survives_its_file() -> None:
    assert parse_wire(write_wire(wire())) == wire()
    assert wire().slowdown == pytest.approx(0.2)
    assert wire().sharing == pytest.approx(1 / 1.8)


def test_a_sweep_gives_the_shape_and_the_job_the_level() -> None:
    seen = straight(0.75e6, 1.5e6, 4)
    curve = calibrated(wire(), seen, ranks=2)
    assert curve.work(4 * MIB) == pytest.approx(seen.work(4 * MIB))
    assert curve.work(16 * MIB) / curve.work(4 * MIB) == pytest.approx(16.5 / 4.5)


def test_among_more_ranks_latency_grows_with_the_hops() -> None:
    """Among four ranks on a ring, there are three times as many, and bytes cross 1.5 times as often."""
    curve = calibrated(wire(), straight(1.5e6, 1.5e6, 4), ranks=4)
    assert curve.work(64 * MIB) / curve.work(4 * MIB) == pytest.approx((1.5 + 96) / (1.5 + 6), rel=0.05)


def test_between_the_jobs_own_sizes_a_sweep_says_nothing() -> None:
    """The job's latency is four times as high: a small collective takes twice as long as a sweep's shape says."""
    seen = straight(2e6, 1e6, 1, 16)
    curve = calibrated(wire(), seen, ranks=2)
    assert [curve.work(n * MIB) for n in (1, 4, 16)] == pytest.approx([seen.work(n * MIB) for n in (1, 4, 16)])
    assert curve.work(64 * MIB) / curve.work(16 * MIB) == pytest.approx(64.5 / 16.5, rel=0.01)


def steps_of(*ns_per_byte: float) -> list[WorkSample]:
    """Two collectives in each step."""
    return [WorkSample(n * MIB, 1e5 + rate * n * MIB) for rate in ns_per_byte for n in (1, 4)]


def test_a_link_that_is_the_limit_moves_all_steps_alike() -> None:
    """Otherwise its share is between that of the fastest step, here two thirds and 3 %, and all."""
    assert link_share(steps_of(10.0, 10.1, 10.2), 1e5, 2) == (1.0, 0.0)
    share, error = link_share(steps_of(2.0, 3.0, 4.0), 1e5, 2)
    assert share == pytest.approx((2 / 3 * 1.03 + 1) / 2)
    assert error == pytest.approx(0.6 * (1 - 2 / 3 * 1.03))


@pytest.mark.parametrize(("rate", "share"), [(3.0, 0.5), (1.2, 1.25), (0.1, 2 / 1.03)])
def test_a_sweep_shows_what_the_link_takes_alone(rate: float, share: float) -> None:
    """More than all, where the job seems to be faster than its link, but no more than twice that."""
    assert link_of(wire(), ranks=2) == pytest.approx(1e6 / MIB, rel=0.2)
    assert link_of(wire(), ranks=4) == pytest.approx(1.5 * link_of(wire(), ranks=2))
    slower = [replace(size, alone_ms=1.2 * size.alone_ms) for size in wire().sizes]
    assert link_of(wire(sizes=slower), ranks=2) == link_of(wire(), ranks=2)  # that is the hosts' doing
    curve = curve_of(steps_of(rate, rate))
    found, error = link_of_sweep(1.5, curve, [MIB, 4 * MIB])
    assert found == pytest.approx(1.03 * share, rel=0.05)
    assert error < 0.05


def test_a_ring_moves_each_byte_nearly_twice() -> None:
    assert [ring_bytes(ranks) for ranks in (2, 4, 8)] == [1.0, 1.5, 1.75]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a wire.json"),
        (b"[1]", "not a wire.json"),
        (b'{"backend": "gloo", "world_size": 2, "sizes": []}', "not a wire.json"),
        (write_wire(wire(version=2)), "has version 2"),
        (write_wire(wire(sizes=wire().sizes[:1] * 2)), "twice"),
    ],
)
def test_what_is_no_sweep(content: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_wire(content)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("drag", [0.0, 0.2, 0.4])
def test_a_bucket_that_takes_longer_by_chance_hides_no_slowdown(drag: float, seed: int) -> None:
    """It is beside compute in a smaller share of its time, so that compute seemed to make it faster."""
    dice, seen = random.Random(seed), []
    for _ in range(40):
        computed, at, starts, dones = dice.uniform(30e6, 70e6), 0.0, [], []
        for _ in range(8):
            work = 10e6 * max(0.2, 1 + dice.gauss(0, 0.3))
            beside = min(work * (1 + drag), max(0.0, computed - at))
            starts.append(at)
            at += work + beside * drag / (1 + drag)
            dones.append(at)
        seen.append(Wired(starts, dones, computed))
    assert comm_slowdown([MIB] * 8, seen, 1.0, Guess(0.0, 0.0)).value == pytest.approx(drag, abs=0.11)
