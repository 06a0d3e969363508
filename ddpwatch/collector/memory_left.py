"""How much memory a process may still take before its cgroup, or its host, is full. Linux only."""

from __future__ import annotations

from pathlib import Path

from ddpwatch.collector.host_counters import CGROUPS, PROC
from ddpwatch.run.regular import read_counters

KIB = 1024
# Of a cgroup: its limit, what it uses, and what of that are files' pages that the kernel gives back first
_VERSION_2 = ("memory.max", "memory.current", b"inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")


class MemoryLeft:
    """Knows the cgroups of processes, each looked up once.

    Args:
        proc: Where the kernel shows processes.
        cgroups: Where it shows cgroups.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc, self._mounted = proc, cgroups
        self._limited: dict[int, list[tuple[Path, tuple[str, str, bytes]]]] = {}

    def left(self, pid: int) -> int | None:
        """Returns what is left (bytes), by the tightest of the limits; None if the kernel says none."""
        if pid not in self._limited:
            self._limited[pid] = self._cgroups_of(pid)
        found = [_left_in(folder, names) for folder, names in self._limited[pid]]
        available = _numbers(self._proc / "meminfo").get(b"MemAvailable:")
        known = [left for left in (*found, None if available is None else KIB * available) if left is not None]
        return min(known, default=None)

    def keep(self, pids: set[int]) -> None:
        """Forgets all other processes."""
        for pid in self._limited.keys() - pids:
            del self._limited[pid]

    def _cgroups_of(self, pid: int) -> list[tuple[Path, tuple[str, str, bytes]]]:
        """Returns a process's cgroup, and those around it, that have a limit."""
        found = []
        for line in read_counters(f"{self._proc}/{pid}/cgroup").decode(errors="replace").splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                base, names = self._mounted / "memory", _VERSION_1
            elif number == "0":
                base, names = self._mounted, _VERSION_2
            else:
                continue
            own = base / path.strip("/")
            around = [base] if ".." in own.parts else [own, *own.parents]
            found += [(each, names) for each in around if each.is_relative_to(base) and _number(each / names[0])]
        return found


def _left_in(folder: Path, names: tuple[str, str, bytes]) -> int | None:
    limit, used = _number(folder / names[0]), _number(folder / names[1])
    if limit is None or used is None:
        return None
    return max(0, limit - used + _numbers(folder / "memory.stat").get(names[2], 0))


def _number(path: Path) -> int | None:
    text = read_counters(str(path)).strip()
    return int(text) if text.isdigit() else None


def _numbers(path: Path) -> dict[bytes, int]:
    rows = (line.split() for line in read_counters(str(path)).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
