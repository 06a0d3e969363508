"""A process that has imported torch once, and forks the ranks of one job after another.

torchrun imports torch, and so does each of its ranks: 10 s of processor time before a job of two ranks does anything.
Where a test is not about torchrun itself, its job starts here: the launcher below sets what torchrun sets in the
ranks' environment, waits for them, and ends all of them when one fails.

A request comes on a connection of its own, with the descriptors of the job's stdin, stdout and stderr. On the same
connection the launcher sends the pids of its ranks and at last its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "FORK_SERVER"  # names the server's socket to the workers of pytest-xdist
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.optim")
TORCHRUN_IMPORTS = ("torch.distributed.launcher.api",)
COLLECTOR = ("ddpwatch.collector.service", "ddpwatch.analysis.attachments")
# What the workers of pytest-xdist need. Not what belongs to a plugin: that must be imported after pytest.
TESTS = (
    "trainer.cli", "ddpwatch.probe.watch", "ddpwatch.collector.service", "ddpwatch.report.files", "ddpwatch.tui.app",
    "ddpwatch.cli", "ddpwatch.launch", "ddpwatch.export.writers", "demo.compare", "tests.support.diagnosis_cases",
    "tests.support.synthetic", "textual.pilot", "typer.testing", "torch.distributed.checkpoint", "mcp_types",
)  # fmt: skip
COMMAND = ("ddpwatch.cli", "ddpwatch.launch", "ddpwatch.viewer.plain", "ddpwatch.report.files")
FRAMEWORKS = ("lightning", "accelerate.commands.launch", "transformers.trainer")  # what tests of frameworks preload
RAY = (
    "tests.support.ray_imports", "ray.autoscaler.v2.monitor", "tensorboardX", "pydantic", "pandas", "pyarrow.dataset",
    "pyarrow.fs", "pyarrow.parquet", "requests",
)  # fmt: skip
EXECUTABLE = "FORKED_EXECUTABLE"  # names what a forked rank starts when it starts Python, if not that


class Request(NamedTuple):
    """A job to start.

    Attributes:
        script: Its path; or a module, as for ``python -m``.
        ranks: How many; 0 for one process that is no rank, as ``python SCRIPT`` would start it.
        preload: Modules that no rank has to import. Jobs that preload the same ones share the import.
        streams: A directory for ``RANK/stdout.log`` and ``RANK/stderr.log``, in place of one output for all ranks.
        tears_down: Whether a rank takes its interpreter apart, unless an exception ends it. That takes 0.2 s of
            processor time with torch.
    """

    script: str
    arguments: Sequence[str]
    ranks: int
    environment: dict[str, str]
    preload: Sequence[str] = ()
    streams: str | None = None
    tears_down: bool = True


# -- in the test processes ---------------------------------------------------------------------------------------


class ForkServer:
    """The server process, and the socket on which it takes jobs. It ends with this process at the latest."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="dw-")
        self.address = f"{self._folder}/jobs"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(64)
        self._life, self._closed = os.pipe()
        self._starter = threading.Thread(target=self._start_with_the_first_job, daemon=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> ForkServer:
        """Starts the process, which ends when nobody holds the other end of its standard input any more."""
        command = [sys.executable, "-m", "tests.support.fork_server", str(self._listener.fileno())]
        # No PYTHONPATH: torch names its files in warnings after the first entry of sys.path that they lie below.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # Or each rank that compiles tries out, in processes of its own, what the compiler can do.
        environment["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # a fork copies fewer entries of the page table
        # Ray reads these when it is imported, and finds there what is known before: a new cluster's first job.
        environment |= {"RAY_AUTH_MODE": "disabled", "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(os.getpid())}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=self._life, pass_fds=[self._listener.fileno()]
        )
        self._listener.close()  # so that a job is refused if the process dies
        return self

    def start_for_workers(self) -> None:
        """Lets the workers of pytest-xdist share this server; it starts with the first job of any of them."""
        os.environ[ADDRESS] = self.address
        self._starter.start()

    def _start_with_the_first_job(self) -> None:
        if self._life not in select.select([self._listener, self._life], [], [])[0]:
            self.start()

    def close(self) -> None:
        """Ends the server."""
        os.close(self._closed)
        if self._starter.ident is not None:
            self._starter.join()
        if self._process is not None:
            self._process.wait()
        self._listener.close()
        shutil.rmtree(self._folder)


@cache
def the_server() -> ForkServer:
    """The server of this test process alone, started when the first job needs it."""
    return ForkServer().start()


def close_the_server() -> None:
    """Ends the server of this test process if there is one."""
    if the_server.cache_info().currsize:
        the_server().close()
        the_server.cache_clear()


def server_address() -> str:
    """Where jobs are asked for; starts this process's own server if there is no other."""
    return os.environ.get(ADDRESS) or the_server().address


def requested(job: Request, log: Path | None, streams: Sequence[int] = (0, 1, 2)) -> socket.socket:
    """Asks for a job that writes to a file, or else has these streams; reports come on the connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server_address())
    with open(os.devnull, "rb") as nothing, contextlib.nullcontext() if log is None else log.open("wb") as output:
        if output is not None:
            streams = [nothing.fileno(), output.fileno(), output.fileno()]
        socket.send_fds(connection, [json.dumps(job._asdict()).encode()], streams)
    return connection


def heed_signals() -> None:
    """Lets this process, and what it starts, heed signals that it was started to ignore: by nohup, or by ``&``."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


STARTED: Counter[str] = Counter()


class Launcher:
    """What launches a forked job, with the interface of a ``subprocess.Popen``.

    Attributes:
        pid: Of the launcher.
        ranks: The pids of its ranks.
        returncode: None while it runs; negative where a signal ended it.
    """

    def __init__(self, job: Request, log: Path | None = None, streams: Sequence[int] = (0, 1, 2)) -> None:
        self.returncode: int | None = None
        STARTED.update(forked=1, forked_ranks=job.ranks)
        self._connection = requested(job, log, streams)
        report = self._connection.recv(1 << 16)
        assert report, f"the job did not start: {log and log.read_text()}"
        self.pid, *self.ranks = json.loads(report)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"launcher {self.pid}", timeout or 0.0)
            self.returncode = int(self._connection.recv(16) or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """A signal to the ranks, not to the launcher, unless they have ended."""
        for pid in self.ranks if self.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


# -- in the server -----------------------------------------------------------------------------------------------


INHERITED: list[weakref.finalize[Any, Any]] = []  # finalizers that were there before the fork


def serve(listener: socket.socket) -> Request | None:
    """Passes each request to the process that has imported what it preloads; forks that for the first of its kind.

    Returns in every rank, with its job; in the server when the tests are over.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits here: each launcher reports for itself
    importers: dict[tuple[str, ...], socket.socket] = {}
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        raw, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
        modules = tuple(json.loads(raw)["preload"])
        if modules not in importers:
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                for inherited in (listener, connection, ours, *importers.values()):
                    inherited.close()
                for stream in streams:
                    os.close(stream)
                return fork_launchers(its, modules)
            its.close()
            importers[modules] = ours
        with contextlib.suppress(BrokenPipeError):  # it could not import them, and the job does not start
            socket.send_fds(importers[modules], [raw], [connection.fileno(), *streams])
        connection.close()
        for stream in streams:
            os.close(stream)
    return None


def fork_launchers(requests: socket.socket, modules: Sequence[str]) -> Request:
    """Imports the modules, then forks a launcher for each request. Returns in every rank, with its job."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()  # a rank's collector has nothing to look for in there
    INHERITED.extend(weakref.finalize._registry)  # type: ignore[attr-defined]
    while True:
        raw, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 4)
        if not raw:  # the server has gone
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            connection, *streams = descriptors
            return launch(Request(**json.loads(raw)), socket.socket(fileno=connection), streams)
        for descriptor in descriptors:
            os.close(descriptor)


def launch(job: Request, connection: socket.socket, streams: Sequence[int]) -> Request:
    """Forks the ranks and waits for them. Returns in the ranks only."""
    os.setsid()
    heed_signals()  # the server may be out of Ctrl-C's reach
    for descriptor, source in enumerate(streams):
        os.dup2(source, descriptor)
        os.close(source)
    os.environ.clear()
    os.environ.update(job.environment)
    port_out, port_in = os.pipe()
    pids: list[int] = []
    for rank in range(max(job.ranks, 1)):
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(port_in)
            become(rank, job, port_out)
            return job
        pids.append(pid)
    store = agent_store() if job.ranks else None  # only now: it starts a thread, and a fork would not copy that
    os.write(port_in, b"%5d" % (store.port if store else 0) * len(pids))
    connection.send(json.dumps([os.getpid(), *pids]).encode())
    connection.send(b"%d" % wait(pids))
    os._exit(0)


def agent_store() -> Any:
    """The store at which the ranks meet; torchrun's agent has one as well."""
    import torch.distributed as dist

    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def wait(pids: list[int]) -> int:
    """Waits for all ranks, and ends the others once one has failed; the exit code of the first that failed."""
    code, left = 0, set(pids)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in left:
                os.kill(other, signal.SIGTERM)
    return code


def keep_groups() -> None:
    """Lets process groups live as long as the rank.

    A model that outlives ``destroy_process_group`` is the last to hold its group, and destroys it with the GIL held. As
    that waits for Gloo's thread, which may be waiting for the GIL, torch 2.13 hangs now and then: a forked rank, with
    nothing left to do after its script, in one job of five.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    destroy, kept = dist.destroy_process_group, []

    def keep_and_destroy(*arguments: Any, **named: Any) -> None:
        kept.extend(distributed_c10d._world.pg_map)
        destroy(*arguments, **named)

    dist.destroy_process_group = distributed_c10d.destroy_process_group = keep_and_destroy


def become(rank: int, job: Request, port: int) -> None:
    """Makes this process the rank that torchrun would start."""
    address = os.read(port, 5).decode().strip()
    os.close(port)
    if job.ranks:
        os.environ.update({
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.ranks),
            "LOCAL_WORLD_SIZE": str(job.ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": address,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        })  # fmt: skip
        os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(Path(job.script).stem[:15])  # what top shows
    if job.streams is not None:
        (folder := Path(job.streams) / str(rank)).mkdir(parents=True)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            with (folder / f"{name}.log").open("wb") as log:
                os.dup2(log.fileno(), descriptor)
    keep_groups()
    if "triton._C.libtriton" in sys.modules:  # which counts at the end what is left, and says so
        atexit.register(gc.unfreeze)
    sys.executable = os.environ.get(EXECUTABLE, sys.executable)
    sys.argv = [job.script, *job.arguments]
    sys.path[0] = str(Path(job.script).parent)
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(Path(entry, "sitecustomize.py").is_file() for entry in added):  # `ddpwatch run` has put it there
        sys.path[1:1] = added
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def main() -> None:
    """Serves; a rank comes back from there, runs its script and ends as a process does."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOADED:
        importlib.import_module(module)
    job = serve(listener)
    if job is None:
        return
    code = 0
    try:
        if job.script.endswith(".py"):
            runpy.run_path(job.script, run_name="__main__")
        else:
            runpy.run_module(job.script, run_name="__main__", alter_sys=True)
    except SystemExit as asked:
        code = asked.code or 0
        if not isinstance(code, int) or (code and job.tears_down):
            raise
    if not job.tears_down:
        end(code)


def end(code: int) -> None:
    """Ends this process as Python does, up to where it would free all modules.

    What the importer has imported is not taken out of torch's registries: that touches 35 MB, which takes 40 ms.
    """
    for finalizer in INHERITED:
        finalizer.atexit = False
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
