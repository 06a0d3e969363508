"""A real job on two clocks whose difference is known: it is inside the stated interval in every step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.run import steps_across_ranks
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.whatif.answer import WhatIf
from ddpwatch.whatif.command import recorded_in
from tests.support.hosts import skip
from tests.support.jobs import SCRIPTS, Job, wait_for

AHEAD_S = 500
AHEAD_NS = AHEAD_S * 10**9


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entered = ["unshare", "--time", "--fork", "--monotonic", "1", "true"]
    if subprocess.run(entered, capture_output=True, check=False).returncode:
        skip("needs the right to create a time namespace")
    folder = tmp_path_factory.mktemp("clocks")
    arguments = (str(folder / "run.mcap"), str(AHEAD_S))
    with Job(SCRIPTS / "two_clocks.py", *arguments, log=folder / "log", DDPWATCH_DETAIL="full") as job:
        assert job.wait() == 0, job.output()
        wait_for(lambda: has_its_end(folder / "run.mcap"), "the recording has its end")
    return folder / "run.mcap"


def has_its_end(path: Path) -> bool:
    """Whether the collector, which may not get a core at once, has written all of it."""
    recording = Recording(path)
    return bool(list(recording)) and not recording.cut_tail


def true_launches(across: StepAcrossRanks) -> list[list[int]]:
    """Per rank, on rank 0's clock."""
    steps = [across.ranks[rank] for rank in (0, 1)]
    ahead = [0, AHEAD_NS]
    return [[step.start_ns - by + at for at in step.comm_launch] for step, by in zip(steps, ahead, strict=True)]


def test_what_is_stated_is_true(recording: Path) -> None:
    """Whatever the machine adds: a rank that is late by more than twice the error is named, and it is that rank."""
    named = 0
    for across in steps_across_ranks(message for message, _ in Recording(recording)):
        assert across.comparable
        error = across.skew.error
        assert abs(across.shifts[1].offset + AHEAD_NS) <= across.shifts[1].error
        for bucket, *launches in zip(across.skew.buckets.values(), *true_launches(across), strict=True):
            late = max(launches) - min(launches)
            assert launches.index(max(launches)) in bucket.last_ranks
            assert abs(bucket.last - bucket.first - late) <= error
            assert bucket.last_rank is not None or late <= 2 * error
            named += bucket.last_rank is not None
    assert named


def test_the_report_shows_how_far_stamps_may_be_off(recording: Path) -> None:
    first, second = report_of(recording).as_json()["ranks"]
    assert first["clock_error_ms"] == 0 < second["clock_error_ms"]
    assert first["late_ms_p50"] is not None


def test_what_if_has_the_ranks_on_one_time_line(recording: Path) -> None:
    found = WhatIf(recorded_in(recording)[0])
    assert found.replayed.mean == pytest.approx(found.recorded.measured_ns, rel=0.02)
    for ranks in found.recorded.steps:
        starts = [rank.start for rank in ranks]
        assert max(starts) - min(starts) < 10 * found.recorded.measured_ns
