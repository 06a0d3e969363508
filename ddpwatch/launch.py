"""`ddpwatch run -- COMMAND`: watches a job that knows nothing of ddpwatch.

The command runs as it is, with a bootstrap on its ``PYTHONPATH``. Its exit code is ours, the signals to us are its.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ddpwatch import rundir
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.messages import Status
from ddpwatch.rundir import RunInfo

BOOTSTRAP = Path(__file__).parent / "bootstrap" / "path"
END_GRACE_S = 5.0  # for the collector to close its recording after the job
RELAY_POLL_S = 0.2
TAIL_LINES = 20
ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
PASSED_ON = ENDING | {signal.SIGUSR1, signal.SIGUSR2}  # schedulers announce the end of a job's time with these
KEYS = {signal.SIGINT, signal.SIGQUIT}  # Ctrl-C and Ctrl-\\
REFUSALS = {
    errno.ENOENT: ("command not found", "give the whole command after --"),
    errno.EACCES: ("permission denied", "chmod +x it, or put its interpreter in front, e.g. python"),
    errno.ENOEXEC: ("neither a program nor a script that begins with #!", "put its interpreter in front, e.g. sh"),
    errno.E2BIG: ("the argument list is too long", "put arguments into a file; the environment counts, too"),
}


class JobOverError(DdpwatchError):
    """The job ended before anything of it could be watched."""


class Launch:
    """One job under watch.

    Args:
        command: The job's command line.
        record: File to record to, or None.
        limits: Of that file, as environment variables.

    Raises:
        UsageError: There is no command.
        DdpwatchError: The rendezvous directory cannot be used; better known before the job than in it.
    """

    def __init__(self, command: Sequence[str], record: Path | None, limits: Mapping[str, str]) -> None:
        _demand(command)
        rundir.directory()
        self.name = rundir.new_run_id(_script_of(command))
        self.command = shlex.join(command)
        self.told_to_end = threading.Event()
        self.hung_up: Callable[[], None] = lambda: None
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
        """The running job, with its output sent to a file descriptor. Signals to us are passed on to it.

        Raises:
            UsageError: The command cannot be started.
        """
        with _signals_held_back() as (signals, mask):
            process, over = self._start(output, signals, mask), threading.Event()
            relay = threading.Thread(target=self._pass_on, args=(process, signals, over), daemon=True)
            relay.start()
            try:
                yield process
            finally:
                process.wait()  # whatever has become of the view, the job is not left alone
                self._await_the_end()
                over.set()
                relay.join()

    def _start(self, output: int | None, signals: set[signal.Signals], mask: set[int]) -> subprocess.Popen[bytes]:
        def give_signals_back() -> None:
            for number in signals:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=None if output is None else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=give_signals_back,  # there is no other thread yet
            )
        except OSError as error:
            raise _refusal(self._command[0], error) from error

    def _pass_on(self, process: subprocess.Popen[bytes], signals: set[signal.Signals], over: threading.Event) -> None:
        """Gives the job the signals that come for us, but for those that the terminal has sent it already."""
        while not over.is_set():
            info = signal.sigtimedwait(signals, RELAY_POLL_S)
            if info is None:
                continue
            by_the_kernel = info.si_code > 0  # that is, by the terminal: to all of its foreground process group
            if not (by_the_kernel and info.si_signo in KEYS):
                with contextlib.suppress(PermissionError):  # the job is another user's, by sudo
                    process.send_signal(info.si_signo)
            if info.si_signo in ENDING:
                self.told_to_end.set()
            if info.si_signo == signal.SIGHUP:
                self.hung_up()

    def _await_the_end(self) -> None:
        """Gives the collector the time to close its recording."""
        deadline = time.monotonic() + END_GRACE_S
        while self.runs() and time.monotonic() < deadline:
            time.sleep(0.1)


def run_unwatched(command: Sequence[str]) -> NoReturn:
    """Becomes the command.

    Raises:
        UsageError: It cannot be started.
    """
    _demand(command)
    print("ddpwatch: DDPWATCH=0: the command runs unwatched", file=sys.stderr, flush=True)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what is ignored stays so
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise _refusal(command[0], error) from error


def run_headless(launch: Launch) -> int:
    """Runs the job in this terminal, with a line about it on stderr every few seconds."""
    from ddpwatch.plain import narrate_runs

    with launch.job(None) as process:
        over = threading.Event()
        narrator = threading.Thread(target=narrate_runs, args=(launch.runs, over), daemon=True)
        narrator.start()
        code = _exit_code(process)
        over.set()
        narrator.join(END_GRACE_S)
    return code


def run_with_dashboard(launch: Launch) -> int:
    """Runs the job with its output kept in a file and the dashboard in this terminal; then shows the output."""
    from ddpwatch.tui.app import run_dashboard
    from ddpwatch.tui.feed import AttachSpec

    log = rundir.directory() / f"{launch.name}.out"
    launch.hung_up = _leave_a_dead_terminal
    with log.open("wb") as output, launch.job(output.fileno()) as process:

        def runs() -> list[RunInfo]:
            found = launch.runs()
            if not found and process.poll() is not None and (not watched or launch.told_to_end.is_set()):
                raise JobOverError("the job is over, and there is nothing to watch or nobody who wants to")
            watched.extend(found[:1])
            return found

        watched: list[RunInfo] = []
        try:
            run_dashboard(AttachSpec(list_runs=runs, job=launch.command, output=log))
        except JobOverError:
            pass
        except DdpwatchError as error:  # the settings cannot be read, say
            print(f"ddpwatch: no dashboard: {error}", file=sys.stderr)
        code = _show_output(process, log)
    print(f"ddpwatch: the job's output is in {log}", file=sys.stderr)
    for trouble in launch.troubles():
        print(f"ddpwatch: the recording is not complete: {trouble}", file=sys.stderr)
    return code


def _leave_a_dead_terminal() -> None:
    """Ends us where a dashboard would go on reading a terminal that is gone; nobody is there to wait for the job."""
    if not sys.stdin.isatty():
        os._exit(128 + signal.SIGHUP)


def _show_output(process: subprocess.Popen[bytes], log: Path) -> int:
    """The newest lines of the job's output, and what it still writes until it ends."""
    with log.open("rb") as file:
        for line in file.readlines()[-TAIL_LINES:]:
            sys.stdout.buffer.write(line)
        if process.poll() is None:
            print("ddpwatch: the job goes on; Ctrl-C ends it", file=sys.stderr)
        while process.poll() is None:
            _copy(file)
            time.sleep(0.2)
        _copy(file)
    return _exit_code(process)


def _copy(file: object) -> None:
    sys.stdout.buffer.write(file.read())  # type: ignore[attr-defined]
    sys.stdout.flush()


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """The job's exit code as a shell gives it, once it has ended."""
    code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_held_back() -> Iterator[tuple[set[signal.Signals], set[int]]]:
    """Blocks the signals that are the job's, in this thread and those that it starts.

    A handler could not pass on what comes before the job is there, nor tell Ctrl-C at the terminal, which reaches the
    job by itself, from ``kill -INT``. What is ignored (``nohup``) stays ignored, for the job, too.

    Yields:
        These signals, and the mask as it was.
    """
    signals = {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, signals)}
    try:
        yield signals, mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _demand(command: Sequence[str]) -> None:
    if not any(command[:1]):
        raise UsageError("no command to run", "ddpwatch run -- torchrun --nproc-per-node=2 train.py")


def _refusal(command: str, error: OSError) -> UsageError:
    """Why a command cannot be started, and what helps."""
    name = shlex.quote(command)
    if isinstance(error, PermissionError) and Path(command).is_dir():
        return UsageError(f"{name} is a directory", "give the whole command after --")
    if isinstance(error, FileNotFoundError) and shutil.which(command) is not None:
        return UsageError(f"{name}: the interpreter that its first line names is not there", "correct its #! line")
    why, hint = REFUSALS.get(error.errno or 0, (error.strerror or str(error), "does it run without ddpwatch?"))
    return UsageError(f"{name}: {why}", hint)


def _with_bootstrap() -> str:
    existing = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(BOOTSTRAP), *([existing] if existing else [])])


def _script_of(command: Sequence[str]) -> str:
    """The script in a command line, for the run's name."""
    return next((word for word in command if word.endswith(".py")), command[0])
