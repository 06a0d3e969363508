"""Finds the processes that use most CPU time, while a host is short of cores. Linux only, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path

from ddpwatch.collector.host_counters import PROC, processes, stat_of
from ddpwatch.common.units import NS_PER_S
from ddpwatch.run.regular import read_counters
from ddpwatch.wire.messages import MOST_BUSY, BusyProcess, Device, RankSample

EVERY_NS = 10_000_000_000  # after the first look: 12 µs a process
MOST_PROCESSES = 4096  # read in one look
_PARENT, _UTIME = 1, 11  # in /proc/PID/stat, of the fields after the name
_LONGEST_NAME = 64
_COMMAND = 6  # of a command line: what is run is among the first, with Python and its options


class BusyProcesses:
    """Looks at all processes now and then; what they have used between two looks is their CPU time.

    Args:
        proc: Where the kernel shows processes.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = str(proc)
        self._before: Mapping[int, tuple[str, int]] = {}
        self._at_ns = self._due_ns = 0

    def sample(self, is_short: bool, now_ns: int) -> list[BusyProcess]:
        """Returns the busiest since the last look but ddpwatch's own; empty where none is due, or nothing is short.

        Args:
            is_short: Whether somebody waits for a core.
            now_ns: Monotonic.
        """
        if not is_short:
            self._before, self._due_ns = {}, 0
            return []
        if now_ns < self._due_ns:
            return []
        before, self._before = self._before, dict(islice(self._times(), MOST_PROCESSES))
        ticks = os.sysconf("SC_CLK_TCK") * max(now_ns - self._at_ns, 1) / NS_PER_S
        self._at_ns, self._due_ns = now_ns, now_ns + (EVERY_NS if before else 0)
        used = [
            BusyProcess(pid, name, 100 * (now - before[pid][1]) / ticks)
            for pid, (name, now) in self._before.items()
            if pid in before and now > before[pid][1]
        ]
        used.sort(key=attrgetter("cpu"), reverse=True)
        others = islice((process for process in used if not self._is_own(process.pid)), MOST_BUSY)
        return [BusyProcess(one.pid, self._script(one.pid) or one.name, one.cpu) for one in others]

    def _is_own(self, pid: int) -> bool:
        """Returns whether a process is this collector, a child of it, a viewer, or another node's collector here."""
        if pid == os.getpid() or stat_of(self._proc, str(pid))[1][_PARENT : _PARENT + 1] == [b"%d" % os.getpid()]:
            return True
        return _runs_ddpwatch(self._command(pid))

    def _script(self, pid: int) -> str:
        """Returns the script or module that a Python runs; empty if it shows none."""
        command = self._command(pid)
        if not command[0].rpartition(b"/")[2].startswith(b"python"):
            return ""
        words = _without_options(command)
        found = words[2:3] if words[1:2] == [b"-m"] else words[1:2]
        return "" if found in ([], [b"-c"]) else found[0].rpartition(b"/")[2].decode(errors="replace")[:_LONGEST_NAME]

    def _command(self, pid: int) -> Sequence[bytes]:
        """Returns the first words of its command line."""
        return read_counters(f"{self._proc}/{pid}/cmdline").split(b"\0")[:_COMMAND]

    def _times(self) -> Iterator[tuple[int, tuple[str, int]]]:
        """Yields the name and the ticks of CPU time of each process."""
        for pid in processes(self._proc):
            name, fields = stat_of(self._proc, pid)
            times = fields[_UTIME : _UTIME + 2]
            if len(times) == 2:
                yield int(pid), (name.decode(errors="replace"), sum(map(int, times)))


def _runs_ddpwatch(command: Sequence[bytes]) -> bool:
    """Returns whether a command line runs it: as a script, as a module, or by ``-c`` with a module's name."""
    words = _without_options(command)
    if words[1:2] in ([b"-m"], [b"-c"]):
        return any(word.startswith(b"ddpwatch.") or word == b"ddpwatch" for word in words[2:])
    return any(word.rpartition(b"/")[2] == b"ddpwatch" for word in words[:2])


def _without_options(command: Sequence[bytes]) -> list[bytes]:
    """Returns the words of a Python's command line but its options, and what follows those that take a word."""
    taken = {at + 1 for at, word in enumerate(command) if word in (b"-X", b"-W")}
    rest = [word for at, word in enumerate(command) if at not in taken]
    return [rest[0], *(word for word in rest[1:] if word and (word[:1] != b"-" or word in (b"-m", b"-c")))]


def is_short_of_cores(host: Device, ranks: Sequence[RankSample]) -> bool:
    """Returns whether samples show what could be called CPU starvation."""
    from ddpwatch.analysis.diagnosis.thresholds import DENIED_SHARE, PRESSURE_SHARE  # a collector starts without it

    waits = (sample.wait_ns or 0 for sample in ranks)
    wants = ((sample.wait_ns or 0) + (sample.run_ns or 0) for sample in ranks)
    denied = any(wait > DENIED_SHARE * want for wait, want in zip(waits, wants, strict=True))
    return denied or (host.cpu_pressure or 0.0) >= 100 * PRESSURE_SHARE
