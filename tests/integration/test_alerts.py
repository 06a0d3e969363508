"""A job with a late rank that then hangs, below `ddpwatch run`: who is alerted of what, and how the job is ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.wire.messages import Bye, Stack
from tests.support.jobs import SCRIPTS, ddpwatch

pytestmark = pytest.mark.same_everywhere

SCRIPT = SCRIPTS / "troubled.py"
# The first time, it does not come back before the job has gone on; it floods; and it fails.
COMMAND = """
alert=$(cat)
printf '%s\\n' "$alert" >> alerts
case "$alert" in '{"event":"started"'*'"kind":"straggler"'*) cat go;; esac
yes | head -c 3000000
yes | head -c 3000000 >&2
exit 3
"""


@pytest.mark.seconds(25)
def test_a_command_gets_each_event_once_and_a_job_that_hangs_is_ended(run_directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    os.mkfifo(tmp_path / "go")
    (tmp_path / "alerts").touch()
    (tmp_path / "command").write_text(COMMAND)
    alert = ("--on-incident", f"cd {tmp_path} && sh command", "--kill-after-hang", "2s")
    done = ddpwatch(
        "run", "--headless", "--record", str(file), *alert, "--", sys.executable, str(SCRIPT), str(tmp_path)
    )
    assert done.returncode == 124, done.stderr
    (ended,) = [line for line in done.stderr.splitlines() if line.startswith("ddpwatch: ended the job")]
    assert ended.startswith("ddpwatch: ended the job, which hung for 2s: rank 1 is stuck in ")
    assert ended.endswith("; its own exit code: 1")
    assert done.stderr.count("--on-incident") == 1
    assert "ddpwatch: --on-incident: the command ended with 3; that is said once" in done.stderr
    check_alerts(tmp_path / "alerts", file)
    check_recording(file)


def check_alerts(alerts: Path, recording: Path) -> None:
    """On a busy machine, there may be other incidents as well. The death is that of the ranks that were ended."""
    found = [json.loads(line) for line in alerts.read_text().splitlines()]
    named = [one["incident"]["kind"] for one in found if one["event"] in ("started", "over")]
    assert [kind for kind in named if kind in ("straggler", "hang", "death")] == ["straggler", "hang", "death"]
    for one in found:
        assert one["incident"]["ranks"] == [1] or one["incident"]["kind"] not in ("straggler", "hang"), one
        assert (one["run"]["script"], one["run"]["ranks"]) == ("troubled.py", 2)
        assert one["run"]["recording"] == str(recording)


def check_recording(file: Path) -> None:
    """Where rank 1 was is in it before any rank ends."""
    frames = [(message, envelope.received_ns) for message, envelope in Recording(file)]
    first_end = min(at_ns for message, at_ns in frames if isinstance(message, Bye))
    stacks = {message.rank: at_ns for message, at_ns in frames if isinstance(message, Stack) if "train" in message.text}
    assert stacks.keys() == {0, 1}
    assert max(stacks.values()) < first_end
    assert any(isinstance(message, Stack) and "in held_up" in message.text for message, _ in frames)
