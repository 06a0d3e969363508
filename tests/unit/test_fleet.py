"""The made-up jobs that the diagnosis is measured on: their schedule is causal, and a fault costs what it should."""

from __future__ import annotations

import numpy as np
import pytest

from ddpwatch.wire.messages import decode, encode
from tests.support.diagnosis_cases import KINDS, Case, cases, job_of
from tests.support.fleet import LAG_NS, LAYER_PARAMS, PARAMS, TAIL_NS, Disturbance, Fleet, Shape, zeros
from tests.support.fleet_noise import NOISES, Noise

MS = 1_000_000
NOISY = Shape(world=4, steps=48, noise=Noise("heavy"), seed=3)
CALM = Shape(world=4, steps=48)
LATE_NS = 30 * MS
EVERY_KIND = [next(cases((kind,), (4,), 1)) for kind in KINDS]


def delayed(phase: str, rank: int = 2, step: int = 40) -> Fleet:
    disturbance = Disturbance(CALM)
    late = zeros(CALM)
    late[step, rank] = LATE_NS
    if phase == "backward":
        disturbance.backward.append((PARAMS // 2, late))
    else:
        setattr(disturbance, phase, late)
    return Fleet(CALM, disturbance)


@pytest.mark.parametrize("case", EVERY_KIND, ids=[case.kind for case in EVERY_KIND])
def test_no_transfer_starts_before_its_last_launch_nor_before_the_one_before_it_ends(case: Case) -> None:
    for played in job_of(case).fleet.play():
        starts, ends = played.transfer
        assert (starts >= played.launch.max(axis=0)).all()
        assert (starts[1:] >= ends[:-1]).all()
        assert (played.sync_end >= ends[-1]).all()


@pytest.mark.parametrize("kind", NOISES)
def test_frames_are_causal_and_their_phases_add_up(kind: str) -> None:
    fleet = Fleet(Shape(world=3, steps=40, noise=Noise(kind), seed=1))  # type: ignore[arg-type]
    ends = None
    for played in fleet.play():
        across = fleet.across(played)
        frames = list(across.ranks.values())
        starts = [frame.start_ns for frame in frames]
        assert ends is None or starts == ends
        ends = [frame.start_ns + frame.duration_ns for frame in frames]
        for rank, frame in across.ranks.items():
            phases = across.figures[rank].phases_ns
            assert decode(encode(frame)) == frame
            assert frame.status == "unwatched" or sum(phases.values()) == frame.duration_ns
            assert min(phases.values(), default=0) >= 0
        for bucket, skew in enumerate(across.skew.buckets.values()):
            assert skew.transfer is None or skew.transfer >= 0
            assert skew.last == played.launch[:, bucket].max()


def test_steps_are_sampled_like_real_ones() -> None:
    fleet = Fleet(Shape(world=2, steps=256, watched_period=2))
    statuses = [fleet.status(number) for number in range(256)]
    assert statuses[:12] == ["warmup", *["ok"] * 11]
    assert {"shadow", "ok"} == set(statuses[12:32])
    assert statuses[64:].count("unwatched") == 96
    assert 1 <= statuses[64:].count("ok") <= 24


def test_light_steps_have_no_completions_and_seldom_hooks() -> None:
    fleet = Fleet(Shape(world=2, steps=128, full_period=64))
    light_steps = [next(fleet.frames(played)) for played in fleet.play() if played.status == "shadow"]
    assert all(frame.comm_done == [None] * len(frame.comm_label) for frame in light_steps)
    hooked = [frame for frame in light_steps if frame.hook_param]
    assert 0.05 < len(hooked) / len(light_steps) < 0.25
    assert all(len(frame.hook_ns) == PARAMS for frame in hooked)


def test_nobody_waits_while_nothing_is_wrong() -> None:
    assert not any(played.waits().any() for played in Fleet(CALM).play())


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "gap"])
def test_all_others_wait_as_long_as_a_rank_is_late(phase: str) -> None:
    """Less what a backward takes after its last launch."""
    for played in delayed(phase).play():
        expected = [LATE_NS - TAIL_NS] * 4 if played.number == 40 else [0] * 4
        expected[2] = 0
        assert played.waits().tolist() == expected
        assert played.number != 40 or played.last_rank == 2


def test_a_wait_shows_in_frames_as_the_backward_that_only_waits() -> None:
    fleet = delayed("backward")
    played = list(fleet.play())[40]
    across = fleet.across(played)
    sync = {rank: next(s.end - s.start for s in step.spans if s.phase == "sync") for rank, step in across.ranks.items()}
    assert sync[0] - sync[2] == LATE_NS
    assert across.late_ns(2) == LATE_NS
    assert across.late_ns(0) == 0


def test_a_fault_in_a_layer_delays_its_gradients_and_all_later_ones() -> None:
    late, calm = (list(fleet.play())[40] for fleet in (delayed("backward"), Fleet(CALM)))
    difference = (late.fires - calm.fires)[2]
    assert difference.tolist() == [0] * (PARAMS // 2) + [LATE_NS] * (PARAMS // 2)
    assert PARAMS // 2 % LAYER_PARAMS == 0
    assert (late.launch - late.fires[:, 5::6] == LAG_NS).all()


def test_the_twin_has_the_same_noise() -> None:
    """All steps that a fault does not strike take as long as without it."""
    disturbance = Disturbance(NOISY)
    disturbance.forward[40, 1] = LATE_NS
    for played, calm in zip(Fleet(NOISY, disturbance).play(), Fleet(NOISY).play(), strict=True):
        assert (played.number == 40) or (played.waits() == calm.waits()).all()


@pytest.mark.parametrize("case", EVERY_KIND, ids=[case.kind for case in EVERY_KIND])
def test_a_case_always_makes_the_same_job_and_has_a_truth(case: Case) -> None:
    job, again = job_of(case), job_of(case)
    ends = [[played.end for played in one.fleet.play()] for one in (job, again)]
    assert np.array_equal(*ends)
    assert job.truths
    for truth in job.truths:
        assert 0 <= truth.since < job.shape.steps
        assert truth.params is None or truth.params.stop - truth.params.start == LAYER_PARAMS
