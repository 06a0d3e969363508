"""What `benchmarks/diagnosis.py` measures at length, in small: clear faults are found, and nothing else is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness
from ddpwatch.sampling.levels import is_watched
from ddpwatch.wire.messages import BATCH_WAIT, Mark
from tests.support.diagnosis_cases import Case, Job, Kind, Truth, job_of
from tests.support.diagnosis_score import play
from tests.support.fleet import LAYER_PARAMS, Disturbance, Fleet, Shape, zeros
from tests.support.fleet_noise import Noise, NoiseKind

pytestmark = pytest.mark.same_everywhere

MS = 1_000_000

FAULTS: list[tuple[Kind, float, NoiseKind]] = [
    ("constant", 0.20, "uniform"),
    ("constant", 0.10, "gauss"),
    ("periodic", 0.50, "gauss"),
    ("random", 0.50, "heavy"),
    ("stall", 0.0, "heavy"),
    ("moving", 0.20, "gauss"),
    ("two", 0.50, "uniform"),
    ("slow_input", 0.20, "heavy"),
    ("slow_input_all", 0.20, "gauss"),
    ("exposed", 0.30, "slow"),
    ("slow_link", 0.30, "gauss"),
    ("gc", 0.50, "gauss"),
    ("checkpoint", 0.0, "heavy"),
    ("checkpoint_rank0", 0.0, "gauss"),
    ("validation", 0.0, "gauss"),
]


@pytest.mark.parametrize(("kind", "size", "noise"), FAULTS, ids=[f"{kind}-{noise}" for kind, _, noise in FAULTS])
def test_a_clear_fault_is_found_with_its_rank_and_cause(kind: Kind, size: float, noise: NoiseKind) -> None:
    result = play(job_of(Case(kind, size, 4, 0, noise)))
    for score in result.scores:
        assert score.detected, result.incidents
        assert score.rank, result.incidents
        assert score.cause is not False, result.incidents
        assert score.period is not False, result.incidents


@pytest.mark.parametrize("noise", ["quiet", "gauss", "uniform", "heavy"])
def test_nobody_is_blamed_while_nothing_is_wrong(noise: NoiseKind) -> None:
    assert play(job_of(Case("clean", 0.0, 2, 0, noise))).others == []


def test_a_rank_that_is_late_at_random_stays_one_incident() -> None:
    """It was found in a cluster: then it is late less often than it was so far."""
    result = play(job_of(Case("random", 0.20, 8, 3, "gauss")))
    (incident,) = result.incidents
    assert incident.until_step is not None
    assert incident.until_step > 330
    assert result.scores[0].cost == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize(("kind", "size", "world", "seed"), [("random", 0.5, 2, 2), ("periodic", 0.2, 8, 1)])
def test_a_rank_that_seemed_to_be_late_in_every_step_has_no_second_incident(
    kind: Kind, size: float, world: int, seed: int
) -> None:
    """Its mean showed it first, or another figure did, and from a stretch of many late steps."""
    result = play(job_of(Case(kind, size, world, seed, "busy")))
    assert [incident.kind for incident in result.incidents if incident.ranks] == ["intermittent"]
    assert result.scores[0].detected


def test_bare_steps_are_split_like_those_around_them() -> None:
    """As one rank is late after the other, by the same, older steps are as alike."""
    for score in play(job_of(Case("moving", 0.50, 8, 0, "gauss"))).scores:
        assert score.cost == pytest.approx(0, abs=0.12)


def test_collections_cost_what_they_make_others_wait_and_count_from_the_first_on() -> None:
    (score,) = play(job_of(Case("gc", 0.10, 8, 0, "busy"))).scores
    assert score.detected
    assert score.kind
    assert score.cost == pytest.approx(0, abs=0.1)


def test_late_steps_far_beyond_a_streak_are_another_one() -> None:
    """A rank is late by 5 ms in many steps, and from step 400 on by 45 ms in every 7th."""
    dice, lateness = random.Random(1), GroupLateness((0, 1))
    for step in range(700):
        late = (5 * MS if step >= 200 and step % 3 else 0) + (40 * MS if step >= 400 and step % 7 == 0 else 0)
        lateness.add_step(step, [late + int(dice.gauss(0, MS)), int(dice.gauss(0, MS))], 85 * MS)
    streak = lateness.streaks[0]
    assert (streak.since, streak.period) == (406, 7)
    assert streak.late_ns == pytest.approx(43 * MS, rel=0.1)


@pytest.mark.parametrize(("period", "since"), [(2, 60), (5, 62), (7, 60), (8, 63)])
def test_a_rhythm_costs_as_much_before_and_after_the_late_steps_that_were_watched(period: int, since: int) -> None:
    """Every second step is watched: of 16 late ones, the first or the last are often not."""
    strikes = np.arange(since, since + 16 * period, period)
    shape = Shape(world=4, steps=280, noise=Noise("gauss", 0.01), watched_period=2)
    job = Job(Case("periodic", 0.5, 4, 0, "gauss"), shape, Disturbance(shape))
    job.disturbance.forward[strikes, 1] = shape.step_ns // 2
    job.truths.append(Truth(("intermittent",), strikes, (1,), ("forward",), period=period, slack=4 * period))
    watched = [is_watched(job.fleet.status(step)) for step in (strikes[0], strikes[-1])]
    assert not all(watched)

    (score,) = play(job).scores
    assert score.period
    assert score.cost == pytest.approx(0, abs=0.02)


def test_incidents_are_the_same_whenever_somebody_asks() -> None:
    job = job_of(Case("two", 0.20, 4, 0, "uniform"))
    asked, once = Diagnosis(job.fleet.names), Diagnosis(job.fleet.names)
    for played in job.fleet.play():
        for diagnosis in (asked, once):
            diagnosis.add_step(job.fleet.across(played))
        asked.incidents()
    assert asked.incidents() == once.incidents() != []


@pytest.mark.parametrize(("rank", "cause"), [(1, "backward"), (2, "input")])
def test_a_rank_is_named_though_all_steps_are_equally_long_as_all_wait_for_it(rank: int, cause: str) -> None:
    """Late by 200 ms in its backward, or by 150 ms at its input, of steps of 93 ms, from the first step on."""
    shape = Shape(world=4, steps=60, step_ns=93 * MS, noise=Noise("gauss", 0.01), watched_period=2, seed=252)
    wrong, late = Disturbance(shape), zeros(shape)
    if cause == "input":
        wrong.data[:, rank] = 150 * MS
    else:
        late[:, rank] = 200 * MS
        wrong.backward.append((5 * LAYER_PARAMS, late))
    fleet = Fleet(shape, wrong)
    diagnosis, durations = Diagnosis(fleet.names), []
    for played in fleet.play():
        diagnosis.add_step(fleet.across(played))
        durations.append(played.end - played.start)
    means = np.mean(durations, axis=0)
    assert np.ptp(means) < 0.02 * means.min()
    found = diagnosis.slowest()
    assert found is not None
    assert found.ranks == (rank,)


@pytest.mark.parametrize(("before", "workers", "late"), [(40, 1, []), (40, 0, [(1,)]), (5, 1, [(1,)])])
def test_a_rank_that_waits_for_a_loader_as_slow_as_the_others_is_not_late(
    before: int, workers: int, late: list[tuple[int]]
) -> None:
    """At first both wait for data (ms); then rank 1 alone, for 40 ms of steps as long, while rank 0's queue is full."""
    shape = Shape(world=2, steps=240, step_ns=40 * MS, noise=Noise("gauss", 0.01), watched_period=2, seed=1)
    wrong = Disturbance(shape)
    wrong.data[:60] = before * MS
    wrong.data[60:, 1] = 40 * MS
    fleet = Fleet(shape, wrong)
    diagnosis = Diagnosis(fleet.names)
    for rank in range(2):
        wait = Mark(rank=rank, kind="data", name=BATCH_WAIT, workers=workers, start_ns=1, end_ns=40 * MS)
        diagnosis.apply_message(wait, 40 * MS)
    for played in fleet.play():
        diagnosis.add_step(fleet.across(played))
    found = [incident for incident in diagnosis.incidents() if incident.kind == "slow_input" and incident.open]
    assert [incident.ranks for incident in found if incident.ranks] == late
    waited = [account.rank for account in diagnosis.lost().accounts if account.name == "waiting"]
    assert waited == [rank for ranks in late for rank in ranks]
    if not late:
        (shared,) = found
        assert shared.since_step is not None
        assert shared.since_step < 10
        assert shared.gain == pytest.approx(0.5, abs=0.05)
