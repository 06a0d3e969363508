"""A suspended collector: training goes on, what does not fit is dropped and counted, and it recovers by itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import Beat, Step
from tests.support.fork_server import ADDRESS, server_address
from tests.support.jobs import (
    DDPWATCH,
    PATIENCE_S,
    SCRIPTS,
    Frames,
    Job,
    ddpwatch,
    forked_command,
    live,
    messages,
    read_until,
    running,
    the_run,
    wait_for,
)

pytestmark = [pytest.mark.same_everywhere, pytest.mark.seconds(15)]


def newest(frames: Frames) -> dict[int, Step]:
    """The last step of each rank."""
    return {step.rank: step for step in messages(frames, Step)}


def dropping(frames: Frames) -> bool:
    """Whether both ranks have said that frames were dropped."""
    return {step.rank for step in messages(frames, Step) if step.dropped} == {0, 1}


def beating(frames: Frames, since_ns: int) -> bool:
    """Whether heartbeats of both ranks came that were sent after a moment."""
    return {beat.rank for beat in messages(frames, Beat) if beat.at_ns > since_ns} == {0, 1}


@pytest.mark.usefixtures("run_directory")
def test_frames_are_dropped_and_counted_until_it_runs_again(tmp_path: Path) -> None:
    file, fill, stop, end = (tmp_path / name for name in ("run.mcap", "fill", "stop", "end"))
    with Job(SCRIPTS / "busy.py", *map(str, (file, fill, stop, end)), log=tmp_path / "log") as job:
        info = the_run(job)
        with live(info) as source:
            before = newest(read_until(source, lambda frames: len(newest(frames)) == 2, "both ranks train"))
            os.kill(info.pid, signal.SIGSTOP)
            fill.touch()
            try:
                for rank in (0, 1):
                    wait_for(lambda rank=rank: f"rank {rank} drops" in job.output(), f"rank {rank} drops frames")
            finally:
                os.kill(info.pid, signal.SIGCONT)
            after = newest(read_until(source, dropping, "a viewer sees that frames were dropped"))
            stop.touch()
            stopped_ns = time.monotonic_ns()
            read_until(source, lambda frames: beating(frames, stopped_ns), "the collector has caught up")
        end.touch()
        assert job.wait() == 0, job.output()
    assert all(after[rank].step > before[rank].step for rank in (0, 1))
    report = report_of(file).as_json()
    seen = messages(list(Recording(file)), Step)
    for row in report["ranks"]:
        steps = [step for step in seen if step.rank == row["rank"]]
        missing = steps[-1].step + 1 - row["steps"]
        assert 0 < missing <= row["dropped"] == steps[-1].dropped  # not one is missing without being counted
        assert row["end"]["reason"] == "finished"
    assert str(report["ranks"][0]["dropped"]) in ddpwatch("report", str(file)).stdout


def test_run_waits_for_a_recording_that_is_not_closed_yet(run_directory: Path, tmp_path: Path) -> None:
    file, fill, stop, end = (tmp_path / name for name in ("run.mcap", "fill", "stop", "end"))
    job = forked_command(2, None, SCRIPTS / "busy.py", *map(str, (file, fill, stop, end)))
    with running(
        *DDPWATCH, "run", "--headless", "--record", str(file), "--", *job, **{ADDRESS: server_address()}
    ) as run:
        assert run.stderr is not None
        info = the_run()
        with live(info) as source:
            read_until(source, lambda frames: len(newest(frames)) == 2, "both ranks train")
        os.kill(info.pid, signal.SIGSTOP)
        try:
            stop.touch()
            end.touch()
            assert any("its recording is being closed" in line for line in run.stderr)
            assert run.poll() is None
        finally:
            os.kill(info.pid, signal.SIGCONT)
        run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0
    recording = Recording(file)
    assert len(messages(list(recording), Step)) > 0
    assert not recording.cut_tail
