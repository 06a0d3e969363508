"""`ddpwatch run -- COMMAND`: watches a job that does not know ddpwatch.

The command runs unchanged, with a bootstrap on its ``PYTHONPATH``. ddpwatch passes signals on to it, and exits with its
exit code.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from ddpwatch.errors import DdpwatchError
from ddpwatch.job.command import refusal, require_command, script_of
from ddpwatch.run import rundir, startup
from ddpwatch.run.priority import lower_thread
from ddpwatch.run.rundir import RunInfo

if TYPE_CHECKING:
    from ddpwatch.analysis.diagnosis.words.why_unwatched import Why
    from ddpwatch.job.job_output import OutputPipe
    from ddpwatch.job.output_copy import OutputBuffer

BOOTSTRAP = Path(__file__).parent / "job" / "path"
END_GRACE_S = 5.0  # for what the collector leaves after the job
CROWDED_S = 60.0  # for what has a low priority, where it hardly gets a core
OUTPUT_POLL_S = 0.2
CLOCK_SLACK_S = 3600.0  # by which a file server's clock may be behind
TERMINATING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
FORWARDED = TERMINATING | {signal.SIGUSR1, signal.SIGUSR2}  # schedulers announce a job's time limit with these
KEYS = {signal.SIGINT, signal.SIGQUIT}  # Ctrl-C and Ctrl-\\


class JobOverError(DdpwatchError):
    """The job ended before there was a run to watch."""


class Launch:
    """One job under watch.

    Args:
        command: The job's command line.
        record: File to record to, or None.
        settings: Variables for the job's environment.

    Raises:
        UsageError: There is no command.

    Attributes:
        name: Id of the job's first run; ids of later ones start with it.
        command: The command line as a shell takes it.
        terminated: Set once a signal that ends the job has come, or a hang has.
        hang: The hang for which the job was ended; empty if there was none.
    """

    def __init__(self, command: Sequence[str], record: Path | None, settings: Mapping[str, str]) -> None:
        require_command(command)
        self._made = time.time()
        self.name = rundir.new_run_id(script_of(command))
        self.command = shlex.join(command)
        self.terminated = threading.Event()
        self.hang = ""
        self._hurried = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ender: threading.Thread | None = None
        self._command = list(command)
        self._environment = {**os.environ, "DDPWATCH_RUN": self.name, "PYTHONPATH": _with_bootstrap(), **settings}
        self._startup: Path | None = None
        with contextlib.suppress(DdpwatchError, OSError):  # then nobody can say why nothing is watched
            startup.create(path := rundir.startup(self.name))
            self._startup, self._environment[startup.VARIABLE] = path, str(path)
        if record is not None:
            with contextlib.suppress(OSError):  # the current directory was removed: the job starts all the same
                record = record.absolute()
            self._environment |= {"DDPWATCH_RECORD": str(record)}

    def runs(self) -> list[RunInfo]:
        """Returns this job's live runs: one, or one per restart."""
        runs = rundir.live_runs(tidy=False)
        return [info for info in runs if info.run_id.startswith(self.name) or info.launched == self.name]

    def recordings(self) -> list[str]:
        """Returns what to type for the report of each of this job's recordings, and what is wrong with them.

        Both are known from the snapshots that its runs have left.
        """
        from ddpwatch.recording.reader import Recording
        from ddpwatch.viewer.plain import recorded_lines
        from ddpwatch.wire.messages import Status

        found: list[Status] = []
        with contextlib.suppress(DdpwatchError, OSError):  # the run directory is gone
            for view in rundir.last_views_of(self.name):
                found += [m for m, _ in Recording(view) if isinstance(m, Status)][-1:]
        errors = [f"the recording is not complete: {one.recording_error}" for one in found if one.recording_error]
        return [*errors, *(line for one in found for line in recorded_lines(one))]

    def verdicts(self) -> list[str]:
        """Returns the verdict on each of this job's runs, from the snapshots that they have left."""
        from ddpwatch.common.text import clean
        from ddpwatch.report.build import report_of
        from ddpwatch.report.incidents import last_line

        found = []
        with contextlib.suppress(DdpwatchError, OSError):  # the run directory is gone
            views = rundir.last_views_of(self.name)
            found = [f"{rundir.run_of(view)}: {clean(last_line(report_of(view)))}" for view in views]
        return found

    def without_run(self) -> list[str]:
        """Returns what the job left where no run was seen, in lines: rank files, or a collector's log, or nothing."""
        from ddpwatch.common.text import clean

        if lines := self.recorded():
            return lines
        if logs := sorted(rundir.directory().glob(f"{self.name}*.log")):
            return [f"a collector was started, but ended before it could be watched: see {log}" for log in logs]
        return [f"nothing was watched: {clean(str(self.why(over=True)))}"]

    def why(self, over: bool = False) -> Why:
        """Returns why nothing is watched; ``over``: why nothing was."""
        from ddpwatch.analysis.diagnosis.words.why_unwatched import Facts, why_unwatched

        found = None if self._startup is None else startup.read(self._startup)
        return why_unwatched(Facts(found, time.time() - self._made, over))

    def end_hung_job(self, hang: str) -> None:
        """Ends the job, on a thread of its own: its recording is closed by the collector. ``hang``: why."""
        from ddpwatch.job.ending import end_job

        if self._process is not None and self._ender is None:
            self.hang = hang
            self._ender = threading.Thread(target=end_job, args=(self._process,), name="ddpwatch-end", daemon=True)
            self._ender.start()
            self.terminated.set()

    def interrupt(self) -> None:
        """Does what the terminal does at Ctrl-C, which signals its foreground process group."""
        os.killpg(0, signal.SIGINT)

    def wait_for(self, event: threading.Event, seconds: float) -> None:
        """Waits for an event, at most for so long. A signal that would end the job ends the wait."""
        until = time.monotonic() + seconds
        while not event.wait(0.02) and not self._hurried.is_set() and time.monotonic() < until:
            pass

    def forget_startup(self) -> None:
        """Removes the start-up file, once the job is over."""
        if self._startup is not None:
            with contextlib.suppress(OSError):
                self._startup.unlink()

    def recorded(self) -> list[str]:
        """Returns the rank files of this job on this machine, and what to type for the report of each folder."""
        from ddpwatch.common.text import counted
        from ddpwatch.recording.names import report_command

        return [
            line
            for folder, names in self._rank_files().items()
            for line in (
                f"{counted(len(names), 'rank')} recorded to {folder}: {', '.join(names)}",
                f"recorded: {report_command(folder)}",
            )
        ]

    def _rank_files(self) -> dict[Path, list[str]]:
        """Names of the rank files that this job's ranks on this machine have written, by folder."""
        from ddpwatch.recording.part import Part

        found: dict[Path, list[str]] = {}
        directory = self._environment.get("DDPWATCH_RECORD_DIR")
        for path in sorted(Path(directory).glob("*/rank?????.mcap")) if directory else []:
            with contextlib.suppress(OSError, DdpwatchError):  # removed meanwhile, or no recording
                recent = path.stat().st_mtime > self._made - CLOCK_SLACK_S
                if recent and Part(path).metadata.get("launch") == self.name:
                    found.setdefault(path.parent, []).append(path.name)
        return found

    @contextlib.contextmanager
    def job(
        self, output: int | None, on_hangup: Callable[[], None] = lambda: None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Runs the job for as long as the block lasts, and passes signals on to it.

        Args:
            output: File descriptor that the job's output goes to; None for this terminal.
            on_hangup: Called after SIGHUP was passed on.

        Yields:
            The job's process.

        Raises:
            UsageError: The command cannot be started.
        """
        with _signals_blocked() as (signals, mask):
            process, over = self._start(output, signals, mask), threading.Event()
            self._process = process
            relay = threading.Thread(target=self._relay, args=(process, signals, over, on_hangup), daemon=True)
            relay.start()
            with contextlib.suppress(DdpwatchError, OSError):  # none is as good
                rundir.live_runs()  # and what others have left is removed
            try:
                yield process
            finally:
                process.wait()  # even if the viewer has failed
                if self._ender is not None:
                    self._ender.join()
                with contextlib.suppress(DdpwatchError, OSError):  # the run directory is gone: the exit code counts
                    self._wait_for_collector()
                over.set()
                if relay.is_alive():
                    signal.pthread_kill(cast("int", relay.ident), min(signals))

    def _start(self, output: int | None, signals: set[signal.Signals], mask: set[int]) -> subprocess.Popen[bytes]:
        def restore_signals() -> None:
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
                preexec_fn=restore_signals,  # there is no other thread yet
            )
        except OSError as error:
            self.forget_startup()
            raise refusal(self._command[0], error) from error

    def _relay(
        self,
        process: subprocess.Popen[bytes],
        signals: set[signal.Signals],
        over: threading.Event,
        on_hangup: Callable[[], None],
    ) -> None:
        """Passes signals on to the job, except those that the terminal has sent it already.

        Ends with the first signal after it is over.
        """
        while signals:
            info = signal.sigwaitinfo(signals)  # CPython's `sigtimedwait` makes signals up after SIGSTOP
            if over.is_set():
                return
            from_kernel = info.si_code > 0  # that is, from the terminal: to all of its foreground process group
            to_all = from_kernel or info.si_pid == os.getpid()  # by `interrupt`
            if info.si_signo == signal.SIGINT and self._startup is not None:
                startup.note_interrupt(self._startup)
            if not (to_all and info.si_signo in KEYS):
                with contextlib.suppress(PermissionError):  # the job is another user's, by sudo
                    process.send_signal(info.si_signo)
            if info.si_signo in TERMINATING:
                self.terminated.set()
                if process.returncode is not None:
                    self._hurried.set()
            if info.si_signo == signal.SIGHUP:
                on_hangup()

    def _wait_for_collector(self) -> None:
        """Gives the collector time to close its recording. What it does after that, it does without us.

        A signal that would end the job ends the wait.
        """
        started, said = time.monotonic(), False
        while (open_runs := [info for info in self.runs() if not info.ended]) and not self._hurried.wait(0.02):
            waited_s, records = time.monotonic() - started, any(info.recording for info in open_runs)
            if waited_s > (CROWDED_S if records else END_GRACE_S):
                break
            if waited_s > END_GRACE_S and not said:
                said = True
                print("ddpwatch: the job is over; its recording is being closed (Ctrl-C: do not wait)", file=sys.stderr)


def why_unwatched() -> str:
    """Returns why a job that is started now runs unwatched; empty if nothing speaks against watching it."""
    if os.environ.get("DDPWATCH") == "0":
        return "DDPWATCH=0"
    try:
        rundir.directory()
    except DdpwatchError as error:
        return str(error)
    return ""


def run_unwatched(command: Sequence[str], why: str) -> NoReturn:
    """Replaces this process by the command.

    Args:
        command: The job's command line.
        why: What is said about it.

    Raises:
        UsageError: It cannot be started.
    """
    require_command(command)
    print(f"ddpwatch: {why}: the command runs unwatched", file=sys.stderr, flush=True)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and the command would inherit that
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise refusal(command[0], error) from error


def run_headless(
    launch: Launch, budget_ppm: int = 0, alerts: contextlib.AbstractContextManager[None] | None = None
) -> int:
    """Runs the job in this terminal, with a line about it on stderr every few seconds, and within ``alerts``."""
    with launch.job(None) as process, alerts or contextlib.nullcontext():
        begun, over = threading.Event(), threading.Event()
        narrator = threading.Thread(target=_narrate, args=(launch, begun, over, budget_ppm), daemon=True)
        narrator.start()
        code = _exit_code(process)
        over.set()
        launch.wait_for(begun, CROWDED_S)
        narrator.join(END_GRACE_S)
    launch.forget_startup()
    return code


def _narrate(launch: Launch, begun: threading.Event, over: threading.Event, budget_ppm: int) -> None:
    """Prints lines about the job, from when it has started on, and lets it go first."""
    lower_thread()
    try:
        from ddpwatch.viewer.plain import narrate_runs  # the job does not wait for imports
    finally:
        begun.set()
    narrate_runs(launch.runs, over, launch.without_run, launch.why, budget_ppm)


def run_with_dashboard(
    launch: Launch, budget_ppm: int = 0, alerts: contextlib.AbstractContextManager[None] | None = None
) -> int:
    """Runs the job with its output aside and the dashboard in this terminal; then shows the end of the output.

    ``alerts`` is entered meanwhile.
    """
    from ddpwatch.job.job_output import OutputPipe

    try:
        output = OutputPipe(launch.name)
    except DdpwatchError as error:  # no memory, no pipe or no home for it
        print(f"ddpwatch: no dashboard: {error}", file=sys.stderr)
        return run_headless(launch, budget_ppm, alerts)
    with launch.job(output.pipe, _leave_dead_terminal) as process, alerts or contextlib.nullcontext():
        output.start_copy()
        from ddpwatch.tui.app import run_dashboard
        from ddpwatch.tui.feed import AttachSpec
        from ddpwatch.viewer.live_source import LiveSource  # the job does not wait for imports

        def runs() -> list[RunInfo]:
            found = launch.runs()
            if not found and process.poll() is not None and (not watched or launch.terminated.is_set()):
                raise JobOverError("the job is over, and there is nothing to watch or nobody to watch it")
            watched.extend(found[:1])
            return found

        watched: list[RunInfo] = []
        left = ""
        try:
            spec = partial(
                AttachSpec, job=launch.command, output=output.buffer, interrupt=launch.interrupt, why=launch.why
            )
            left = run_dashboard(spec(list_runs=runs, open_source=partial(LiveSource, budget_ppm=budget_ppm)))
        except JobOverError:
            pass
        except DdpwatchError as error:  # for example, the settings cannot be read
            print(f"ddpwatch: no dashboard: {error}", file=sys.stderr)
        over = False
        with contextlib.suppress(DdpwatchError, OSError):
            over = bool(watched) and not launch.runs()
        state = "the run is over, its command is not" if over else "the job goes on"
        again = f"; ddpwatch attach {left}, in another terminal, shows it again" if left and not over else ""
        code = _show_output(process, output, f"{state}; Ctrl-C ends it{again}")
    for text in [*output.notes(), *(launch.recorded() if watched else launch.without_run())]:
        print(f"ddpwatch: {text}", file=sys.stderr)
    launch.forget_startup()
    for text in [*launch.verdicts(), *launch.recordings()]:
        print(f"ddpwatch: {text}", file=sys.stderr)
    return code


def _leave_dead_terminal() -> None:
    """Exits if the terminal is gone: a dashboard would go on reading it, and nobody waits for the job."""
    if not sys.stdin.isatty():
        os._exit(128 + signal.SIGHUP)


def _show_output(process: subprocess.Popen[bytes], output: OutputPipe, state: str) -> int:
    """Prints the newest lines of the job's output, its state, and what it still prints; returns its exit code."""
    if over := process.poll() is not None:
        output.wait(END_GRACE_S)
    start, block = output.buffer.newest(0)
    sys.stdout.buffer.writelines(io.BytesIO(block).readlines()[-20:])
    offset = _print_from(output.buffer, start + len(block))
    if not over:
        print(f"ddpwatch: {state}", file=sys.stderr)
        while process.poll() is None:
            offset = _print_from(output.buffer, offset)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(OUTPUT_POLL_S)
        output.wait(END_GRACE_S)
        _print_from(output.buffer, offset)
    return _exit_code(process)


def _print_from(buffer: OutputBuffer, offset: int) -> int:
    """Prints the output from an offset on; the offset of its end."""
    while True:
        start, block = buffer.read(offset)
        if start > offset:
            print(f"ddpwatch: {start - offset} bytes are left out here", file=sys.stderr)
        if not block:
            sys.stdout.flush()
            return start
        sys.stdout.buffer.write(block)
        offset = start + len(block)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Waits for the job; its exit code as a shell reports it."""
    code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_blocked() -> Iterator[tuple[set[signal.Signals], set[int]]]:
    """Blocks the signals that are meant for the job, in this thread and the threads that it starts.

    A handler could not pass on a signal that comes before the job has started. Nor could it distinguish Ctrl-C at the
    terminal, which reaches the job directly, from ``kill -INT``. A signal that is ignored (``nohup``) stays ignored,
    also in the job.

    Yields:
        These signals, and the previous mask.
    """
    signals = {number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}
    mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, signals)}
    try:
        yield signals, mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _with_bootstrap() -> str:
    existing = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(BOOTSTRAP), *([existing] if existing else [])])
