"""A sender that no rank would be: the collector stays, and loses no frame of honest ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ddpwatch.wire import transport
from ddpwatch.wire.messages import Mark, encode
from tests.support.load import BUCKETS, HOOKS, RANKS, Counts, collector, last_status, memory_mb, start_senders
from tests.support.synthetic import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RATE, SECONDS = 3000, 60.0
END_S = 60.0


def attack(endpoint: str, peace: Any, accepted: Any) -> None:
    """Sends what no rank would, until there is peace; counts those of its frames that the collector has to accept.

    Random bytes, marks with a MiB of padding and steps of ranks that the job does not have; and it opens and closes up
    to 1,000 connections a second.
    """
    context = transport.Context()
    vandal = transport.rank_push(context)
    vandal.connect(endpoint)
    mark = msgspec.msgpack.decode(encode(Mark(rank=RANKS - 1, name="padded", start_ns=1)))
    foreign = encode(Fleet(RANKS, BUCKETS, HOOKS).step(0, 1)).replace(b"\xa4rank\x00", b"\xa4rank\xcd\xff\xff")
    for number in range(1 << 60):
        if peace.is_set():
            break
        for frame in (os.urandom(2000), foreign):
            with contextlib.suppress(zmq.Again):
                vandal.send(frame, zmq.DONTWAIT)
        if number % 20 == 0:
            with contextlib.suppress(zmq.Again):
                vandal.send(msgspec.msgpack.encode({**mark, "padding": os.urandom(1 << 20)}), zmq.DONTWAIT)
                accepted.value += 1
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(endpoint.removeprefix("ipc://"))
            connection.send(os.urandom(64))
        time.sleep(0.001)
    vandal.close(linger=5000)
    context.term()


def test_a_hostile_sender_costs_no_frame_of_others(run_directory: Path) -> None:
    """It starts after half of the time, when the collector retains as much as it ever does.

    Its memory is printed, as frames wait in it where it has no core.
    """
    counts = Counts()
    peace, marks = multiprocessing.Event(), multiprocessing.Value("q")
    with collector("") as (ingest, publish, process):
        senders = start_senders(ingest, RATE, SECONDS, counts)
        time.sleep(SECONDS / 2)
        before_mb = memory_mb(process.pid, "VmRSS")
        vandal = multiprocessing.Process(target=attack, args=(ingest, peace, marks), daemon=True)
        vandal.start()
        sent, refused = (sum(column) for column in zip(*(counts.get() for _ in senders), strict=True))
        grown_mb = memory_mb(process.pid, "VmRSS") - before_mb
        peace.set()
        vandal.join()
        expected = sent + marks.value
        status = last_status(publish, lambda status: status.frames >= expected)
        counts.join_goodbye.set()
        code = process.wait(END_S)
        for sender in senders:
            sender.join()
    print(f"\n{sent} frames, {expected - sent} padded marks, {grown_mb:.1f} MB more (on a quiet machine at most 10)")
    assert status is not None
    assert (refused, status.frames, code) == (0, expected, 0)
