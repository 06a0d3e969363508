"""Reads what Linux counts of a host: stolen time, pressure, swapping, OOM kills, cgroups that used up their CPU quota.

Elsewhere, and where a kernel does not count it, a figure is None.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpwatch.run.regular import read_counters

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_COUNTERS = ("procs_running", "pswpin", "pswpout", "oom_kill")


class HostCounters:
    """Reads counters and turns them into rates.

    Args:
        proc: Where the kernel shows its counters.
        cgroups: Where it shows its cgroups.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc = proc
        self._cgroups = list(_cgroups_with_quota(proc, cgroups))
        self._previous: dict[str, float] = {}

    def figures(self, now_ns: int) -> dict[str, Any]:
        """Returns the fields of a `Device` that the kernel counts, since the last call; ``now_ns`` is monotonic."""
        now = self._read() | {"seconds": now_ns / 1e9}
        before, self._previous = self._previous, now
        new = {name: max(value - before[name], 0.0) for name, value in now.items() if name in before}
        jiffies, seconds = new.get("jiffies"), new.get("seconds")
        running = now.get("procs_running")
        return {
            "steal": _percent(new.get("steal"), jiffies, 100),
            "iowait": _percent(new.get("iowait"), jiffies, 100),
            "run_queue": None if running is None else int(running),
            "cpu_pressure": _percent(new.get("cpu_us"), seconds, 1e-4),
            "memory_pressure": _percent(new.get("memory_us"), seconds, 1e-4),
            "io_pressure": _percent(new.get("io_us"), seconds, 1e-4),
            "oom_kills_s": _ratio(new.get("oom_kill"), seconds, 1),
            "swap_in_bytes_s": _ratio(new.get("pswpin"), seconds, mmap.PAGESIZE),
            "swap_out_bytes_s": _ratio(new.get("pswpout"), seconds, mmap.PAGESIZE),
            "cgroup_throttled": max(self._throttled(new), default=None),
        }

    def _throttled(self, new: dict[str, float]) -> Iterator[float]:
        """Yields in how many percent of its periods each cgroup was throttled. Without a quota there are no periods."""
        for folder in self._cgroups:
            throttled, periods = new.get(f"{folder} nr_throttled"), new.get(f"{folder} nr_periods")
            if throttled is not None and periods is not None:
                yield _percent(throttled, periods, 100) or 0.0

    def _read(self) -> dict[str, float]:
        stat, vmstat = _lines(self._proc / "stat"), _lines(self._proc / "vmstat")
        found = {name: rows[name][0] for rows in (stat, vmstat) for name in _COUNTERS if rows.get(name)}
        times = stat.get("cpu", [])  # user nice system idle iowait irq softirq steal; guests are counted in user
        if len(times) >= 8:
            found |= {"jiffies": sum(times[:8]), "iowait": times[4], "steal": times[7]}
        for resource in ("cpu", "memory", "io"):
            total = _text(self._proc / "pressure" / resource).partition("\n")[0].rpartition("total=")[2]
            if total.isdecimal():
                found[f"{resource}_us"] = float(total)
        for folder in self._cgroups:
            found |= {f"{folder} {name}": row[0] for name, row in _lines(folder / "cpu.stat").items() if row}
        return found


def _cgroups_with_quota(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yields the own cgroup and those around it, as far as they can be seen and have periods."""
    for line in _text(proc / "self" / "cgroup").splitlines()[:64]:
        number, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if number != "0" and "cpu" not in names:
            continue
        for base in (cgroups / controllers, cgroups / "cpu") if controllers else (cgroups, cgroups / "unified"):
            own = base / path.strip("/")
            around = [base] if ".." in own.parts else [own, *own.parents][:8]  # the own one, and those around it
            found = [each for each in around if each.is_relative_to(base) and "nr_periods" in _lines(each / "cpu.stat")]
            yield from found
            if found:
                break


def _lines(path: Path) -> dict[str, list[float]]:
    """Returns the numbers of each line by the word before them."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: [float(each) for each in row[1:12] if each.isdecimal()] for row in rows if row}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _ratio(part: float | None, whole: float | None, factor: float) -> float | None:
    return None if part is None or not whole else factor * part / whole


def _percent(part: float | None, whole: float | None, factor: float) -> float | None:
    """Returns a percentage, at most 100: the kernel adds up some counters later than others."""
    ratio = _ratio(part, whole, factor)
    return None if ratio is None else min(ratio, 100.0)


def processes(proc: str) -> Iterator[str]:
    """Yields the ids of all processes that the kernel shows."""
    with contextlib.suppress(OSError), os.scandir(proc) as entries:
        yield from (entry.name for entry in entries if entry.name.isdecimal())


def stat_of(proc: str, pid: str) -> tuple[bytes, list[bytes]]:
    """Returns a process's name, and what /proc/PID/stat says after it: state, parent …; nothing once it is gone."""
    head, _, fields = read_counters(f"{proc}/{pid}/stat").rpartition(b")")
    return head.partition(b"(")[2], fields.split()
