"""Ranks on clocks that are off by up to an error: nobody is named for what clocks show, nor for what they hide."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness
from ddpwatch.analysis.diagnosis.late.streak import Streak
from ddpwatch.analysis.run import Run
from ddpwatch.wire.messages import Message, Span, Step
from tests.support.frames import MS, START_NS, enveloped, hello, step

RANKS = (0, 1, 2, 3)
STEP_NS, ERROR_NS = 200 * MS, 24 * MS
STEPS = 200


def named(seed: int, late_ms: float = 0.0) -> set[int]:
    """Who is named in a job whose ranks are alike: each is 40 ms late in every fourth step, by chance.

    Clocks are off by the same in all steps. Rank 3 is late besides.
    """
    dice = random.Random(seed)
    bias = [0.0, *(dice.uniform(-12, 12) for _ in RANKS[1:])]
    group, found = GroupLateness(RANKS), set()
    for number in range(STEPS):
        launches = [dice.gauss(100, 3) + 40 * (dice.random() < 0.25) + bias[rank] for rank in RANKS]
        launches[3] += late_ms
        found |= {
            streak.rank
            for streak in group.add_step(number, [int(at * MS) for at in launches], STEP_NS, error_ns=ERROR_NS)
        }
    return found


@pytest.mark.parametrize("seed", range(6))
def test_noise_that_clocks_hide_on_other_ranks_is_no_ranks_lateness(seed: int) -> None:
    """A clock that is ahead lets all noise of its rank show, and those that are behind none of theirs."""
    assert named(seed) == set()


@pytest.mark.parametrize("seed", range(6))
def test_lateness_beyond_the_error_is_named(seed: int) -> None:
    assert named(seed, late_ms=60) == {3}


@pytest.mark.parametrize(("later_ms", "count"), [(0, 1), (80, 2)])
def test_a_late_rank_is_one_incident_when_clocks_are_known_better(later_ms: int, count: int) -> None:
    """Rank 3 is late by 60 ms. What is sure of it grows from 30 to 55 ms at step 40; if it changes, by more."""
    dice, group = random.Random(1), GroupLateness(RANKS)
    found: list[Streak] = []
    for number in range(100):
        launches = [dice.gauss(100, 1) for _ in RANKS]
        launches[3] += 60 + later_ms * (number >= 40)
        error_ns = (30 if number < 40 else 5) * MS
        found += group.add_step(number, [int(at * MS) for at in launches], STEP_NS, error_ns=error_ns)
    assert [streak.rank for streak in found] == [3] * count


def test_what_clocks_may_be_off_by_does_not_average_out() -> None:
    """Rank 3 seems to be 20 ms early, and 80 ms late in every tenth step: with this error, nothing shows it is late."""
    group = GroupLateness(RANKS)
    streak = Streak(rank=3, step_ns=STEP_NS, since=0, until=0, typical_ns=5 * MS)
    for number in range(40):
        group.add_step(number, [0, 0, 0, 80 * MS if number % 10 == 0 else -20 * MS], STEP_NS, error_ns=ERROR_NS)
        streak.add_step(number, 5 * MS, low=MS, p=0.01)
    assert group.mean_in(streak) == (-20 * 0.9 + 80 * 0.1) * MS - ERROR_NS


def test_an_error_that_comes_later_is_taken_from_then_on() -> None:
    """As of GPUs, some of which stamp and some of which do not."""
    group, found = GroupLateness(RANKS), set()
    for number in range(60):
        launches = [0, 0, 0, 30 * MS]
        found |= {
            streak.rank for streak in group.add_step(number, launches, STEP_NS, error_ns=MS * (number in (13, 40)))
        }
    assert found == {3}


def stamped(rank: int, number: int, start_ms: int, launch_ms: int, done_ms: int) -> Step:
    """A step of a rank on a host of its own; rank 1's clock is 7 s ahead."""
    stamps = [launch_ms * MS] * 2
    return step(
        rank, number, start_ns=START_NS + start_ms * MS + 7_000 * MS * rank, duration_ns=(done_ms + 20) * MS,
        spans=[
            Span("forward", 2 * MS, 30 * MS), Span("backward", 31 * MS, launch_ms * MS),
            Span("sync", launch_ms * MS, done_ms * MS), Span("optimizer", (done_ms + 1) * MS, (done_ms + 5) * MS),
        ],
        hook_param=[], hook_ns=[], comm_ready=stamps, comm_launch=stamps, comm_done=[done_ms * MS] * 2,
    )  # fmt: skip


def stalled(late_ms: int) -> Iterator[Message]:
    """Steps of 200 ms in which transfers take 140 ms, so that clocks may be off by as much. One takes 400 ms longer."""
    for rank in (0, 1):
        yield hello(rank, 2, host=f"host{rank}", boot_id=f"boot {rank}")
    for number in range(30):
        longer, late = (400, late_ms) if number == 20 else (0, 0)
        start_ms = 200 * number + (400 if number > 20 else 0)
        for rank in (0, 1):
            yield stamped(rank, number, start_ms, 40 + late * rank, 180 + longer)


@pytest.mark.parametrize(("late_ms", "ranks"), [(260, []), (390, [1])])
def test_a_stall_is_a_ranks_if_its_clock_cannot_explain_that(late_ms: int, ranks: list[int]) -> None:
    """More than half of the stall lies before its launch, whatever the clocks' error."""
    run = Run()
    for _ in run.steps(enveloped(stalled(late_ms))):
        pass
    [pause] = [row for row in run.incidents() if row.kind == "pause"]
    assert pause.ranks == ranks
