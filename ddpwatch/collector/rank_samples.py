"""Samples what the scheduler denied each rank, and what its DataLoader's workers did. Linux only, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpwatch.collector.host_counters import CGROUPS, PROC, processes, stat_of
from ddpwatch.collector.memory_left import KIB, MemoryLeft
from ddpwatch.run.regular import read_counters
from ddpwatch.wire.messages import RankSample

MOST_THREADS = 64  # of a rank
MOST_READS = 400  # of threads, in one turn over all ranks: 12 µs each, or half a percent of a core
MOST_WORKERS = 64  # of a rank
_WORKER = b"pt_data_worker"  # how torch names them


@dataclass(slots=True)
class _Seen:
    """A rank's process at the last sample: when, ns run and waited per thread, and preemptions."""

    pid: int
    at_ns: int
    threads: dict[str, tuple[int, int]]
    preempted: int | None
    autograd: dict[str, bool] = field(default_factory=dict)
    workers: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # ns run and waited, and bytes read


class RankSampler:
    """Samples the processes of ranks.

    Args:
        proc: Where the kernel shows processes.
        cgroups: Where it shows cgroups.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc = str(proc)
        self._memory = MemoryLeft(proc, cgroups)
        self._seen: dict[int, _Seen] = {}
        self._children = Children(self._proc)

    def sample(self, pids: Mapping[int, int]) -> list[RankSample]:
        """Returns a sample of every rank that was there the last time, too.

        Args:
            pids: The process of each rank.
        """
        self._seen = {rank: seen for rank, seen in self._seen.items() if pids.get(rank) == seen.pid}
        most = min(MOST_THREADS, max(MOST_READS // max(len(pids), 1), 1))
        self._children.look(pids.values())
        self._memory.keep(set(pids.values()))
        samples = (self._sample(rank, pid, most) for rank, pid in pids.items())
        return [sample for sample in samples if sample is not None]

    def _sample(self, rank: int, pid: int, most: int) -> RankSample | None:
        """Returns what happened since the rank's last sample; None for the first, or if nothing can be read."""
        folder = f"{self._proc}/{pid}/task"
        before = self._seen.get(rank)
        autograd = {} if before is None else before.autograd
        threads = {thread: _times(f"{folder}/{thread}/schedstat") for thread in _chosen(folder, pid, most, autograd)}
        known = {thread: times for thread, times in threads.items() if times is not None}
        status = _numbers(read_counters(f"{self._proc}/{pid}/status"))
        if not known:
            return None
        now_ns, preempted = time.monotonic_ns(), status.get(b"nonvoluntary_ctxt_switches")
        workers = dict(self._workers(pid))
        self._seen[rank] = _Seen(pid, now_ns, known, preempted, autograd, workers)
        if before is None or now_ns <= before.at_ns:
            return None
        run_ns, wait_ns = _busiest(before.threads, known)
        swapped = status.get(b"VmSwap")
        return RankSample(
            rank=rank,
            at_ns=now_ns,
            span_ns=now_ns - before.at_ns,
            run_ns=run_ns,
            wait_ns=wait_ns,
            preempted=None if preempted is None or before.preempted is None else max(preempted - before.preempted, 0),
            swapped_bytes=None if swapped is None else KIB * swapped,
            memory_bytes=_memory(status),
            memory_left_bytes=self._memory.left(pid),
            **_worked(before.workers, workers),
        )

    def _workers(self, pid: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """Yields the rank's DataLoader workers, and what each has done so far."""
        for child in self._children.of(pid)[:MOST_WORKERS]:
            if read_counters(f"{self._proc}/{child}/comm").strip() == _WORKER:
                times = _times(f"{self._proc}/{child}/schedstat")
                read = _numbers(read_counters(f"{self._proc}/{child}/io")).get(b"read_bytes", 0)
                if times is not None:
                    yield child, (*times, read)


class Children:
    """Knows which processes are whose children. Each process is read once: only its parent's end changes that.

    Args:
        proc: Where the kernel shows processes.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._parents: dict[str, int] = {}

    def look(self, parents: Iterable[int]) -> None:
        """Takes the processes that have started since; where there are no parents, nothing is read."""
        if not any(parents):
            return
        now = set(processes(self._proc))
        for pid in self._parents.keys() - now:
            del self._parents[pid]
        for pid in now - self._parents.keys():
            _, fields = stat_of(self._proc, pid)
            self._parents[pid] = int(fields[1]) if len(fields) > 1 else 0

    def of(self, pid: int) -> list[str]:
        """Returns a process's children."""
        return [child for child, parent in self._parents.items() if parent == pid]


def _worked(before: Mapping[str, tuple[int, int, int]], now: Mapping[str, tuple[int, int, int]]) -> dict[str, int]:
    """Returns what the workers that were there before have done since, together."""
    new = [tuple(b - a for a, b in zip(before[pid], now[pid], strict=True)) for pid in now if pid in before]
    if not new:
        return {}
    run, wait, read = (max(sum(column), 0) for column in zip(*new, strict=True))
    return {"workers": len(new), "workers_run_ns": run, "workers_wait_ns": wait, "workers_read_bytes": read}


def _chosen(folder: str, pid: int, most: int, autograd: dict[str, bool]) -> Sequence[str]:
    """Returns the threads to read: of many, the main thread and those that run backwards come first."""
    try:
        with os.scandir(folder) as entries:
            threads = [entry.name for entry in entries]
    except OSError:
        return ()
    if len(threads) <= most:
        return threads
    for thread in threads:
        if thread not in autograd:
            # How torch names the threads that run backwards on GPUs
            autograd[thread] = read_counters(f"{folder}/{thread}/comm").startswith(b"pt_autograd_")
    for thread in autograd.keys() - set(threads):
        del autograd[thread]
    return sorted(threads, key=lambda thread: (thread != str(pid), not autograd[thread], int(thread)))[:most]


def _busiest(
    before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]
) -> tuple[int | None, int | None]:
    """Returns how long the thread that wanted to run longest has run and waited (ns): the one that works."""
    new = ((run - before[name][0], wait - before[name][1]) for name, (run, wait) in now.items() if name in before)
    run, wait = max(new, key=sum, default=(-1, -1))
    return (None, None) if wait < 0 or run < 0 else (run, wait)


def _times(path: str) -> tuple[int, int] | None:
    """Returns how long a thread has run and waited (ns).

    None if the kernel does not say. One that has never run is no use.
    """
    fields = read_counters(path).split()
    if len(fields) < 3 or not (fields[0].isdigit() and fields[1].isdigit()) or fields[2] == b"0":
        return None
    return int(fields[0]), int(fields[1])


def _memory(status: Mapping[bytes, int]) -> int | None:
    """Returns what a process alone can free (bytes): without files' pages; None if the kernel does not say."""
    if b"RssAnon" not in status:
        return None
    return KIB * sum(status.get(name, 0) for name in (b"RssAnon", b"RssShmem", b"VmSwap"))


def _numbers(status: bytes) -> dict[bytes, int]:
    """Returns the fields of /proc/PID/status that are numbers."""
    pairs = (line.partition(b":") for line in status.splitlines())
    values = ((name, value.split()) for name, _, value in pairs)
    return {name: int(value[0]) for name, value in values if value and value[0].isdigit()}
