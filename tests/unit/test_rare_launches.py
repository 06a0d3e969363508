"""Lateness where most steps do not show it: at long sampling periods, in a run whose light steps carry no launches.

Only steps that have lateness are judged: the others neither clear a rank nor blame it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from msgspec.structs import replace

from ddpwatch.sampling.levels import FULL, LIGHT
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Step
from tests.support.fleet import Disturbance, Fleet, Shape, zeros
from tests.support.fleet_noise import Noise
from tests.support.frames import MS, hello, state_of

pytestmark = pytest.mark.same_everywhere

WORLD, STEPS, LATE_RANK, LATE_MS = 3, 2000, 1, 30
ENOUGH = 12  # full steps, until a rank that is late in every step must be named: the other two show how large noise is
NO_LAUNCHES: Mapping[str, object] = {
    name: [] for name in ("module", "label", "bytes", "ready", "launch", "done", "seq")
}  # fmt: skip
PERIODS = pytest.mark.parametrize("period", [32, 64])


def fleet_of(period: int, late: range) -> Fleet:
    """One step in a period is watched, of these one in four in full; one rank is late in some steps."""
    shape = Shape(
        world=WORLD, steps=STEPS, noise=Noise("gauss", 0.02), watched_period=period, full_period=4 * period, seed=period
    )
    wrong, by = Disturbance(shape), zeros(shape)
    by[list(late), LATE_RANK] = LATE_MS * MS
    wrong.backward.append((20, by))
    return Fleet(shape, wrong)


def without_launches(frames: Iterator[Step]) -> Iterator[Step]:
    """The frames, in which light steps say nothing about collectives."""
    for frame in frames:
        columns = {f"comm_{name}": column for name, column in NO_LAUNCHES.items()}
        yield replace(frame, **columns) if frame.status == LIGHT else frame


def stragglers_after_full_steps(fleet: Fleet) -> Iterator[list[tuple[int, ...]]]:
    """Which stragglers are open after each full step."""
    state: RunState = state_of([hello(rank, WORLD) for rank in range(WORLD)])
    for played in fleet.play():
        for frame in without_launches(fleet.frames(played)):
            state.apply_message(frame, frame.start_ns)
        if played.status == FULL:
            found = state.diagnosis.incidents()
            yield [incident.ranks for incident in found if incident.kind == "straggler" and incident.open]


@PERIODS
def test_a_rank_that_is_late_in_every_step_is_named_for_good(period: int) -> None:
    named = list(stragglers_after_full_steps(fleet_of(period, range(STEPS))))
    assert len(named) >= ENOUGH + 4
    assert all(ranks in ([], [(LATE_RANK,)]) for ranks in named)
    assert all(ranks == [(LATE_RANK,)] for ranks in named[ENOUGH:])


@PERIODS
def test_a_single_late_step_names_nobody(period: int) -> None:
    """Even if it is one of those that have lateness: in the light steps after it, nobody is known to be late."""
    fleet = fleet_of(period, range(0))
    blip = next(number for number in range(STEPS // 2, STEPS) if fleet.status(number) == FULL)
    assert not any(stragglers_after_full_steps(fleet_of(period, range(blip, blip + 1))))
