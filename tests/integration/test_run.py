"""`ddpwatch run -- COMMAND`: how it starts, how it ends, what it refuses. The scripts know nothing of ddpwatch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch.report.build import report_of
from tests.support.fork_server import ADDRESS, server_address
from tests.support.jobs import (
    DDPWATCH,
    ROOT,
    SCRIPTS,
    ddpwatch,
    family,
    finished,
    forked_command,
    kill,
    running,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("run_directory")
SPAWNED = str(SCRIPTS / "unmodified" / "spawned.py")
BARE = "ddpwatch: DDPWATCH=0: the command runs unwatched\n"
SIGNALS = ["HUP", "INT", "QUIT", "TERM", "USR1", "USR2"]
# Says how it finds the signals.
BEGIN = f"""
import signal
numbers = [getattr(signal, "SIG" + name) for name in {SIGNALS}]
print("blocked", [n.name for n in signal.pthread_sigmask(signal.SIG_BLOCK, numbers)])
print("ignored", [n.name for n in numbers if signal.getsignal(n) == signal.SIG_IGN], flush=True)
"""
# Then says each that it gets; ends with 5 at USR2. It waits for them: a handler might have to wait for Python.
LISTENER = f"""{BEGIN}
n = print("ready", flush=True)
while n != signal.SIGUSR2:
    n = signal.sigwait(numbers)
    print(n.name, flush=True)
exit(5)
"""
# ddpwatch, but it gets a signal when it is about to start the job.
EARLY = """
import os, signal, subprocess
from ddpwatch.cli import main

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        os.kill(os.getpid(), signal.SIGUSR1)
        super().__init__(*arguments, **options)

subprocess.Popen = Popen
main()
"""
ALL_CLOSED = "0<&- 1>&- 2>&-"
IGNORING = ("sh", "-c", "trap '' HUP INT; exec \"$@\"", "sh")  # as nohup, and ``&`` in a script


@pytest.mark.seconds(15)
def test_spawned_ranks_forked_workers_and_a_sitecustomize_that_is_already_there(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OTHER_SITECUSTOMIZE'] = 'ran'\n")
    file = tmp_path / "run.mcap"
    command = [sys.executable, SPAWNED, str(tmp_path / "store")]
    done = ddpwatch("run", "--headless", "--record", str(file), "--", *command, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr
    assert "marker: ran" in done.stdout
    assert done.stderr.endswith(f"ddpwatch: recorded: ddpwatch report {file}\n")
    assert [row["steps"] for row in report_of(file).as_json()["ranks"]] == [12, 12]


def test_the_exit_code_is_the_jobs() -> None:
    done = ddpwatch("run", "--headless", "--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7
    assert "nothing was watched" in done.stderr
    killed = ddpwatch("run", "--headless", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == 128 + 9


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    """One rank is enough here: a module that would be watched."""
    file = tmp_path / "run.mcap"
    command = ("run", "--headless", "--record", str(file), "--")
    job = forked_command(0, None, SPAWNED, str(tmp_path / "store"), "--alone")
    done = ddpwatch(*command, *job, DDPWATCH="0", **{ADDRESS: server_address()})
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(BARE)
    assert not file.exists()


def test_turned_off_the_command_takes_our_place() -> None:
    tell = "import json, os, sys; print(json.dumps([os.getpid(), dict(os.environ), sys.stdin.read()])); sys.exit(7)"
    with running(*DDPWATCH, "run", "--", sys.executable, "-c", tell, DDPWATCH="0", PYTHONPATH="here") as process:
        out, err = process.communicate("input")
    pid, environment, heard = json.loads(out)
    assert (process.returncode, pid, heard, err) == (7, process.pid, "input", BARE)
    assert environment["PYTHONPATH"] == "here"
    assert "DDPWATCH_RUN" not in environment
    pipe = ddpwatch("run", "--", "sh", "-c", "kill -PIPE $$; echo SIGPIPE was ignored", DDPWATCH="0")
    assert (pipe.returncode, pipe.stdout) == (-signal.SIGPIPE, "")


def test_the_job_gets_the_signals_that_are_sent_to_us() -> None:
    with running(*DDPWATCH, "run", "--headless", "--", sys.executable, "-c", LISTENER) as process:
        assert process.stdout is not None
        began = [process.stdout.readline() for _ in range(3)]
        assert began == ["blocked []\n", "ignored []\n", "ready\n"]
        for name in SIGNALS:
            process.send_signal(getattr(signal, f"SIG{name}"))
            assert process.stdout.readline() == f"SIG{name}\n"
        out, _ = process.communicate()
    assert (process.returncode, out) == (5, "")


def test_signals_are_passed_on_after_a_pause() -> None:
    """`ddpwatch run` is stopped, as by Ctrl-Z or a debugger, for longer than a poll for signals would last."""
    with running(*DDPWATCH, "run", "--headless", "--", sys.executable, "-c", LISTENER) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)][-1] == "ready\n"
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            time.sleep(0.3)
            process.send_signal(signal.SIGCONT)
        for name in ("USR1", "USR2"):
            process.send_signal(getattr(signal, f"SIG{name}"))
            assert process.stdout.readline() == f"SIG{name}\n"
        assert process.wait() == 5


def test_a_signal_that_comes_before_the_job_is_kept_for_it() -> None:
    job = [sys.executable, "-c", "import signal; signal.pause()"]
    done = finished(sys.executable, "-c", EARLY, "run", "--headless", "--", *job)
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr


def test_what_is_ignored_stays_ignored() -> None:
    command = [*DDPWATCH, "run", "--headless", "--", sys.executable, "-c", BEGIN]
    done = finished(*IGNORING, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "blocked []\nignored ['SIGHUP', 'SIGINT']\n"


def test_an_interrupt_at_the_terminal_reaches_the_job_once_and_is_noted(run_directory: Path) -> None:
    command = [*DDPWATCH, "run", "--headless", "--", sys.executable, "-c", LISTENER]
    with _at_a_terminal(*command) as (process, terminal):
        _read_until(terminal, "ready")
        process.send_signal(signal.SIGSTOP)  # lest a second one come while the first is pending, and be lost
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        os.write(terminal, b"\x03")
        _read_until(terminal, "SIGINT")
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGUSR1)  # comes after whatever else was passed on
        assert "SIGINT" not in _read_until(terminal, "SIGUSR1")
        assert [b"interrupted" in file.read_bytes() for file in run_directory.glob("*.startup")] == [True]
        process.send_signal(signal.SIGINT)
        _read_until(terminal, "SIGINT")
        process.send_signal(signal.SIGUSR2)
        assert process.wait() == 5


def test_a_dashboard_passes_signals_on_and_closes_with_the_job(run_directory: Path) -> None:
    job = "from signal import *; pthread_sigmask(0, {2}); print('ready', flush=True); sigwait({2}); exit(7)"
    with _at_a_terminal(*DDPWATCH, "run", "--", sys.executable, "-c", job) as (process, terminal):
        wait_for(lambda: [log for log in run_directory.rglob("*.out") if log.read_text()], "the job is ready")
        process.send_signal(signal.SIGINT)
        _read_until(terminal, "the job's output is in")
        assert process.wait() == 7


def test_ctrl_c_reaches_the_job_once_the_dashboard_was_told_to_close(run_directory: Path) -> None:
    """Both keys are there at once: the dashboard cannot have given the terminal back in between."""
    job = "from signal import *; pthread_sigmask(0, {2}); print('ready', flush=True); sigwait({2}); exit(7)"
    with _at_a_terminal(*DDPWATCH, "run", "--", sys.executable, "-c", job) as (process, terminal):
        wait_for(lambda: [log for log in run_directory.rglob("*.out") if log.read_text()], "the job is ready")
        _read_until(terminal, "waiting for a run")
        os.write(terminal, b"q\x03")
        _read_until(terminal, "the job's output is in")
        assert process.wait() == 7


def test_a_job_that_survives_its_terminal_goes_on_printing(run_directory: Path, tmp_path: Path) -> None:
    job = (
        "import os, signal, sys, time; signal.signal(signal.SIGHUP, signal.SIG_IGN); parent = os.getppid()\n"
        "print('ready', flush=True)\n"
        "while os.getppid() == parent: time.sleep(0.01)\n"
        "print('x' * 2_000_000, flush=True); open(sys.argv[1], 'w').write('printed')"
    )
    result = tmp_path / "result"
    with _at_a_terminal(*DDPWATCH, "run", "--", sys.executable, "-c", job, str(result)) as (process, terminal):
        wait_for(lambda: [log for log in run_directory.rglob("*.out") if log.read_text()], "the job is ready")
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), terminal)  # closes the terminal's other end
        assert process.wait() == 128 + signal.SIGHUP
        wait_for(lambda: result.exists() and result.read_text(), "the job has printed")
        wait_for(lambda: sum(log.stat().st_size for log in run_directory.rglob("*.out")) > 2_000_000, "all is copied")


def test_what_follows_the_command_is_the_commands() -> None:
    done = ddpwatch("run", "--headless", "echo", "--headless", "--", "-h")
    assert done.stdout.split() == ["--headless", "--", "-h"]


@pytest.mark.parametrize("arguments", [["--", "no-such-command"], ["--"], []])
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str]) -> None:
    done = ddpwatch("run", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "rror: " in done.stderr


def test_without_a_dashboard_the_job_is_still_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (settings := tmp_path / "config.toml").write_text("no_such_setting = 1\n")
    monkeypatch.setenv("DDPWATCH_CONFIG", str(settings))
    with _at_a_terminal(*DDPWATCH, "run", "--", sys.executable, "-c", "exit(7)") as (process, terminal):
        said = _read_until(terminal, "the job's output is in")
        assert "no dashboard: " in said
        assert process.wait() == 7


@pytest.mark.parametrize("off", ["0", "1"])
@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("echo no first line\n", 0o755, "neither a program nor a script"),
        ("#!/no/such/interpreter\n", 0o755, "the interpreter that its first line names does not exist"),
        ("#!/bin/sh\n", 0o644, "permission denied"),
        (None, 0o755, "is a directory"),
    ],
)
def test_what_cannot_be_started_is_told(
    run_directory: Path, tmp_path: Path, text: str | None, mode: int, why: str, off: str
) -> None:
    path = tmp_path / "job"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
        path.chmod(mode)
    _is_refused(ddpwatch("run", "--headless", "--", str(path), DDPWATCH=off), f"{path}", why)
    assert not list(run_directory.glob("*.startup"))


def test_too_long_an_argument_list_is_told() -> None:
    longest = 131_072 - len("PYTHONPATH=") - 1  # of one string; the bootstrap makes it longer
    done = finished(*DDPWATCH, "run", "--headless", "--", "true", PYTHONPATH="x" * longest)
    _is_refused(done, "true: the argument list is too long")


def test_with_a_run_directory_that_others_can_read_the_job_runs_unwatched(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir(mode=0o755)
    tell = "import os; print('DDPWATCH_RUN' in os.environ, os.environ.get('PYTHONPATH')); exit(7)"
    about = {"DDPWATCH_DIR": str(shared), "PYTHONPATH": "here"}
    done = ddpwatch("run", "--record", str(tmp_path / "run.mcap"), "--", sys.executable, "-c", tell, **about)
    assert (done.returncode, done.stdout) == (7, "False here\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ddpwatch: {shared} is not a private directory that you own (")
    assert line.endswith(": the command runs unwatched")


def test_closed_streams_are_closed_for_the_job_as_well(tmp_path: Path) -> None:
    """Without a stdout, the job leaves what it finds in a file."""
    tell = "import sys; print(sys.stdin, sys.stdout, sys.stderr, file=open(sys.argv[1], 'w'))"
    found = tmp_path / "found"
    job = shlex.join([sys.executable, "-c", tell, str(found)])
    run = shlex.join([*DDPWATCH, "run", "--"])
    for closed, off in (("0<&-", "1"), ("2>&-", "1"), (ALL_CLOSED, "1"), (ALL_CLOSED, "0")):
        bare = finished("sh", "-c", f"{job} {closed}")
        expected = found.read_text()
        done = finished("sh", "-c", f"{run} {job} {closed}", DDPWATCH=off)
        assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout) == (0, ""), done.stderr
        assert found.read_text() == expected
        assert done.stderr.count("\n") == ("2" not in closed)


def test_viewers_without_streams_end_as_they_would_with_them(tmp_path: Path) -> None:
    file = str(tmp_path / "no.mcap")
    for command, closed in ((["attach", "no"], "0<&-"), (["attach", "no"], ALL_CLOSED), (["replay", file], ALL_CLOSED)):
        done = finished("sh", "-c", f"{shlex.join([*DDPWATCH, *command])} {closed}")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("" if "2" in closed else "ddpwatch: error: ")


def test_a_current_directory_that_was_removed_does_not_keep_the_job_from_starting(tmp_path: Path) -> None:
    def there(*command: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "gone").mkdir()
        return finished("sh", "-c", f"cd {tmp_path}/gone; rmdir ../gone; {shlex.join(command)}", PYTHONPATH=str(ROOT))

    if there(sys.executable, "-c", "import socket").returncode:
        pytest.skip("this Python (3.13.0) imports no socket there")
    done = there(*DDPWATCH, "run", "--record", "run.mcap", "--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert "Traceback" not in done.stderr


def test_a_directory_that_becomes_unusable_does_not_change_the_exit_code(tmp_path: Path) -> None:
    (private := tmp_path / "private").mkdir(mode=0o700)
    command = [sys.executable, "-c", "import os; os.chmod(os.environ['DDPWATCH_DIR'], 0o755); raise SystemExit(7)"]
    done = ddpwatch("run", "--headless", "--", *command, DDPWATCH_DIR=str(private))
    assert done.returncode == 7
    assert "ddpwatch: the job is no longer shown" in done.stderr
    assert "Traceback" not in done.stderr


def _is_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    error, hint = done.stderr.removeprefix(BARE).splitlines()
    assert done.returncode == 2
    assert done.stdout == ""
    assert error.startswith("ddpwatch: error: ")
    assert all(word in error for word in words), error
    assert hint.startswith("hint: ")


@contextlib.contextmanager
def _at_a_terminal(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command in the foreground of a terminal of its own, and the terminal's other end."""
    ours, its = os.openpty()

    def take_it() -> None:
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        command, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True, preexec_fn=take_it
    ) as process:
        os.close(its)
        try:
            yield process, ours
        finally:
            kill(family(process.pid))
            os.close(ours)


def _read_until(terminal: int, word: str) -> str:
    text = b""
    while not text.endswith(word.encode()):
        text += os.read(terminal, 1)  # what comes after the word is for the next to read
    return text.decode(errors="replace")
