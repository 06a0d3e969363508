"""The collector as the rank that starts it sees it: a process that is started again if it dies.

The rank keeps its orders, and gives them to the next collector: keys are nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from ddpwatch.errors import DdpwatchError
from ddpwatch.run import rundir
from ddpwatch.run.subprocesses import module_command
from ddpwatch.wire.control import Admit, ControlSocket, Listen, Listening, Order, Ready, Report, Unreachable

RESTARTS = 3  # of one run; after that, it would only die again
READY_TIMEOUT_S = 60.0
START_WAIT_S = 0.5  # for the process to start; on a slow disk, its caller goes on without it
LOCAL_ONLY = "the ranks of this host are shown on this host only"
_log = logging.getLogger("ddpwatch")
_left: list[subprocess.Popen[bytes]] = []  # collectors of earlier sessions


class CollectorProcess:
    """Starts the collector of a run, detached, so that a signal to the job's process group spares it.

    This process and the collector hold the claim on the run together (`rundir.claim`), so the run stays live while the
    collector is started again. Not thread-safe.

    Args:
        run_id: Id of the run.
        world_size: How many ranks the job has.
        record: Where it writes a recording, or None.
        node: The name of this node, if the collector is another node's agent.

    Attributes:
        endpoint: Where the collector receives frames.
        listening: The root's answer to `Listen`; None while there is none.

    Raises:
        FileExistsError: The run has a collector on this node.
        DdpwatchError: The run directory cannot be used.
        OSError: The process cannot be started.
    """

    def __init__(self, run_id: str, world_size: int, record: Path | None, node: str = "") -> None:
        self.endpoint, _ = rundir.endpoints(run_id)
        self._run_id = run_id
        self._log_file = rundir.log(run_id)
        self._claim = rundir.claim(run_id)
        self._arguments = ["--run-id", run_id, "--world-size", str(world_size), "--watch-pid", str(os.getpid())]
        self._arguments += [f"--script={rundir.script_name(sys.argv[0])}"]
        if record is not None:
            self._arguments += ["--record", str(record)]
        if node:
            self._arguments += ["--node", node]
        self.listening: Listening | None = None
        self._standing: dict[tuple[type[Order], str], Order] = {}
        self._control: ControlSocket | None = None
        self._process: subprocess.Popen[bytes] | None = None  # None while it starts
        self._start_error: Exception | None = None
        self._restarts = 0
        self._is_ready = self._is_over = self._is_left = False
        self._deadline_s = 0.0
        self._start()

    def is_ready(self) -> bool:
        """Returns whether the collector takes frames. Starts it again if it has died. Never waits.

        A collector that exits cleanly has done its work, or was asked to end, and is left alone.

        Raises:
            DdpwatchError: It has died too often.
            OSError: The process cannot be started.
        """
        if self._is_over:
            return True
        self._check_start()
        if self._process is None:
            return False
        code = self._process.poll()
        self._read_reports()
        if code is None:
            if not self._is_ready and time.monotonic() > self._deadline_s:
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._is_ready
        if code == 0 and self._is_ready:
            self._is_over = True
            return True
        self._start_again(code)
        return False

    def order(self, order: Order) -> None:
        """Sends an order to this collector, and to those that follow it: the newest of its kind (and node)."""
        self._standing[type(order), order.node if isinstance(order, Admit) else ""] = order
        if self._control is not None:
            self._control.send(order)

    def leave(self) -> None:
        """Leaves the collector to itself: it ends once all ranks have. A forked child must not keep the run alive."""
        self._is_left = True
        _leave(self._process)
        self._release()

    def cancel(self) -> None:
        """Ends the collector of a run that is not to be after all. Nothing stays of it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.leave()
        self._abandon()
        self._log_file.unlink(missing_ok=True)

    # -- inside ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        _reap()
        try:
            mine, its = socket.socketpair()
            claim = os.dup(self._claim)  # the thread's own: this one may be closed meanwhile
        except OSError:
            self._abandon()
            raise
        self._control = ControlSocket(mine)
        for order in self._standing.values():
            self._control.send(order)
        self._process, self._is_ready = None, False
        self._deadline_s = time.monotonic() + READY_TIMEOUT_S
        starter = threading.Thread(target=self._spawn, args=(its, claim), name="ddpwatch-start", daemon=True)
        starter.start()
        starter.join(START_WAIT_S)
        self._check_start()

    def _spawn(self, control: socket.socket, claim: int) -> None:
        """Starts the process, on a thread of its own: a slow disk holds it up, and so does a fork at that moment."""
        shared = ["--claim", str(claim), "--control", str(control.fileno()), "--restarts", str(self._restarts)]
        try:
            with open(self._log_file, "ab") as log:
                self._process = subprocess.Popen(
                    # A worker of Ray kills its children when it ends, not theirs.
                    module_command("ddpwatch.collector", *self._arguments, *shared, is_grandchild="ray" in sys.modules),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(claim, control.fileno()),
                )
        except Exception as error:
            self._start_error = error
        finally:
            control.close()
            os.close(claim)
        if self._is_left:
            _leave(self._process)

    def _check_start(self) -> None:
        if (error := self._start_error) is not None:
            self._start_error = None
            self._abandon()
            raise error

    def _start_again(self, code: int) -> None:
        what = f"{'died' if self._is_ready else 'did not start'}: {self._cause(code)}"
        if self._restarts == RESTARTS:
            self._abandon()
            raise DdpwatchError(f"the collector {what}", f"its log is {self._log_file}")
        if self._is_ready:
            _log.warning("ddpwatch restarts its collector (%d of %d): it %s", self._restarts + 1, RESTARTS, what)
        self._hang_up()
        self._restarts += 1
        self._start()

    def _cause(self, code: int) -> str:
        """Returns why it ended: the signal, or the last line of its log."""
        if code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        with contextlib.suppress(OSError, IndexError):
            return self._log_file.read_text(errors="replace").splitlines()[-1][:500]
        return f"exit code {code}"

    def _read_reports(self) -> None:
        if self._control is not None and self._control.fileno() >= 0:
            self._control.send()
            for report in self._control.receive():
                self._note(report)

    def _note(self, report: Order | Report) -> None:
        if isinstance(report, Ready):
            self._is_ready = True
        elif isinstance(report, Unreachable):
            _log.warning("ddpwatch cannot reach rank 0's collector at %.100r: %s", report.endpoint, LOCAL_ONLY)
        elif isinstance(report, Listening):
            self.listening = report
            before = self._standing.get((Listen, ""))
            if report.endpoint and isinstance(before, Listen):  # the next one listens there as well
                self._standing[Listen, ""] = Listen(before.keys, report.endpoint)

    def _abandon(self) -> None:
        """Removes what the run has left; its log stays."""
        self._is_over = True
        with contextlib.suppress(DdpwatchError):
            rundir.remove(self._run_id)
        self._release()

    def _release(self) -> None:
        self._hang_up()
        claim, self._claim = self._claim, -1
        if claim >= 0:
            os.close(claim)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()


def _leave(process: subprocess.Popen[bytes] | None) -> None:
    """Leaves a process to itself: it outlives this one on purpose, so no warning about that."""
    if process is not None:
        process.returncode = 0
        _left.append(process)


def _reap() -> None:
    """Takes note of the collectors of earlier sessions that have ended: they would stay as zombies."""
    for process in list(_left):
        process.returncode = None
        if process.poll() is None:
            process.returncode = 0
        else:
            _left.remove(process)
