"""When a job that hangs is ended, and how."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.errors import UsageError
from ddpwatch.job.ending import end_job
from ddpwatch.viewer.hang_limit import HangLimit, parse_duration
from ddpwatch.viewer.state import RunState

HANG = Incident(kind="hang", severity="error", message="rank 1 is stuck\n", ranks=(1,), open=True)
LATE = Incident(kind="straggler", severity="warning", message="rank 1 is late", ranks=(1,), open=True)
LIMIT_S = 10.0
# Ignores SIGTERM, and so does its child, in a session of its own
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
signal.pause()
"""


class Looks:
    """Looks at a run once a second."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.now = self.frames = self.steps = 0
        self.limit = HangLimit(LIMIT_S, self.ended.append, lambda: float(self.now))

    def look(self, times: int, *incidents: Incident, frames: int = 2, seconds: int = 1) -> int:
        """How many times it has been ended after so many looks, with that much between two."""
        for _ in range(times):
            self.now += seconds
            self.frames += frames
            diagnosis = SimpleNamespace(incidents=lambda: list(incidents))
            state = SimpleNamespace(frames=self.frames, finished_steps=self.steps, diagnosis=diagnosis)
            self.limit.look(cast("RunState", state))
        return len(self.ended)


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_a_hang_of_that_long_ends_the_job_once(looks: Looks) -> None:
    assert looks.look(100, LATE) == 0
    assert looks.look(10, LATE, HANG) == 0
    assert looks.look(1, LATE, HANG) == 1
    assert looks.look(100, HANG) == 1
    assert looks.ended == ["rank 1 is stuck"]


def test_hangs_in_between_which_it_went_on_do_not_add_up(looks: Looks) -> None:
    assert looks.look(9, HANG) == looks.look(1, replace(HANG, open=False)) == looks.look(9, HANG) == 0
    looks.steps += 1
    assert looks.look(10, HANG) == 0


def test_what_nobody_saw_does_not_count(looks: Looks) -> None:
    """The collector is gone, or the viewer was stopped for an hour."""
    assert looks.look(2, HANG) == looks.look(100, HANG, frames=0) == looks.look(1, HANG, seconds=3600) == 0
    assert looks.look(6, HANG) == 0
    assert looks.look(2, HANG) == 1


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("90s", 90), ("1.5h", 5400), (" 2m ", 120)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["10", "m", "-1m", "0s", "1d", "10m5", "nans"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration"):
        parse_duration(text)


def test_what_outlives_sigterm_is_killed_with_what_it_has_started_and_nothing_else() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True) as job,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as beside,
    ):
        assert job.stdout is not None
        child = psutil.Process(int(job.stdout.readline()))
        end_job(job, grace_s=0.2)
        assert job.wait() == -9
        assert psutil.wait_procs([child], 30)[1] == []
        assert beside.poll() is None
        beside.communicate(b"\n")


def test_the_exit_code_of_a_job_that_ends_by_itself_is_kept() -> None:
    says = "import signal, sys; print(signal.signal(15, lambda *_: sys.exit(7)), flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", says], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        end_job(job)
        assert job.wait() == 7


def test_a_job_that_has_ended_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "exit(7)"]) as job:
        job.wait()
        end_job(job, grace_s=0.2)
        assert job.returncode == 7
