"""The collector as its starter sees it, with small programs in place of a collector."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe import collector_process
from ddpwatch.probe.collector_process import RESTARTS, CollectorProcess
from ddpwatch.run import rundir
from ddpwatch.wire.control import Listen
from ddpwatch.wire.keys import new_key_pair
from tests.support.fork_server import ROOT

REPORT = 'b\'{"type":"ready"}\\n\''
READY = f"import os, signal, sys; os.write(int(sys.argv[sys.argv.index('--control') + 1]), {REPORT}); "


def program(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def command(module: str, *arguments: str, is_grandchild: bool = False) -> list[str]:
        return [sys.executable, "-c", text, str(ROOT), *arguments]

    monkeypatch.setattr(collector_process, "module_command", command)


def ask_until(collector: CollectorProcess, answer: bool) -> None:
    deadline = time.monotonic() + 60.0
    while collector.is_ready() is not answer:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask_until_it_gives_up(collector: CollectorProcess) -> DdpwatchError:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            collector.is_ready()
        except DdpwatchError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("it does not give up")


def test_one_that_cannot_start_is_reported_with_its_last_words(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(monkeypatch, "import sys; sys.exit('no module named zmq')")
    error = ask_until_it_gives_up(CollectorProcess("run", 1, None))
    assert error.message == "the collector did not start: no module named zmq"
    assert error.hint == f"its log is {rundir.log('run')}"
    assert rundir.log("run").read_text() == "no module named zmq\n" * (RESTARTS + 1)
    assert [path.name for path in run_directory.iterdir()] == ["run.log"]
    assert caplog.records == []  # the error says it all


def test_one_that_dies_is_started_again_three_times(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(monkeypatch, READY + "print(sys.argv[-1], flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    with caplog.at_level(logging.WARNING):
        error = ask_until_it_gives_up(CollectorProcess("run", 1, None))
    assert error.message == "the collector died: SIGKILL"
    assert rundir.log("run").read_text().split() == [str(number) for number in range(RESTARTS + 1)]
    said = "ddpwatch restarts its collector ({} of 3): it died: SIGKILL"
    assert [record.getMessage() for record in caplog.records] == [said.format(number) for number in (1, 2, 3)]


def test_one_that_ends_in_good_order_is_left_alone(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, READY)
    collector = CollectorProcess("run", 1, None)
    ask_until(collector, answer=True)
    collector._process.wait(60.0)
    for _ in range(3):
        assert collector.is_ready()
    collector.leave()


def test_the_run_is_live_as_long_as_starter_or_collector_is_there(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A viewer that looks while the collector is started again must not clean up."""
    publish = (
        "from ddpwatch.run import clock, rundir; claim = int(sys.argv[sys.argv.index('--claim') + 1]); "
        "rundir.publish(claim, rundir.RunInfo(run_id='run', ingest='', publish='', pid=os.getpid(), world_size=1, "
        "started=0.0, boot_id=clock.boot_id())); "
    )
    program(monkeypatch, "import sys; sys.path.append(sys.argv[1]); import os; " + publish + READY + "signal.pause()")
    collector = CollectorProcess("run", 1, None)
    ask_until(collector, answer=True)
    (first,) = rundir.live_runs()
    collector._process.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert rundir.live_runs() == [first]  # the starter's claim
    ask_until(collector, answer=False)
    ask_until(collector, answer=True)
    (second,) = rundir.live_runs()
    assert second.pid == collector._process.pid != first.pid
    process = collector._process
    collector.leave()
    assert rundir.live_runs() == [second]  # the collector's
    os.kill(second.pid, signal.SIGKILL)
    process.returncode = None
    process.wait()
    assert rundir.live_runs() == []
    assert [path.name for path in run_directory.iterdir()] == ["run.log"]


def test_one_that_takes_long_to_start_holds_nobody_up(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk, or a fork at the same moment: the thread that sends a rank's frames goes on."""
    started_by, may_start, start = [], threading.Event(), subprocess.Popen

    def slow(*arguments: Any, **about: Any) -> subprocess.Popen[bytes]:
        started_by.append(threading.current_thread())
        if started_by[-1] is not threading.main_thread():
            assert may_start.wait(60.0)
        return start(*arguments, **about)

    program(monkeypatch, READY)
    monkeypatch.setattr(collector_process, "START_WAIT_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", slow)
    collector, other = CollectorProcess("run", 1, None), CollectorProcess("other", 1, None)
    assert threading.main_thread() not in started_by
    assert not collector.is_ready()
    collector.order(Listen(new_key_pair()))
    other.leave()  # before it has started
    may_start.set()
    ask_until(collector, answer=True)
    collector.leave()


def test_one_that_cannot_be_started_after_a_while_is_an_error(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()

    def fail(*_: Any, **__: Any) -> NoReturn:
        assert may_start.wait(60.0)
        raise OSError("no memory")

    monkeypatch.setattr(collector_process, "START_WAIT_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", fail)
    collector = CollectorProcess("run", 1, None)
    may_start.set()
    with pytest.raises(OSError, match="no memory"):
        ask_until(collector, answer=True)
    assert rundir.live_runs() == []


def test_below_ray_the_collector_is_no_child_of_the_rank(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of Ray kills its children when it ends."""
    monkeypatch.setitem(sys.modules, "ray", sys)
    collector = CollectorProcess("run", 1, None)
    ask_until(collector, answer=True)
    (info,) = rundir.live_runs()
    pid = collector._process.pid
    assert psutil.Process(info.pid).ppid() == pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    collector._process.wait(60.0)
    assert psutil.pid_exists(info.pid)
    assert rundir.live_runs() == [info]
    collector.leave()
    os.kill(info.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60.0
    while rundir.live_runs():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_below_ray_the_collector_s_death_is_seen(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", sys)
    collector = CollectorProcess("run", 1, None)
    ask_until(collector, answer=True)
    (info,) = rundir.live_runs()
    os.kill(info.pid, signal.SIGKILL)
    assert collector._process.wait(60.0) == -signal.SIGKILL
    collector.leave()


def test_a_collector_whose_run_directory_was_removed_as_it_started_leaves_nothing(run_directory: Path) -> None:
    claim = rundir.claim("train-1")
    shutil.rmtree(run_directory)
    options = ["--run-id=train-1", "--world-size=1", f"--watch-pid={os.getpid()}", f"--claim={claim}"]
    command = [sys.executable, "-m", "ddpwatch.collector", *options]
    done = subprocess.run(command, pass_fds=[claim], capture_output=True, text=True, check=False)
    os.close(claim)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("train-1.json was removed")
    assert "Traceback" not in done.stderr
    assert list(run_directory.iterdir()) == []
    assert not list(rundir.SHARED_MEMORY.glob("ddpwatch-*/train-1.*"))
