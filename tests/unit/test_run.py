"""The fold of a run: which steps it closes when, and that its diagnosis is one, whoever holds it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.incident_json import incident_row, lost_row
from ddpwatch.analysis.kept_steps import DECODED, KEPT, KeptSteps
from ddpwatch.analysis.run import OPEN, Run, diagnosed
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Message, Step
from tests.support.fleet import Disturbance, Fleet, Shape, zeros
from tests.support.fleet_noise import Noise
from tests.support.frames import MS, bye, enveloped, hello, run, state_of, step, synchronous


def introduced(world: int, kept: KeptSteps | None = None) -> Run:
    run = Run(kept=kept)
    for rank in range(world):
        run.apply_message(hello(rank, world))
    return run


@pytest.mark.parametrize(("world", "open_steps"), [(2, OPEN.steps), (128, 1024), (1024, 128), (1 << 20, 64)])
def test_the_more_ranks_the_fewer_steps_wait_for_one_that_is_missing(world: int, open_steps: int) -> None:
    run = Run()
    run.apply_message(hello(0, world))
    numbers = range(open_steps + 100)
    closed = [found.step for number in numbers for found in run.apply_message(step(0, number))]
    assert len(run._open) == open_steps
    assert [*closed, *(found.step for found in run.rest())] == list(numbers)


def test_a_step_that_lacks_a_rank_comes_before_the_next_complete_one() -> None:
    run = introduced(2)
    sent = [step(rank, number) for number in range(40) for rank in (0, 1) if (rank, number) not in ((1, 20), (0, 30))]
    found = [across for one in sent for across in run.apply_message(one)]
    assert [across.step for across in found] == list(range(40))
    assert [across.step for across in found if len(across) == 1] == [20, 30]
    assert not list(run.rest())


def test_steps_are_closed_in_order_though_their_first_frames_come_otherwise() -> None:
    """Rank 1 lost its step 1, and is ahead."""
    run = introduced(2)
    sent = [step(0, 0), step(1, 0), step(1, 2), step(0, 1), step(0, 2)]
    assert [(found.step, len(found)) for one in sent for found in run.apply_message(one)] == [(0, 2), (1, 1), (2, 2)]


def test_a_count_that_starts_again_closes_nothing_that_is_newer() -> None:
    run = introduced(2)
    sent = [step(0, 7), *(step(rank, number) for number in (0, 1) for rank in (0, 1))]
    assert [across.step for one in sent for across in run.apply_message(one)] == [0, 1]
    assert [across.step for across in run.rest()] == [7]


@pytest.mark.parametrize(("keeps", "members"), [(True, [0, 1]), (False, [1])])
def test_a_frame_that_comes_after_its_step_was_closed(keeps: bool, members: list[int]) -> None:
    """It is added to what is kept, and diagnosed no more; else it makes a step of its own."""
    kept = KeptSteps() if keeps else None
    run = introduced(2, kept)
    sent = [step(0, 0), step(0, 1), step(1, 1), step(1, 0)]
    assert [(found.step, len(found)) for one in sent for found in run.apply_message(one)] == [(0, 1), (1, 2)]
    late = next(iter(kept.by_number.values())) if kept else next(run.rest())
    assert (late.step, sorted(late.members)) == (0, members)
    assert not list(run.rest())


def test_what_is_older_than_anything_kept_is_dropped_and_what_waits_is_kept_and_diagnosed() -> None:
    kept = KeptSteps()
    run = introduced(2, kept)
    numbers = range(100, 110 + OPEN.steps)
    closed = [found.step for number in numbers for found in run.apply_message(step(0, number))]
    assert closed == list(numbers[:10])
    assert list(kept.by_number) == list(numbers[-KEPT.steps :])
    run.apply_message(step(1, 99))
    assert 99 not in kept.by_number
    assert 99 not in run._open
    assert run.diagnosis.lost().rank_ns > 0


def three_faults() -> Iterator[Message]:
    """One rank's backward is slow for a while, later another one stalls once, and then a third waits for its data."""
    shape = Shape(world=4, steps=260, noise=Noise("gauss", 0.01), seed=5)
    wrong, late = Disturbance(shape), zeros(shape)
    late[40:90, 1] = 40 * MS
    wrong.backward.append((20, late))
    wrong.forward[120, 3] = 1500 * MS
    wrong.data[160:230, 2] = 30 * MS
    fleet = Fleet(shape, wrong)
    yield from (hello(rank, shape.world) for rank in range(shape.world))
    for played in fleet.play():
        yield from fleet.frames(played)


def with_losses() -> Iterator[Message]:
    """Every rank loses one frame in twenty; rank 1 is late now and then."""
    dice = random.Random(3)
    yield from (hello(rank, 4) for rank in range(4))
    for number, ranks in enumerate(synchronous([[0, 10 * (n % 40 > 20), 0, 0] for n in range(700)])):
        for one in ranks:
            if dice.random() > 0.05:
                yield replace(one, comm_first_seq=2 * number, comm_seq=[0, 1])


def without_a_rank() -> Iterator[Message]:
    yield from (message for message in run(60, world=3, late_rank=1) if getattr(message, "rank", None) != 2)


@pytest.mark.parametrize("messages", [three_faults, with_losses, without_a_rank])
def test_what_a_viewer_keeps_changes_nothing_of_the_diagnosis(messages: Callable[[], Iterator[Message]]) -> None:
    """And it is complete: each rank's time, from its first step to its last, is in the accounts once."""
    frames = enveloped([*messages(), bye()])
    state, report = state_of(message for message, _ in frames), diagnosed(frames)
    assert report.incidents()
    assert [incident_row(incident, state.layouts) for incident in state.diagnosis.incidents()] == report.incidents()
    assert lost_row(state.diagnosis.lost()) == report.lost()
    ends = defaultdict(list)
    for message in messages():
        if isinstance(message, Step):
            ends[message.rank] += [message.start_ns, message.start_ns + message.duration_ns]
    lost = state.diagnosis.lost()
    assert sum(account.ns for account in lost.accounts) == lost.rank_ns
    assert lost.rank_ns == sum(max(times) - min(times) for times in ends.values())


def test_three_faults_at_different_times() -> None:
    found = diagnosed(enveloped(three_faults())).diagnosis.incidents()
    assert {(one.kind, one.ranks): one.since_step for one in found} == {
        ("straggler", (1,)): 40, ("pause", (3,)): 120, ("slow_input", (2,)): 160,
    }  # fmt: skip
    assert not any(" is late" in one.message or " takes " in one.message for one in found)
    assert sum(" was late by " in one.message and " took " in one.message for one in found) == 2


def test_ranks_are_in_order_in_whatever_order_they_come() -> None:
    state, order = RunState(), [3, 1, 2, 0, 5, 4]
    for count, rank in enumerate(order, start=1):
        state.apply_message(hello(rank, 6), 1)
        if count % 2:
            assert list(state.ranks) == sorted(order[:count])
    assert list(state.ranks) == list(range(6))


def test_of_many_ranks_steps_that_may_show_a_cause_are_kept_encoded() -> None:
    world = DECODED.rank_steps // 4
    run = introduced(world)
    closed = [found for number in range(6) for rank in range(world) for found in run.apply_message(step(rank, number))]
    assert [across.ranks.packed for across in closed] == [True, True, False, False, False, False]
