"""The wire, played from event to event, against time cut into small slices; and by hand."""

from __future__ import annotations

import random

import pytest

from ddpwatch.whatif.model import Busy
from ddpwatch.whatif.schedule import Speeds, play

SLICE = 0.01


def sliced(ready: list[float], works: list[float], computed: float, speeds: Speeds) -> tuple[list[float], float]:
    """When each bucket is done, and when compute is; one slice of time after the other."""
    left, dones, now, worked, finished = list(works), [0.0] * len(works), 0.0, 0.0, 0.0
    moving: list[int] = []
    following = 0
    while following < len(works) or moving or worked < computed:
        while following < len(works) and len(moving) < speeds.workers and ready[following] <= worked:
            moving.append(following)
            following += 1
        computing = worked < computed
        pace = 1 / (1 + speeds.compute_slowdown) if moving and computing else 1.0
        speed = (1.0 if len(moving) < 2 else speeds.sharing) / (1 + speeds.comm_slowdown * computing)
        now += SLICE
        worked += SLICE * pace
        finished = now if computing else finished
        for i in moving:
            left[i] -= SLICE * speed
            dones[i] = now
        moving = [i for i in moving if left[i] > 0]
    return dones, finished


@pytest.mark.parametrize("seed", range(40))
def test_events_are_where_small_slices_of_time_put_them(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.randint(1, 6)
    ready = sorted(dice.uniform(0, 60) for _ in range(count))
    works = [dice.uniform(3, 30) for _ in range(count)]
    computed = ready[-1] + dice.uniform(0, 20)
    workers = dice.choice((1, 2))
    sharing = 1.0 if workers == 1 else dice.uniform(0.5, 1)
    speeds = Speeds(workers, sharing, dice.choice((0.0, 0.4)), dice.choice((0.0, 0.3)))
    scale = 1e4  # the events' tolerance is half a ns
    played = play([scale * at for at in ready], [scale * work for work in works], scale * computed, speeds)
    dones, finished = sliced(ready, works, computed, speeds)
    assert [done / scale for done in played.dones] == pytest.approx(dones, abs=40 * SLICE)
    assert played.wall(scale * computed) / scale == pytest.approx(finished, abs=40 * SLICE)


def test_one_after_the_other() -> None:
    assert play([10, 20, 90], [30, 30, 5], 95, Speeds(1, 1.0, 0.0, 0.0)).dones == [40, 70, 95]


def test_two_in_flight_share_the_wire() -> None:
    """The second starts at 10 ms; from then on both have half of it: 20 of the first's 30 are left for 40 ms."""
    dones = play([0.0, 10e6], [30e6, 30e6], 20e6, Speeds(2, 0.5, 0.0, 0.0)).dones
    assert dones == pytest.approx([50e6, 60e6])


def test_compute_waits_for_nothing_but_goes_slower() -> None:
    """A collective of 30 ms beside 40 ms of compute, which it slows to half: 15 of 40 are done when it is."""
    played = play([0.0], [30e6], 40e6, Speeds(1, 1.0, 1.0, 0.0))
    assert played.dones == pytest.approx([30e6])
    assert played.wall(40e6) == pytest.approx(55e6)
    assert played.wall(7.5e6) == pytest.approx(15e6)


def test_work_done_in_a_slowed_backward() -> None:
    busy = Busy([(10.0, 20.0), (30.0, 40.0)], 0.5)
    assert busy.worked([5, 10, 16, 20, 25, 34, 50]) == [5, 10, 13, 15, 20, 27, 40]
    assert Busy([(10.0, 20.0)], 0.0).worked([15]) == [15]
