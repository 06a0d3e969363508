"""Notices at once when a local rank's process ends, and how, without being its parent."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Container
from pathlib import Path

import psutil

from ddpwatch.messages import EndReason


class Liveness:
    """Follows processes through pidfds (Linux), or by asking whether the pid exists.

    ``fds`` are what to poll: one turns readable when its process ends. For as long as its parent has not reaped
    it, /proc still says with which signal or exit code; torchrun reaps ten times a second.
    """

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self.fds: dict[int, int] = {}

    def follow(self, rank: int, pid: int) -> int | None:
        """Begins to follow a rank. Returns the new file descriptor, or None (then `gone` is the only way)."""
        self.forget(rank)
        if not psutil.pid_exists(pid):
            return None  # ended already, or in another pid namespace: its heartbeat decides
        self._pids[rank] = pid
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return None
        self.fds[fd] = rank
        return fd

    def forget(self, rank: int) -> None:
        """Stops following a rank."""
        self._pids.pop(rank, None)
        for fd in [fd for fd, owner in self.fds.items() if owner == rank]:
            del self.fds[fd]
            os.close(fd)

    def gone(self, readable: Container[object]) -> dict[int, tuple[EndReason, str, int | None]]:
        """The followed ranks whose process has ended since: reason, detail and signal of each.

        Args:
            readable: Which of `fds` are. A rank without one is looked up.
        """
        running = {rank for fd, rank in self.fds.items() if fd not in readable}
        ended = {}
        for rank, pid in [entry for entry in self._pids.items() if entry[0] not in running]:
            state, status = _proc_state(pid)
            if state in ("", "Z", "X"):
                ended[rank] = explain(status if state else None)
                self.forget(rank)
        return ended

    def close(self) -> None:
        """Closes what is open."""
        for rank in list(self._pids):
            self.forget(rank)


def explain(status: int | None) -> tuple[EndReason, str, int | None]:
    """Words for a wait status of a process that left without saying goodbye."""
    if status is None:
        return "lost", "its process is gone, how is not known", None
    if number := status & 0x7F:
        name = str(number)
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
        return "killed", name, number
    return "lost", f"exited with code {status >> 8} without saying goodbye", None


def _proc_state(pid: int) -> tuple[str, int | None]:
    """State letter and wait status from /proc/PID/stat; an empty state means that the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ("?", None) if not Path("/proc/self/stat").exists() and psutil.pid_exists(pid) else ("", None)
    return fields[0], int(fields[-1])
