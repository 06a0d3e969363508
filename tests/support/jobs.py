"""Real jobs in child processes, and handshakes with them. No sleeping: everything waits for something it can see."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

import msgspec
import psutil
import pytest

from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire.messages import Message
from ddpwatch.wire.transport import Frame
from tests.support.fork_server import COMMAND, ROOT, Launcher, Request
from tests.support.forked_job import ENDS

SCRIPTS = ROOT / "tests" / "integration" / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
DDPWATCH = [sys.executable, "-c", "from ddpwatch.cli import main; main()"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
PATIENCE_S = 240.0
CLOSING_S = 30.0  # for the end of a recording, which comes after that of the job
JOB = "DDPWATCH_TEST_JOB"  # in a job's environment, and so in its collectors'
PROBE_IMPORTS = ("ddpwatch.probe.watch", "trainer.cli")  # what most jobs preload
# What those that compile preload: slow to import, so once for all ranks. Unwatched twins import nothing of ddpwatch.
COMPILERS = (
    "torch._inductor.compile_fx", "torch._dynamo.backends.common", "torch.distributed.checkpoint",
    "torch.distributed.tensor.experimental", "torch.utils.cpp_extension", "_pytest.raises", "_pytest.recwarn",
)  # fmt: skip
SMALL_GPT = ("--model", "gpt:width=64,layers=2,heads=2", "--bucket-cap-mb", "0.1")  # a step takes some milliseconds
Frames = list[Frame]
First = TypeVar("First")
Second = TypeVar("Second")


class Job:
    """A job of several ranks. Use as a context manager: whatever is left of it at the end is killed.

    The ranks are forked by the fork server, which takes a fraction of a second. See `Request` for the arguments.
    """

    def __init__(
        self,
        script: Path | str,
        *arguments: str,
        log: Path,
        ranks: int = 2,
        preload: Sequence[str] = PROBE_IMPORTS,
        streams: Path | None = None,
        tears_down: bool = False,
        **environment: str,
    ) -> None:
        self.log = log
        self._name = uuid.uuid4().hex
        environment = {**os.environ, **ENVIRONMENT, **environment, JOB: self._name}
        folder = None if streams is None else str(streams)
        request = Request(str(script), arguments, ranks, environment, preload, folder, tears_down)
        self.process = Launcher(request, log)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_everything()

    def wait(self) -> int:
        """Waits for the end, and for the collectors to close their recordings; the exit code."""
        code = self.process.wait(PATIENCE_S)
        await_recordings(self._name)
        return code

    def output(self) -> str:
        """What the job has printed so far."""
        return self.log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """The training processes, rank 0 first."""
        return [psutil.Process(pid) for pid in self.process.ranks]

    def kill_everything(self) -> None:
        """``kill -9`` of the launcher and all ranks at once."""
        kill(family(self.process.pid))
        self.process.wait()


def family(pid: int) -> list[psutil.Process]:
    """A process and those that it has started. Not the collector: it leads a session of its own on purpose."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *[child for child in parent.children(recursive=True) if not is_collector(child)]]
    return []


def await_recordings(job: str) -> None:
    """Waits for the collectors that a job's ranks have started to close their recordings."""
    collectors, deadline = collectors_of(job), time.monotonic() + CLOSING_S
    while not all(map(has_closed_its_recording, collectors)) and time.monotonic() < deadline:
        time.sleep(0.02)


def collectors_of(job: str) -> list[psutil.Process]:
    """The collectors that a job's ranks have started."""
    found = []
    for pid in pids_with("environ", f"{JOB}={job}"):
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_collector(process := psutil.Process(pid)):
                found.append(process)
    return found


def has_closed_its_recording(collector: psutil.Process) -> bool:
    """Whether the collector says that the run has ended, or will not: it goes on a little for viewers."""
    with contextlib.suppress(OSError, LookupError, ValueError, psutil.Error):  # not yet, or not any more
        if collector.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            return True
        words = collector.cmdline()
        run_id = words[words.index("--run-id") + 1]
        info = Path(collector.environ()["DDPWATCH_DIR"], f"{run_id}.json").read_bytes()
        return msgspec.json.decode(info, type=rundir.RunInfo).ended
    return not collector.is_running()


def is_collector(process: psutil.Process) -> bool:
    """Whether the process is a collector, as far as it is still there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("ddpwatch.collector" in word for word in process.cmdline())
    return False


def kill(processes: list[psutil.Process]) -> None:
    """``kill -9`` of those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def finished(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that has run to its end, with its output."""
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


def together(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """The results of two calls that mostly wait, made at the same time."""
    with ThreadPoolExecutor(1) as beside:
        other = beside.submit(second)
        return first(), other.result()


@contextlib.contextmanager
def running(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command with pipes to it. It and its children are killed at the end."""
    with subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            kill(family(process.pid))


def forked_command(
    ranks: int,
    streams: Path | None,
    script: Path | str,
    *arguments: str,
    preload: Sequence[str] = (),
    tears_down: bool = False,
) -> list[str]:
    """The command that launches a forked job (see `Request`); needs the fork server's address in its environment."""
    about = (str(ranks), str(streams or "-"), ",".join(preload), ENDS[tears_down])
    return [sys.executable, "-m", "tests.support.forked_job", *about, str(script), *arguments]


def ddpwatch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The ``ddpwatch`` command, run to its end. It is forked: its imports take longer than what it mostly does."""
    name = uuid.uuid4().hex
    about = {**os.environ, "OMP_NUM_THREADS": "1", **environment, JOB: name}
    request = Request("ddpwatch", arguments, 0, about, COMMAND, tears_down=False)
    with (
        open(os.devnull) as nothing,
        TemporaryFile("w+", errors="surrogateescape") as out,
        TemporaryFile("w+", errors="surrogateescape") as err,
    ):
        command = Launcher(request, streams=[file.fileno() for file in (nothing, out, err)])
        try:
            code = command.wait(2 * PATIENCE_S)
        except subprocess.TimeoutExpired:
            kill(family(command.pid))
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(["ddpwatch", *arguments], code, out.read(), err.read())


def require(modules: Iterable[str]) -> None:
    """Skips a test for a framework that is not installed: not each comes for every version of torch and Python."""
    for package in (module.partition(".")[0] for module in modules):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Waits until a condition of another process holds; fails by name if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.05)  # between two looks, not instead of one


def the_run(job: Job | None = None, suffix: str = "") -> rundir.RunInfo:
    """The one run in the rendezvous directory whose id ends so, once it is there."""
    found: list[rundir.RunInfo] = []

    def there() -> bool:
        if job is not None and job.process.poll() not in (None, 0):
            raise AssertionError(job.output())
        found[:] = [info for info in rundir.live_runs() if info.run_id.endswith(suffix)]
        return bool(found)

    wait_for(there, "a run appears in the rendezvous directory")
    return found[0]


@contextlib.contextmanager
def live(info: rundir.RunInfo, budget_ppm: int = 0) -> Iterator[LiveSource]:
    """A viewer of the run; somebody looks at it if it asks for a budget."""
    source = LiveSource(info.publish, budget_ppm)
    try:
        yield source
    finally:
        source.close()


def read_until(source: LiveSource, enough: Callable[[Frames], object], what: str) -> Frames:
    """All frames up to the moment that satisfies the caller."""
    frames: Frames = []
    deadline = time.monotonic() + PATIENCE_S
    while not enough(frames):
        if time.monotonic() > deadline:
            raise AssertionError(f"never seen: {what}; saw {len(frames)} frames")
        frames += source.read(0.1)
        time.sleep(0.02)  # between two looks at all frames, which come one by one
    return frames


def messages(frames: Frames, kind: type[Message]) -> list[Message]:
    """The messages of one type."""
    return [message for message, _ in frames if isinstance(message, kind)]


def collector_pids(run_id: str) -> list[int]:
    """Collector processes of a run that are alive."""
    return pids_with("cmdline", run_id)


def pids_with(what: str, word: str) -> list[int]:
    """Processes that have a word in a list of /proc: tests ask again and again, and psutil takes four times as long."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - a quarter of the time
        with contextlib.suppress(OSError), open(f"/proc/{name}/{what}", "rb") as line:
            if word.encode() in line.read().split(b"\0"):
                found.append(int(name))
    return found
