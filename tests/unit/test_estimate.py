"""Figures that hold for all steps: against jobs of which every step is known, and where too little is known."""

from __future__ import annotations

import random

import pytest

from ddpwatch.analysis.estimate import Estimate, Estimator, StepShare
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.analysis.step import PHASES
from ddpwatch.report.text import render_report
from ddpwatch.viewer.plain import line
from tests.support import frames
from tests.support.frames import MS
from tests.support.known_jobs import JOBS, PERIODS, judged

pytestmark = pytest.mark.same_everywhere

RUNS = 10


def share(step: int, total: int, waited: int | None = None, exposed: int | None = None, hidden: int = 0) -> StepShare:
    """One rank's step in ms; without ``waited`` bare, without ``exposed`` a light step."""
    if waited is None:
        return StepShare(step, 1, total * MS)
    phases = dict.fromkeys(PHASES, 0) | {"backward": (total - waited) * MS, "exposed_comm": waited * MS}
    found = StepShare(step, 1, total * MS, phases=phases, waited=waited * MS)
    return found if exposed is None else found._replace(exposed=exposed * MS, hidden=hidden * MS)


def estimated(*shares: StepShare) -> Estimate:
    estimator = Estimator()
    for each in shares:
        estimator.add_share(each)
    return estimator.estimate()


@pytest.mark.parametrize("percent", PERIODS)
@pytest.mark.parametrize("draw", JOBS)
def test_against_the_truth(draw: str, percent: int) -> None:
    """`benchmarks/estimates.py` has more runs."""
    found = [judged(draw, percent, 300, seed) for seed in range(RUNS)]
    assert max(abs(one.step) for one in found) < 0.005
    assert sum(one.exposed_held for one in found) >= 0.8 * RUNS
    assert sum(one.overlap_held for one in found) >= 0.8 * RUNS


def test_each_stretch_counts_by_its_steps_however_many_of_them_are_watched() -> None:
    """While somebody looked, all steps were full, and communication was exposed."""
    looked = [share(number, 100, 20, 20, 10) for number in range(64, 128)]
    since = [share(number, 100, *((5, 5, 25) if number % 16 == 0 else ())) for number in range(128, 320)]
    found = estimated(*looked, *since)
    assert (found.steps, found.full) == (256, 76)
    assert found.exposed_ns == pytest.approx((20 * 64 + 5 * 192) / 256 * MS)
    assert found.step_ns == sum(found.phases_ns.values()) == 100 * MS


def test_a_wait_that_nobody_looked_for_is_not_known() -> None:
    """Light steps of a loop whose collectives are not seen."""
    found = estimated(*[share(number, 100, 0) for number in range(32)])
    assert "exposed_comm" not in found.phases_ns
    assert found.step_ns == sum(found.phases_ns.values())
    assert "exposed_comm" in estimated(*[share(number, 100, 1) for number in range(32)]).phases_ns


def test_long_steps_of_which_none_is_full_hide_what_their_duration_says() -> None:
    """Eight short steps are full: the longer, the more they hide, but for some noise, which the interval is about."""
    noise = (0.3, -0.3, 0.1, -0.1, -0.2, 0.2, -0.4, 0.4)
    full = [
        StepShare(
            20 + n,
            1,
            (16 + n) * MS,
            phases=dict.fromkeys(PHASES, 0),
            hidden=int((4 + n / 2 + noise[n]) * MS),
            exposed=0,
        )
        for n in range(8)
    ]
    bare = [share(100 + number, 140 if number % 5 == 0 else 20) for number in range(100)]
    found = estimated(*full, *bare)
    truth = sum([*(4 + n / 2 for n in range(8)), *(66 if n % 5 == 0 else 6 for n in range(100))]) / 108
    assert found.comm_ns == pytest.approx(truth * MS, rel=0.1)


def test_each_length_counts_by_its_steps() -> None:
    """Of 250 short and 50 long steps, as many of either are watched."""
    short = [share(20 + 6 * number, 20, *((1, 1, 4) if number % 50 == 0 else ())) for number in range(250)]
    long = [share(21 + 30 * number, 140, *((40, 40, 9) if number % 10 == 0 else ())) for number in range(50)]
    found = estimated(*sorted([*short, *long]))
    assert found.step_ns == pytest.approx(40 * MS)
    assert found.exposed_ns == pytest.approx((1 * 250 + 40 * 50) / 300 * MS)
    assert found.exposed_reach_ns == 0


@pytest.mark.parametrize("watched", [23, 2])
def test_steps_that_become_long_at_last_have_no_negative_phases(watched: int) -> None:
    """One of 48 long steps at the end is full, and half or two are watched: a larger share than of the short ones."""
    short = [share(12 + n, 20, *((8, 8, 4) if n % 32 == 0 else (8,) if n % 8 == 0 else ())) for n in range(500)]
    long = [share(512 + n, 470, *((455, 455, 4) if not n else (455,) if n < watched else ())) for n in range(48)]
    found = estimated(*short, *long)
    assert found.step_ns == pytest.approx((20 * 500 + 470 * 48) / 548 * MS) == sum(found.phases_ns.values())
    assert found.exposed_ns == pytest.approx((8 * 500 + 455 * 48) / 548 * MS, rel=0.02 if watched > 2 else 0.2)
    assert min(found.phases_ns.values()) >= 0


def test_what_full_steps_expose_beyond_waits_is_no_negative_rest() -> None:
    """Full steps expose 20 ms more than their ranks waited, of which the rest has 2."""
    phases = dict.fromkeys(PHASES, 0) | {
        "backward": 30 * MS,
        "optimizer": 8 * MS,
        "exposed_comm": 60 * MS,
        "other": 2 * MS,
    }
    shares = [StepShare(20 + n, 1, 100 * MS, phases=phases, waited=60 * MS) for n in range(4)]
    found = estimated(*[one._replace(exposed=80 * MS, hidden=0) for one in shares])
    assert found.phases_ns["exposed_comm"] == found.exposed_ns == 80 * MS
    assert found.phases_ns["other"] == 0
    assert found.phases_ns["backward"] == pytest.approx(30 / 38 * 20 * MS)
    assert sum(found.phases_ns.values()) == pytest.approx(100 * MS)


def test_whoever_asks_meanwhile_changes_nothing() -> None:
    """Some steps come late; after 2,048, a block has twice as many; the first ones are too rarely full to be timed."""
    dice, asked, shares = random.Random(5), Estimator(), list[StepShare]()
    for number in range(16, 2_600):
        late = max(16, number - 150 * (number % 97 == 0))
        seen = (dice.randint(5, 9), 5, 20) if dice.random() < number / 5_000 else ()
        shares.append(share(late, dice.choice((20, 25, 140)), *seen))
        asked.add_share(shares[-1])
        if number % 7 == 0:
            found = asked.estimate()
        if number % 500 == 0:
            assert asked.estimate() == estimated(*shares)
    assert found.exposed_reach_ns
    assert asked.estimate() == estimated(*shares)


def test_what_ranks_wait_beyond_the_communication_is_not_exposed() -> None:
    """Copies of results, as full steps show."""
    full = [share(number, 100, 12, 8, 30) for number in range(20, 24)]
    found = estimated(*full, *(share(number, 104, 16) for number in range(24, 40)))
    assert found.exposed_ns == pytest.approx((8 * 4 + 12 * 16) / 20 * MS)
    assert found.phases_ns["other"] == pytest.approx(4 * MS)


def test_the_first_steps_count_as_themselves() -> None:
    found = estimated(
        *(share(number, 200, 90, 90, 1) for number in range(1, 12)),
        *(share(number, 100, *((10, 10, 30) if number % 10 == 0 else ())) for number in range(12, 111)),
    )
    assert found.exposed_ns == pytest.approx((90 * 11 + 10 * 99) / 110 * MS)


def test_too_few_full_steps_are_said() -> None:
    """Never a figure from one."""
    shares = [share(number, 100, 10) for number in range(20, 40)]
    found = estimated(*shares, share(40, 100, 10, 8, 30))
    assert (found.step_ns, found.exposed_ns, found.overlap, found.too_few) == (100 * MS, None, None, True)
    assert not estimated(*shares).too_few  # completions may not be measured at all
    messages = [*frames.run(0), *(frames.light(rank, n) for n in range(1, 20) for rank in (0, 1))]
    messages += [frames.step(rank, 20) for rank in (0, 1)]
    builder = ReportBuilder()
    for message in messages:
        builder.apply_message(message)
    few = "overlap – of – ms; from the 1 of 20 steps that are timed in full, of 3 needed: too few steps"
    assert f"exposed communication – ms, {few}" in render_report(builder.report())
    assert "too few steps" in line(frames.state_of(messages), [])
