"""`ddpwatch run -- COMMAND`: watches a job that knows nothing of ddpwatch.

The command runs as it is, with a bootstrap on its ``PYTHONPATH``. Its exit code is ours.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddpwatch import rundir
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.messages import Status
from ddpwatch.rundir import RunInfo

BOOTSTRAP = Path(__file__).parent / "bootstrap" / "path"
END_GRACE_S = 5.0  # for the collector to close its recording after the job
TAIL_LINES = 20


class JobOverError(DdpwatchError):
    """The job ended before anything of it could be watched."""


class Launch:
    """One job under watch.

    Args:
        command: The job's command line.
        record: File to record to, or None.
        limits: Of that file, as environment variables.

    Raises:
        UsageError: The command does not exist.
        DdpwatchError: The rendezvous directory cannot be used; better known before the job than in it.
    """

    def __init__(self, command: Sequence[str], record: Path | None, limits: Mapping[str, str]) -> None:
        if not command:
            raise UsageError("no command to run", "ddpwatch run -- torchrun --nproc-per-node=2 train.py")
        if shutil.which(command[0]) is None:
            raise UsageError(f"{command[0]}: command not found", "give the whole command after --")
        rundir.directory()
        self.name = rundir.new_run_id(_script_of(command))
        self.command = shlex.join(command)
        self._command = list(command)
        self._environment = {**os.environ, "DDPWATCH_RUN": self.name, "PYTHONPATH": _with_bootstrap()}
        if record is not None:
            self._environment |= {"DDPWATCH_RECORD": str(record.absolute()), **limits}

    def runs(self) -> list[RunInfo]:
        """This job's live runs: one, or one per restart of it."""
        return [info for info in rundir.live_runs() if info.run_id.startswith(self.name)]

    def troubles(self) -> list[str]:
        """What was wrong with this job's recordings, by what its runs have left."""
        from ddpwatch.recording.reader import Recording

        views = [path for path in rundir.last_views() if path.stem.startswith(self.name)]
        last = [[m.recording_error for m, _ in Recording(view) if isinstance(m, Status)][-1:] for view in views]
        return [trouble for troubles in last for trouble in troubles if trouble]

    @contextlib.contextmanager
    def job(self, output: int | None) -> Iterator[subprocess.Popen[bytes]]:
        """The running job, with its output sent to a file descriptor. SIGTERM is passed on to it."""
        process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            yield process
        finally:
            signal.signal(signal.SIGTERM, previous)
            self._await_the_end()

    def _await_the_end(self) -> None:
        """Gives the collector the time to close its recording."""
        deadline = time.monotonic() + END_GRACE_S
        while self.runs() and time.monotonic() < deadline:
            time.sleep(0.1)


def run_headless(launch: Launch) -> int:
    """Runs the job in this terminal, with a line about it on stderr every few seconds."""
    from ddpwatch.plain import narrate_runs

    with launch.job(None) as process:
        over = threading.Event()
        narrator = threading.Thread(target=narrate_runs, args=(launch.runs, over), daemon=True)
        narrator.start()
        code = _wait(process)
        over.set()
        narrator.join(END_GRACE_S)
    return code


def run_with_dashboard(launch: Launch) -> int:
    """Runs the job with its output kept in a file and the dashboard in this terminal; then shows the output."""
    from ddpwatch.tui.app import run_dashboard
    from ddpwatch.tui.feed import AttachFeed

    log = rundir.directory() / f"{launch.name}.out"
    with log.open("wb") as output, launch.job(output.fileno()) as process:

        def runs() -> list[RunInfo]:
            found = launch.runs()
            if not found and process.poll() is not None and not watched:
                raise JobOverError("the job ended without a DistributedDataParallel module to watch")
            watched.extend(found[:1])
            return found

        watched: list[RunInfo] = []
        with contextlib.suppress(JobOverError):
            run_dashboard(AttachFeed(list_runs=runs, job=launch.command, output=log))
        code = _show_output(process, log)
    print(f"ddpwatch: the job's output is in {log}", file=sys.stderr)
    for trouble in launch.troubles():
        print(f"ddpwatch: the recording is not complete: {trouble}", file=sys.stderr)
    return code


def _show_output(process: subprocess.Popen[bytes], log: Path) -> int:
    """The newest lines of the job's output, and what it still writes until it ends."""
    with log.open("rb") as file:
        for line in file.readlines()[-TAIL_LINES:]:
            sys.stdout.buffer.write(line)
        if process.poll() is None:
            print("ddpwatch: the job goes on; Ctrl-C ends it", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            while process.poll() is None:
                _copy(file)
                time.sleep(0.2)
        code = _wait(process)
        _copy(file)
    return code


def _copy(file: object) -> None:
    sys.stdout.buffer.write(file.read())  # type: ignore[attr-defined]
    sys.stdout.flush()


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The job's exit code as a shell gives it. Ctrl-C reaches the job by itself: we only wait for what it does."""
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue


def _with_bootstrap() -> str:
    existing = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(BOOTSTRAP), *([existing] if existing else [])])


def _script_of(command: Sequence[str]) -> str:
    """The script in a command line, for the run's name."""
    return next((word for word in command if word.endswith(".py")), command[0])
