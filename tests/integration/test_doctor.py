"""`ddpwatch doctor` with the real self-test, here and where a container or a batch system leaves little."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpwatch.doctor import loopback, report, training
from ddpwatch.run import rundir
from tests.support.jobs import DDPWATCH, ddpwatch, finished, running, wait_for

# As `ddpwatch doctor --json`, without the seconds that importing torch takes.
WITHOUT_TORCH = (
    "import sys; from ddpwatch.doctor import report, training; training.checks = lambda: []; "
    "sys.exit(not report.print_report(True, print))"
)
COMMAND = f"{sys.executable} -c '{WITHOUT_TORCH}'"
Found = dict[str, dict[str, Any]]


def by_name(output: str) -> Found:
    return {check["name"]: check for check in json.loads(output)["checks"]}


def collectors_below(folder: Path) -> list[psutil.Process]:
    """The collectors that record below a folder."""
    commands = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [process for process, command in commands if any(word.startswith(f"{folder}/") for word in command)]


@functools.cache
def can(*namespace: str) -> bool:
    """Whether this user may make such a namespace here."""
    return subprocess.run(["unshare", *namespace, "true"], capture_output=True).returncode == 0


def require(*namespace: str) -> None:
    if not can(*namespace):
        pytest.skip(f"unshare {' '.join(namespace)} is not allowed here")


@pytest.mark.seconds(15)
def test_everything_works_here_and_nothing_is_left(run_directory: Path, tmp_path: Path) -> None:
    done = ddpwatch("doctor", "--json", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found = by_name(done.stdout)
    assert "34 frames came through and were recorded" in found["loopback"]["text"]
    parts = {name: found[name]["state"] for name in training.PARTS}
    has_hooks = tuple(map(int, re.findall(r"\d+", found["torch"]["text"])[:2])) >= (2, 14)
    assert parts == {**dict.fromkeys(training.PARTS, "ok"), "group hooks": "ok" if has_hooks else "none"}
    assert "Gloo" in found["backends"]["text"]
    assert "other" not in found
    assert [*run_directory.iterdir(), *tmp_path.iterdir()] == []
    assert collectors_below(run_directory) == []


def test_a_step_that_fails_is_named(run_directory: Path) -> None:
    check = loopback.check(run_directory, lambda recording: loopback.start_collector(recording.with_name("other.mcap")))
    assert check.state == "fail"
    assert check.text.startswith("read the recording: ")
    assert list(run_directory.iterdir()) == []
    assert collectors_below(run_directory) == []


def test_settings_for_recordings_do_not_reach_the_self_test(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPWATCH_RECORD_MAX_SIZE", "nonsense")
    assert loopback.check(run_directory).state in ("ok", "warn")
    assert os.environ["DDPWATCH_DIR"] == str(run_directory)
    assert os.environ["DDPWATCH_RECORD_MAX_SIZE"] == "nonsense"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_self_test_and_nothing_is_left(run_directory: Path, number: signal.Signals) -> None:
    with running(*DDPWATCH, "doctor") as process:
        wait_for(lambda: list(run_directory.glob(f"doctor-*/{loopback.RUN_ID}.json")), "the collector's run file")
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 128 + number
    assert list(run_directory.iterdir()) == []
    wait_for(lambda: not collectors_below(run_directory), "the collector is gone")


def test_a_read_only_root_and_then_a_place_on_a_tmpfs() -> None:
    require("--mount")
    script = f"""
        mount -t tmpfs none /dev/shm && mount -o remount,ro,bind / || exit 9
        DDPWATCH_DIR=/ddpwatch-doctor {COMMAND}; echo "exit $?"
        DDPWATCH_DIR=/dev/shm/ddpwatch-doctor {COMMAND}; echo "exit $?"
        ls -A /dev/shm/ddpwatch-doctor"""
    done = finished("unshare", "--mount", "sh", "-c", script)
    refused, _, rest = done.stdout.partition("exit 1\n")
    found = by_name(refused)
    assert (found["path"]["state"], "Read-only file system" in found["path"]["text"]) == ("fail", True), done.stderr
    assert found["path"]["hint"].startswith("set DDPWATCH_DIR=/")
    assert found["loopback"]["state"] == "none"
    works, _, left = rest.partition("exit 0\n")
    found = by_name(works)
    assert found["black boxes"]["text"] == "in /dev/shm/ddpwatch-doctor"
    assert found["file system"]["text"] == "tmpfs"
    assert "fail" not in {check["state"] for check in found.values()}
    assert left == ""


def test_without_shared_memory_there_are_no_black_boxes(run_directory: Path) -> None:
    require("--mount")
    devices = "mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 || exit 9"
    done = finished("unshare", "--mount", "sh", "-c", f"{devices}; {COMMAND}")
    assert done.returncode == 0, done.stderr
    found = by_name(done.stdout)
    assert found["shared memory"]["text"] == "/dev/shm is missing"
    if rundir.file_system(run_directory) != "tmpfs":
        assert found["black boxes"]["state"] == "warn"
    assert "fail" not in {check["state"] for check in found.values()}


def test_an_unknown_user_without_a_home_and_with_nothing_set() -> None:
    user = ["--user", "--map-user=54321", "--map-group=54321"]
    require(*user)
    done = finished(
        "unshare", *user, "env", "-i", "LANG=C", "TERM=dumb", "XDG_RUNTIME_DIR=/run/user/no-such", sys.executable,
        "-c", WITHOUT_TORCH,
    )  # fmt: skip
    for place in (Path("/tmp"), rundir.SHARED_MEMORY):
        with contextlib.suppress(OSError):  # it is in use
            (place / "ddpwatch-54321").rmdir()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.isascii()
    found = by_name(done.stdout)
    assert "using /tmp/ddpwatch-54321" in found["path"]["text"]
    assert (found["path"]["state"], found["characters"]["state"]) == ("warn", "warn")
    assert "other" not in found


def test_the_text_comes_line_by_line_and_ends_with_a_summary(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_directory.chmod(0o755)
    monkeypatch.setattr(report.training, "checks", list)
    lines: list[str] = []
    assert not report.print_report(False, lines.append)
    assert lines[0] == "run directory"
    assert lines[1].startswith("  FAIL  path ")
    assert lines[-1] == "FAIL  ddpwatch cannot watch here (run directory: path)"
