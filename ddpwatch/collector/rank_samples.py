"""What the scheduler denied each rank: how long its threads waited for a core. Linux only, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpwatch.collector.host_counters import PROC
from ddpwatch.run.regular import read_counters
from ddpwatch.wire.messages import RankSample

MOST_THREADS = 64  # of a rank
MOST_READS = 400  # of threads, in one turn over all ranks: 12 µs each, or half a percent of a core


@dataclass(slots=True)
class _Seen:
    """A rank's process at the last sample: when, ns run and waited per thread, and preemptions."""

    pid: int
    at_ns: int
    threads: dict[str, tuple[int, int]]
    preempted: int | None
    autograd: dict[str, bool] = field(default_factory=dict)


class RankSampler:
    """Samples the processes of ranks.

    Args:
        proc: Where the kernel shows processes.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = str(proc)
        self._seen: dict[int, _Seen] = {}

    def sample(self, pids: Mapping[int, int]) -> list[RankSample]:
        """Returns a sample of every rank that was there the last time, too.

        Args:
            pids: The process of each rank.
        """
        self._seen = {rank: seen for rank, seen in self._seen.items() if pids.get(rank) == seen.pid}
        most = min(MOST_THREADS, max(MOST_READS // max(len(pids), 1), 1))
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
        self._seen[rank] = _Seen(pid, now_ns, known, preempted, autograd)
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
            swapped_bytes=None if swapped is None else 1024 * swapped,
        )


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


def _numbers(status: bytes) -> dict[bytes, int]:
    """Returns the fields of /proc/PID/status that are numbers."""
    pairs = (line.partition(b":") for line in status.splitlines())
    values = ((name, value.split()) for name, _, value in pairs)
    return {name: int(value[0]) for name, value in values if value and value[0].isdigit()}
