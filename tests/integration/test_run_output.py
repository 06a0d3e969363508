"""What becomes of the output of a job below the dashboard, whatever happens to the disk and to the processes around."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import PATIENCE_S, finished, kill, running, wait_for

# `ddpwatch run` with a dashboard that is closed at once, and so need not be imported.
RUN = """
import sys
from types import SimpleNamespace

from ddpwatch.launch import Launch, run_with_dashboard

sys.modules["ddpwatch.tui.app"] = SimpleNamespace(run_dashboard=lambda spec: None)
sys.modules["ddpwatch.tui.feed"] = SimpleNamespace(AttachSpec=dict)
sys.exit(run_with_dashboard(Launch(sys.argv[1:], None, {})))
"""
LINES = 2000  # of 1 KiB: more than a pipe or a small tmpfs holds
LINE = "f'{number:01023}'"
# Prints a line, waits until a process (0: its parent) is gone, prints more, and leaves in a file what came of it.
GOES_ON = f"""
import os, sys, time

pid, parent = int(sys.argv[1]), os.getppid()
print(os.getpid(), flush=True)
while os.path.exists(f"/proc/{{pid}}") if pid else os.getppid() == parent:
    time.sleep(0.01)
try:
    print(*({LINE} for number in range({LINES})), sep="\\n", flush=True)
    outcome = "printed"
except OSError as error:
    outcome = str(error)
with open(sys.argv[2], "w") as file:
    file.write(outcome)
"""
ALL = [f"{number:01023}" for number in range(LINES)]


@pytest.fixture
def output(run_directory: Path) -> Path:
    """Where the outputs are."""
    return run_directory / "state" / "ddpwatch" / "output"


def run(*job: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return finished(sys.executable, "-c", RUN, *job, **environment)


def copied(output: Path) -> str:
    """The one output so far."""
    return "".join(path.read_text() for path in output.glob("*.out"))


def numbers(text: str) -> list[str]:
    """The lines after the first."""
    return text.splitlines()[1:]


def test_bytes_and_exit_code_are_the_jobs(output: Path) -> None:
    print_all = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 400); sys.stdout.flush(); exit(7)"
    done = subprocess.run(
        [sys.executable, "-c", RUN, sys.executable, "-c", print_all], stdin=subprocess.DEVNULL, capture_output=True
    )
    data = bytes(range(256)) * 400
    (path,) = output.iterdir()
    assert done.returncode == 7
    assert path.read_bytes() == data
    assert data.endswith(done.stdout)
    assert len(done.stdout.split(b"\n")) >= 20  # the last one has no end
    assert f"ddpwatch: the job's output is in {path}\n" in done.stderr.decode()


def test_a_state_directory_that_cannot_be_written_to(run_directory: Path) -> None:
    (run_directory / "state").write_text("a file")
    done = run("sh", "-c", "seq 30; exit 3")
    assert done.returncode == 3
    assert numbers("\n" + done.stdout)[-20:] == [str(number) for number in range(11, 31)]
    assert f"nothing of the job's output is in {run_directory}/state/ddpwatch/output/sh-" in done.stderr
    assert ": Not a directory\n" in done.stderr


def test_a_limit_on_file_sizes(output: Path) -> None:
    """The job of 8 MB may not write files of more than 6 MiB."""
    job = [sys.executable, "-c", f"print(*({LINE} for number in range({4 * LINES})), sep='\\n')"]
    done = finished("sh", "-c", f"ulimit -f {6 * 2048}; exec {shlex.join([sys.executable, '-c', RUN, *job])}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"0{4 * LINES - 1}\n")
    assert "bytes of it are missing there: File too large\n" in done.stderr
    assert copied(output).startswith("\n".join(ALL))


def test_a_tmpfs_that_is_full(run_directory: Path) -> None:
    """Run directory and state directory are on a tmpfs of 1 MiB, as $XDG_RUNTIME_DIR often is a small one."""
    unshared = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m,mode=700 tmpfs {shlex.quote(str(run_directory))}"
    if shutil.which("unshare") is None or finished(*unshared, mount).returncode != 0:
        pytest.skip("no tmpfs can be mounted here: that takes unshare and root")
    job = [sys.executable, "-c", f"print(*({LINE} for number in range({LINES})), sep='\\n', flush=True); exit(3)"]
    done = finished(*unshared, f"{mount} && exec {shlex.join([sys.executable, '-c', RUN, *job])}")
    assert done.returncode == 3, done.stderr
    assert done.stdout.endswith(f"0{LINES - 1}\n")
    assert "bytes of it are missing there: No space left on device\n" in done.stderr


@contextlib.contextmanager
def job_that_goes_on(output: Path, result: Path, after: int = 0) -> Iterator[subprocess.Popen[str]]:
    """`ddpwatch run` with a job that waits for the end of a process, by default of `ddpwatch run`."""
    with running(sys.executable, "-c", RUN, sys.executable, "-c", GOES_ON, str(after), str(result)) as process:
        wait_for(lambda: copied(output).endswith("\n"), "the job's first line is copied")
        job = psutil.Process(int(copied(output)))
        try:
            yield process
        finally:
            kill([job])


def copier(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that copies the output."""
    children = psutil.Process(process.pid).children()
    (found,) = [child for child in children if any("output_copy" in word for word in child.cmdline())]
    return found


def test_the_job_goes_on_without_us(output: Path, tmp_path: Path) -> None:
    """What ends a job (SIGTERM to all of a batch job's processes) leaves the copier to its last words."""
    result = tmp_path / "result"
    with job_that_goes_on(output, result) as process:
        helper = copier(process)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            helper.send_signal(number)
        process.kill()
        wait_for(lambda: result.exists() and result.read_text(), "the job has printed")
        helper.wait(PATIENCE_S)
    assert result.read_text() == "printed"
    assert numbers(copied(output)) == ALL


def test_we_take_over_from_a_copier_that_is_killed(output: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as gate,
        job_that_goes_on(output, result, gate.pid) as process,
    ):
        copier(process).kill()
        gate.communicate()
        _, err = process.communicate()
    assert (result.read_text(), process.returncode) == ("printed", 0)
    assert numbers(copied(output)) == ALL
    assert "missing" not in err
