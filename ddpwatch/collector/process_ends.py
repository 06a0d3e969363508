"""Notices at once when a local rank's process ends, and how, without being its parent; and counts connections."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import zmq

from ddpwatch.run import clock
from ddpwatch.wire.messages import Bye, EndReason, Hello
from ddpwatch.wire.transport import ConnectionMonitor, Socket

_NOBODY = 0  # no process has this pid
_SILENTLY = " without saying goodbye"
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


@dataclass(frozen=True, slots=True)
class Departure:
    """How a process ended. ``at_ns`` is when that was noticed, on the collector's clock."""

    reason: EndReason
    detail: str
    signal: int | None
    at_ns: int


class ProcessLiveness:
    """Follows processes through pidfds (Linux), or by asking whether the pid exists.

    Until its parent reaps an ended process, /proc still shows its signal or exit code; torchrun reaps ten times a
    second. Ranks whose processes cannot be seen from here, in another pid namespace, are not followed: the collector
    judges by their connections and their heartbeats.

    Args:
        poller: Polls the pidfds, together with the sockets of its owner.

    Attributes:
        fds: The rank of each pidfd; a pidfd turns readable when its process ends.
    """

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._pids: dict[int, int] = {}
        self._leaving: dict[int, Bye] = {}  # of ranks that say they have finished: an exit handler knows no exit code
        self.fds: dict[int, int] = {}

    def follow(self, hello: Hello) -> None:
        """Starts to follow a rank's process, instead of the one before, if its pid means anything here."""
        rank, pid = hello.rank, hello.pid
        self.forget(rank)
        if hello.boot_id != clock.boot_id() or hello.pid_ns != clock.pid_namespace():
            return
        fd = _pidfd(pid)
        if fd is not None and hello.start_ticks in (0, clock.start_ticks(pid)):
            self.fds[fd] = rank
            self._poller.register(fd, zmq.POLLIN)
        elif fd is not None:  # the pid has gone to another process
            os.close(fd)
            pid = _NOBODY
        self._pids[rank] = pid

    def is_followed(self, rank: int) -> bool:
        """Returns whether the end of this rank's process will be noticed."""
        return rank in self._pids

    def is_leaving(self) -> bool:
        """Returns whether the exit code of a rank that says it has finished is still to come."""
        return bool(self._leaving)

    def pids(self) -> dict[int, int]:
        """Returns the processes of ranks that have not said goodbye, by rank. Any thread may ask."""
        return {rank: pid for rank, pid in self._pids.copy().items() if rank not in self._leaving}

    def take_goodbye(self, rank: int, goodbye: Bye) -> None:
        """Follows the rank only as long as its exit code may say something else."""
        if goodbye.exits and goodbye.reason == "finished" and rank in self.fds.values():
            self._leaving[rank] = goodbye
        else:
            self.forget(rank)

    def forget(self, rank: int) -> None:
        """Stops following a rank."""
        self._pids.pop(rank, None)
        self._leaving.pop(rank, None)
        for fd in [fd for fd, owner in self.fds.items() if owner == rank]:
            self._poller.unregister(fd)
            del self.fds[fd]
            os.close(fd)

    def departures(self, readable: Container[object]) -> dict[int, Departure]:
        """Returns the ranks whose processes have ended without a goodbye so far; they are not followed any longer.

        Args:
            readable: The readable ones of `fds`. A rank without a pidfd is looked up by its pid.
        """
        return {rank: _departure(status) for rank, status in self._ended(readable, self.pids())}

    def corrections(self, readable: Container[object]) -> list[Bye]:
        """Returns the goodbyes of ranks that said they had finished, corrected where the exit code says otherwise.

        Args:
            readable: As for `departures`.
        """
        said = self._leaving.copy()
        ended = self._ended(readable, said)
        return [found for rank, status in ended if (found := corrected(said[rank], _departure(status))) is not None]

    def _ended(self, readable: Container[object], ranks: Container[int]) -> Iterator[tuple[int, int | None]]:
        """Yields those of the ranks whose processes have ended, with their wait status, and forgets them."""
        running = {rank for fd, rank in self.fds.items() if fd not in readable}
        for rank, pid in [entry for entry in self._pids.items() if entry[0] in ranks and entry[0] not in running]:
            state, status = _proc_state(pid)
            if state in ("", "Z", "X"):
                self.forget(rank)
                yield rank, status if state else None

    def close(self) -> None:
        """Closes all pidfds."""
        for rank in list(self._pids):
            self.forget(rank)


class Connections:
    """Counts the open connections to a socket.

    Args:
        socket: Not yet bound.
    """

    def __init__(self, socket: Socket) -> None:
        self._monitor = ConnectionMonitor(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._open = 0

    def count(self) -> int:
        """Returns how many are open now."""
        for event in self._monitor.events():
            self._open += 1 if event == zmq.EVENT_ACCEPTED else -1
        return self._open

    def close(self) -> None:
        """Closes it. Call it before the socket is closed."""
        self._monitor.close()


def _pidfd(pid: int) -> int | None:
    """Returns a file descriptor of the process.

    None if there is none, or no pidfds. `departures` then looks up the pid.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


def _departure(status: int | None) -> Departure:
    """Interprets the wait status of an ended process; None means unknown."""
    now_ns = time.monotonic_ns()
    if status is None:
        return Departure("lost", "its process is gone, how is not known", None, now_ns)
    if number := status & 0x7F:
        name = str(number)
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
        return Departure("killed", name, number, now_ns)
    code = status >> 8
    return Departure("lost" if code else "finished", f"exited with code {code}{_SILENTLY}", None, now_ns)


def corrected(goodbye: Bye, departure: Departure) -> Bye | None:
    """Returns the goodbye of a rank that said it had finished, if its process failed on its way out; else None.

    It failed with an exit code, or crashed. Other signals are the launcher's, which ends what is left.
    """
    crashed = departure.signal in _CRASHES
    code = departure.detail.removesuffix(_SILENTLY)
    failed = crashed or (departure.reason == "lost" and code != departure.detail)
    if not (failed and goodbye.exits and goodbye.reason == "finished"):
        return None
    detail = "; ".join(filter(None, (code, goodbye.detail)))
    about = {"reason": departure.reason, "detail": detail, "signal": departure.signal}
    return msgspec.structs.replace(goodbye, by="collector", **about)


def _proc_state(pid: int) -> tuple[str, int | None]:
    """Returns the state letter and wait status from /proc/PID/stat; an empty state means that the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # a name may be no UTF-8
    except OSError:
        return ("?", None) if not Path("/proc/self/stat").exists() and psutil.pid_exists(pid) else ("", None)
    fields = stat.rpartition(b")")[2].decode().split()
    return fields[0], int(fields[-1])
