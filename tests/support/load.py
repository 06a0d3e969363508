"""A collector, and two processes that send it the steps of 1,024 made-up ranks at a fixed rate.

Steps have 2.9 kB. 16 ranks are behind each connection. With fewer than four cores, the senders compete with the
collector for the processor.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire import transport
from ddpwatch.wire.messages import Bye, Hello, Status, encode
from tests.support.synthetic import Fleet

RANKS, SENDERS, RANKS_PER_CONNECTION = 1024, 2, 16
HOOKS, BUCKETS = 300, 25  # of a step: 2.9 kB
PAUSE_S = 0.005  # between two batches
MB = 1e6
_NUMBER = b"\xa4step\xcf"  # the key of a step's number, and the type of a number of eight bytes


def send_steps(endpoint: str, ranks: range, rate: float, seconds: float, counts: Any) -> None:
    """Introduces the ranks, sends their steps at that rate, and says goodbye for them once it may."""
    context = transport.Context()
    sockets = [transport.rank_push(context) for _ in ranks[::RANKS_PER_CONNECTION]]
    for each in sockets:
        each.connect(endpoint)
    fleet, frames = Fleet(RANKS, BUCKETS, HOOKS), list[tuple[bytes, bytes]]()
    example = fleet.step(0, 1)
    for rank in ranks:
        hello = Hello(run_id="load", rank=rank, world_size=RANKS, host="here", pid=1, boot_id="made up")
        sockets[(rank - ranks.start) // RANKS_PER_CONNECTION].send(encode(hello))
        example.rank, example.step = rank, 1 << 62
        head, tail = encode(example).split(_NUMBER)
        frames.append((head + _NUMBER, tail[8:]))
    sent = refused = 0
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < seconds:
        while sent + refused < elapsed * rate:
            number, position = divmod(sent + refused, len(ranks))
            head, tail = frames[position]
            try:
                sockets[position // RANKS_PER_CONNECTION].send(head + struct.pack(">Q", number) + tail, zmq.DONTWAIT)
                sent += 1
            except zmq.Again:
                refused += 1
        time.sleep(PAUSE_S)
    counts.put((len(ranks) + sent, refused))
    counts.join_goodbye.wait()
    for rank in ranks:
        bye = Bye(rank=rank, by="rank", reason="finished", at_ns=1)
        sockets[(rank - ranks.start) // RANKS_PER_CONNECTION].send(encode(bye))
    for each in sockets:
        each.close(linger=5000)
    context.term()


class Counts:
    """Where the senders put their counts, and what lets them say goodbye."""

    def __init__(self) -> None:
        self._queue = multiprocessing.Queue()  # type: multiprocessing.Queue[tuple[int, int]]
        self.put, self.get = self._queue.put, self._queue.get
        self.join_goodbye = multiprocessing.Event()


def start_senders(endpoint: str, rate: int, seconds: float, counts: Counts) -> list[multiprocessing.Process]:
    """Two processes with half of the ranks each."""
    per = RANKS // SENDERS
    parts = [range(first, first + per) for first in range(0, RANKS, per)]
    arguments = [(endpoint, ranks, rate / SENDERS, seconds, counts) for ranks in parts]
    senders = [multiprocessing.Process(target=send_steps, args=each) for each in arguments]
    for sender in senders:
        sender.start()
    return senders


# -- the collector ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def collector(record: str) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """A collector process; gives its endpoints."""
    run_id = rundir.new_run_id("load")
    command = [sys.executable, "-m", "ddpwatch.collector", "--run-id", run_id, "--record", record]
    command += ["--world-size", str(RANKS), "--watch-pid", str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        while not any(info.run_id == run_id for info in rundir.live_runs()):
            time.sleep(0.05)
        yield (*rundir.endpoints(run_id), process)
    finally:
        process.kill()
        process.wait()


def last_status(endpoint: str, settled: Callable[[Status], bool], timeout_s: float = 30.0) -> Status | None:
    """The newest status, once it satisfies a condition or time is up."""
    found, deadline = None, time.monotonic() + timeout_s
    with contextlib.closing(LiveSource(endpoint)) as source:
        while time.monotonic() < deadline and not (found is not None and settled(found)):
            for message, _ in source.read(0.5):
                found = message if isinstance(message, Status) else found
    return found


def memory_mb(pid: int, name: str) -> float:
    """A figure of /proc/PID/status (``VmRSS``, ``VmHWM``); 0 if the process is gone."""
    with contextlib.suppress(OSError):
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 / MB if found else 0.0
    return 0.0
