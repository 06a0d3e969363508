"""How the collector sends snapshots to viewers that do not keep up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch.collector.service import Collector, Options
from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire import transport
from ddpwatch.wire.messages import Beat, encode

FRAMES = 10_000


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("DDPWATCH_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(transport, "VIEWER_QUEUE", 10)
    made = Collector(Options(run_id="r", world_size=FRAMES, watch_pid=os.getpid()))
    yield made
    made._close()
    rundir.remove("r")  # its lease is not in the run directory


def beat(rank: int) -> Beat:
    return Beat(rank=rank, at_ns=1, step=1, phase="input", since_ns=0)


def test_a_snapshot_longer_than_a_viewers_queue_arrives(collector: Collector) -> None:
    """The queues hold 20 of its 157 messages, and what fits into the socket; the viewer reads only now and then."""
    for rank in range(FRAMES):
        collector._hub.keep(beat(rank), encode(beat(rank)), 1)
    source = LiveSource(collector._viewers.getsockopt_string(transport.zmq.LAST_ENDPOINT))
    try:
        while not collector._viewers.poll(100):
            pass
        seen: list[int] = []
        pieces = 0
        for _ in range(400):
            collector._snapshots.serve()
            pieces += collector._snapshots.is_sending
            seen += [envelope.seq for _, envelope in source.read(0.05)]
            if source._synced:
                break
        assert source._synced
        assert seen == list(range(1, FRAMES + 1))
        assert pieces
    finally:
        source.close()


def test_a_viewer_that_reads_nothing_delays_no_other(collector: Collector) -> None:
    for rank in range(FRAMES):
        collector._hub.keep(beat(rank), encode(beat(rank)), 1)
    endpoint = collector._viewers.getsockopt_string(transport.zmq.LAST_ENDPOINT)
    context = transport.Context()
    suspended = transport.viewer_socket(context, endpoint)
    for topic in transport.viewer_topics(b"suspended"):
        suspended.subscribe(topic)
    while not collector._viewers.poll(100):
        pass
    collector._snapshots.serve()
    source = LiveSource(endpoint)
    try:
        for _ in range(400):
            collector._snapshots.serve()
            source.read(0.05)
            if source._synced:
                break
        assert source._synced
    finally:
        source.close()
        suspended.close()
        context.term()
