"""kill -9 of one rank, and of all of them: who died, what was in flight, and nothing left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from ddpwatch.messages import Bye, Hello, Step
from ddpwatch.reporting import report_of
from tests.integration.jobs import (
    SCRIPTS,
    Frames,
    Job,
    collector_pids,
    live,
    messages,
    read_until,
    the_run,
    wait_for,
)

ENDLESS = ("--steps", "100000")
TRAIN = SCRIPTS.parents[2] / "demo" / "train.py"


def begun(frames: Frames) -> bool:
    return {m.rank for m in messages(frames, Step) if m.step >= 3} == {0, 1}


def over(frames: Frames) -> bool:
    return any(m.rank is None for m in messages(frames, Bye))


@pytest.mark.usefixtures("run_directory")
def test_one_rank_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "out.mcap"
    with Job(TRAIN, *ENDLESS, "--record", str(file), log=tmp_path / "log") as job:
        info = the_run(job)
        with live(info) as source:
            frames = read_until(source, begun, "both ranks train")
            victim = next(m.pid for m in messages(frames, Hello) if m.rank == 1)
            os.kill(victim, signal.SIGKILL)
            frames += read_until(source, over, "the end of the run")
        assert job.wait() != 0
        wait_for(lambda: not collector_pids(info.run_id), "the collector ends")
    ends = {m.rank: m for m in messages(frames, Bye)}
    assert (ends[1].reason, ends[1].detail, ends[1].signal) == ("killed", "SIGKILL", 9)
    assert ends[1].step is not None
    assert ends[1].step >= 3
    assert ends[1].phase in ("input", "forward", "between", "backward", "sync", "optimizer")
    assert ends[None].reason == "killed"
    assert ends[1].at_ns < ends[0].at_ns
    report = report_of(file)
    assert not report["recording"]["cut_tail"]
    assert report["findings"][0]["message"].startswith("rank 1 was killed (SIGKILL) at step")


@pytest.mark.usefixtures("run_directory")
def test_everything_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "out.mcap"
    with Job(TRAIN, *ENDLESS, "--record", str(file), log=tmp_path / "log") as job:
        info = the_run(job)
        with live(info) as source:
            frames = read_until(source, begun, "both ranks train")
            job.kill_everything()
            frames += read_until(source, over, "the end of the run")
        wait_for(lambda: not collector_pids(info.run_id), "the collector ends")
    ends = {m.rank: m for m in messages(frames, Bye)}
    assert {ends[0].reason, ends[1].reason} <= {"killed", "lost"}
    assert all(ends[rank].phase and ends[rank].step >= 3 for rank in (0, 1))
    assert not any(psutil.pid_exists(m.pid) for m in messages(frames, Hello))
    report = report_of(file)
    assert {f["rank"] for f in report["findings"] if f["kind"] == "rank_ended"} == {0, 1}


@pytest.mark.usefixtures("run_directory")
def test_the_collector_is_killed_too(tmp_path: Path) -> None:
    """Nobody is left to write an end: the recording opens all the same, up to its last second."""
    file = tmp_path / "out.mcap"
    with Job(TRAIN, *ENDLESS, "--record", str(file), log=tmp_path / "log") as job:
        info = the_run(job)
        with live(info) as source:
            read_until(source, begun, "both ranks train")
            read_until(source, lambda frames: len(messages(frames, Step)) > 20, "a second goes by")
        job.kill_everything()
        psutil.Process(info.pid).kill()
    report = report_of(file)
    assert report["recording"]["cut_tail"]
    assert min(row["steps"] for row in report["ranks"]) >= 3
