"""How many frames the collector takes: made-up ranks send at a fixed rate, without and with a recording.

    python benchmarks/collector.py [--seconds 60] [--hostile]

Takes about three minutes, with ``--hostile`` one more. Budget at 10,000 frames/s: at most 60 % of a core and 300 MB, no
frame lost. With a hostile sender: at most 10 MB more, no exit, and no frame of an honest rank lost.

1,024 ranks send steps of 2.9 kB. They live in two child processes, 16 of them behind each connection; the collector is
a process as in a job. With fewer than four cores the senders compete with it for the processor, and what they could not
send in time shows in the column "sent/s".

``--hostile`` adds a process that sends random bytes, marks with a MiB of padding and steps of ranks that the job does
not have, and opens and closes up to 1,000 connections a second. It starts after half of the time, when (with 20 seconds
or more) the collector retains as much as it ever does.

The columns:
    sent/s      frames that the ranks have sent
    lost        frames that the ranks could not send or the collector has not counted, of all
    unrecorded  frames that did not reach the recording
    core        the collector's CPU time, as a share of one core
    MB          its largest resident memory while the ranks send (a viewer's snapshot takes more for a moment)
    growth MB   what was added to it after the hostile sender had started
    end         the collector's exit code. The one that records is ended by SIGTERM: it has a second to complete its
                recording (what it leaves for late viewers comes after that)
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from ddpwatch.common.text import table
from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire import transport
from ddpwatch.wire.messages import Bye, Hello, Mark, Status, encode
from tests.support.rounds import Rounds, rounds_done
from tests.support.synthetic import Fleet

RANKS, SENDERS, RANKS_PER_CONNECTION = 1024, 2, 16
HOOKS, BUCKETS = 300, 25  # of a step: 2.9 kB
PAUSE_S = 0.005  # between two batches
END_S = 60.0
MB = 1e6
_NUMBER = b"\xa4step\xcf"  # the key of a step's number, and the type of a number of eight bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: what is asked of the collector."""

    name: str
    rate: int
    record: bool = False
    hostile: bool = False


ROWS = (Row("5,000/s", 5000), Row("10,000/s", 10_000), Row("5,000/s, recording", 5000, record=True))
HOSTILE = Row("3,000/s, hostile", 3000, hostile=True)


@dataclass(slots=True)
class Measured:
    """What came of a row."""

    sent: int = 0
    refused_by_socket: int = 0
    received: int = 0
    unrecorded: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_mb: float = 0.0
    growth_mb: float = 0.0
    exit_code: int | None = None
    end_s: float = 0.0


# -- the processes that send -----------------------------------------------------------------------------------


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


def attack(endpoint: str, counts: Any) -> None:
    """Sends what no rank would, until it is stopped."""
    context = transport.Context()
    vandal = transport.rank_push(context)
    vandal.connect(endpoint)
    mark = msgspec.msgpack.decode(encode(Mark(rank=RANKS - 1, name="padded", start_ns=1)))
    foreign = encode(Fleet(RANKS, BUCKETS, HOOKS).step(0, 1)).replace(b"\xa4rank\x00", b"\xa4rank\xcd\xff\xff")
    for number in range(1 << 60):
        if counts.peace.is_set():
            break
        for frame in (os.urandom(2000), foreign):
            with contextlib.suppress(zmq.Again):
                vandal.send(frame, zmq.DONTWAIT)
        if number % 20 == 0:
            with contextlib.suppress(zmq.Again):
                vandal.send(msgspec.msgpack.encode({**mark, "padding": os.urandom(1 << 20)}), zmq.DONTWAIT)
                counts.marks.value += 1
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(endpoint.removeprefix("ipc://"))
            connection.send(os.urandom(64))
        time.sleep(0.001)
    vandal.close(linger=5000)
    context.term()


class Counts:
    """Where the senders put their counts, and what lets them say goodbye."""

    def __init__(self) -> None:
        self._queue = multiprocessing.Queue()  # type: multiprocessing.Queue[tuple[int, int]]
        self.put, self.get = self._queue.put, self._queue.get
        self.join_goodbye = multiprocessing.Event()
        self.peace = multiprocessing.Event()
        self.marks = multiprocessing.Value("q")  # that the collector has to accept from the hostile sender


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


def measure(row: Row, seconds: float) -> Measured:
    """Runs one row."""
    made, counts = Measured(seconds=seconds), Counts()
    with tempfile.TemporaryDirectory(prefix="dw-") as folder:
        record = str(Path(folder) / "load.mcap") if row.record else ""
        with collector(record) as (ingest, publish, process):
            senders = start_senders(ingest, row.rate, seconds, counts)
            cpu = psutil.Process(process.pid).cpu_times()
            if row.hostile:
                made.growth_mb = under_attack(ingest, process.pid, seconds, counts)
            for sent, refused in (counts.get() for _ in senders):
                made.sent, made.refused_by_socket = made.sent + sent, made.refused_by_socket + refused
            expected, made.peak_mb = made.sent + counts.marks.value, memory_mb(process.pid, "VmHWM")
            status = last_status(publish, lambda status: status.frames >= expected)
            now = psutil.Process(process.pid).cpu_times()
            made.cpu_s = now.user + now.system - cpu.user - cpu.system
            if status is not None:
                made.received = status.frames - counts.marks.value
                lost = re.search(r"(\d+) frames lost", status.recording_error)
                made.unrecorded = int(lost[1]) if lost else 0
            if row.record:
                made.end_s = completed_s(process, Path(publish.removeprefix("ipc://")).with_suffix(".mcap"))
            counts.join_goodbye.set()
            with contextlib.suppress(subprocess.TimeoutExpired):
                made.exit_code = process.wait(END_S)
            for sender in senders:
                sender.join()
    return made


def completed_s(process: subprocess.Popen[bytes], last_view: Path) -> float:
    """How long the collector takes from SIGTERM until it has completed its recording, and starts on its last view."""
    process.terminate()
    asked = time.monotonic()
    while not last_view.exists() and process.poll() is None:
        time.sleep(0.005)
    return time.monotonic() - asked


def start_senders(endpoint: str, rate: int, seconds: float, counts: Counts) -> list[multiprocessing.Process]:
    """Two processes with half of the ranks each."""
    per = RANKS // SENDERS
    parts = [range(first, first + per) for first in range(0, RANKS, per)]
    arguments = [(endpoint, ranks, rate / SENDERS, seconds, counts) for ranks in parts]
    senders = [multiprocessing.Process(target=send_steps, args=each) for each in arguments]
    for sender in senders:
        sender.start()
    return senders


def under_attack(endpoint: str, pid: int, seconds: float, counts: Counts) -> float:
    """By how many MB the collector's memory grows in the second half of the time, in which it is attacked."""
    time.sleep(seconds / 2)
    before = memory_mb(pid, "VmRSS")
    vandal = multiprocessing.Process(target=attack, args=(endpoint, counts), daemon=True)
    vandal.start()
    time.sleep(seconds / 2)
    after = memory_mb(pid, "VmRSS")
    counts.peace.set()
    vandal.join()
    return after - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each row (default: %(default)s)")
    parser.add_argument("--hostile", action="store_true", help="add a row with a hostile sender")
    args = parser.parse_args()
    rows = (*ROWS, HOSTILE) if args.hostile else ROWS
    done: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="dw-") as folder, Rounds() as rounds:
        os.environ["DDPWATCH_DIR"] = str(Path(folder) / "run")
        for row in rounds.over(rows, "rows"):
            done.append(cells(row, measure(row, args.seconds)))
    head = ["ranks send", "sent/s", "lost", "unrecorded", "core", "MB", "growth MB", "end"]
    print("\n".join(table(head, done)))
    print(f"{rounds_done(len(done), len(rows), 'row')} of {args.seconds:.0f} s, {os.cpu_count()} cores")


def cells(row: Row, made: Measured) -> list[str]:
    """One line of the table."""
    lost = made.refused_by_socket + made.sent - made.received
    return [
        row.name,
        f"{made.sent / made.seconds:,.0f}",
        f"{lost:,} of {made.sent + made.refused_by_socket:,}",
        f"{made.unrecorded:,}" if row.record else "–",
        f"{made.cpu_s / made.seconds:.0%}",
        f"{made.peak_mb:.0f}",
        f"{made.growth_mb:.1f}" if row.hostile else "–",
        end_of(row, made),
    ]


def end_of(row: Row, made: Measured) -> str:
    """The exit code, and after a signal how long the collector took."""
    if made.exit_code is None:
        return "still runs"
    return f"{made.exit_code}, {made.end_s:.2f} s" if row.record else str(made.exit_code)


if __name__ == "__main__":
    main()
