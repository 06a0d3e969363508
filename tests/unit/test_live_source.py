"""What a live source receives and what it counts as missed, over real sockets with a fake collector."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch.errors import UsageError
from ddpwatch.viewer.live_source import ANSWER_S, LiveSource, snapshot
from ddpwatch.wire import transport
from ddpwatch.wire.messages import Beat, encode
from ddpwatch.wire.transport import LIVE, Envelope
from tests.support.frames import status
from tests.support.publisher import Publisher


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(f"ipc://{tmp_path}/pub")
    yield made
    made.close()


class Clock:
    """The clock of a source, for a test to set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def asks_after(self, source: LiveSource, seconds: float) -> bool:
        """Whether the source asks for another snapshot once so much time has passed: each has a token of its own."""
        self.now += seconds
        token = source._token
        source.read(0.0)
        return source._token != token


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Ask for it before the source."""
    made = Clock()
    monkeypatch.setattr("ddpwatch.viewer.live_source.time", made)
    return made


@pytest.fixture
def source(publisher: Publisher, tmp_path: Path) -> Iterator[LiveSource]:
    made = LiveSource(f"ipc://{tmp_path}/pub")
    yield made
    made.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:port", "ipc://", f"ipc:///{'x' * 120}", "udp://127.0.0.1:1"])
def test_what_is_no_endpoint_is_one_line_with_a_hint(endpoint: str) -> None:
    with pytest.raises(UsageError, match="not an endpoint") as error:
        LiveSource(endpoint)
    assert "ipc:///path" in str(error.value.hint)


def read(source: LiveSource, count: int) -> list[int]:
    """The numbers of the next frames."""
    found: list[int] = []
    deadline = time.monotonic() + 60.0
    while len(found) < count and time.monotonic() < deadline:
        found += [envelope.seq for _, envelope in source.read(0.1)]
    return found


def finish_snapshot(source: LiveSource) -> None:
    """Reads up to the end of the snapshot, which comes after the last of its frames."""
    while not source._synced:
        source.read(0.1)


def test_a_late_viewer_has_missed_nothing(publisher: Publisher, source: LiveSource) -> None:
    publisher.answer([3, 7, 8], 8)
    publisher.live(8, 9)
    assert read(source, 4) == [3, 7, 8, 9]
    assert source.missed == 0


def test_a_status_that_is_older_than_the_rest_of_a_snapshot_is_not_its_end(
    publisher: Publisher, source: LiveSource
) -> None:
    beat = Beat(rank=0, at_ns=1, step=3, phase="input", since_ns=0)
    publisher.retain([status(), status(), beat])
    assert beat in [message for message, _ in snapshot(source)]


def test_frames_of_a_gap_that_no_snapshot_has_are_missed(publisher: Publisher, source: LiveSource) -> None:
    """The snapshot has three of 11 to 20; frames after the gap do not make up for the others."""
    publisher.answer([10], 10)
    assert read(source, 1) == [10]
    finish_snapshot(source)
    publisher.live(21, 22)
    publisher.answer([12, 15, 18, 21, 22], 22, source)
    publisher.live(23)
    assert read(source, 6) == [12, 15, 18, 21, 22, 23]
    assert source.missed == 7


def test_a_gap_within_a_gap(publisher: Publisher, source: LiveSource) -> None:
    """Frames are lost again while the viewer waits for those that it has asked for."""
    publisher.answer([1], 1)
    assert read(source, 1) == [1]
    publisher.live(5, 6, 9)
    publisher.answer([5, 6], 6, source)
    assert read(source, 2) == [5, 6]
    publisher.answer([9], 9, source)
    publisher.live(10)
    assert read(source, 2) == [9, 10]
    assert source.missed == 3 + 2


def test_a_message_ends_at_64_frames_or_64_kib(publisher: Publisher, tmp_path: Path) -> None:
    """A viewer's queue counts messages, so this bounds what it holds. A larger frame has a message for itself."""
    sizes = [100] * 70 + [30_000] * 5 + [200_000, 100]
    context = transport.Context()
    viewer = transport.viewer_socket(context, f"ipc://{tmp_path}/pub")
    viewer.subscribe(LIVE)
    assert publisher.request() == b"\x01" + LIVE
    publisher.send(LIVE, [Envelope(number, 1, bytes(size)) for number, size in enumerate(sizes, 1)])
    seen: list[list[int]] = []
    while sum(map(len, seen)) < len(sizes) and viewer.poll(60_000):
        topic, envelopes = transport.parse_published(viewer.recv_multipart()) or (b"", [])
        assert topic == LIVE
        seen.append([len(envelope.frame) for envelope in envelopes])
    viewer.close()
    context.term()
    assert seen == [[100] * 64, [100] * 6 + [30_000] * 2, [30_000] * 2, [30_000], [200_000], [100]]


def test_frames_that_were_published_together_come_one_by_one(publisher: Publisher, source: LiveSource) -> None:
    """More than fit into a message, some of which the snapshot has; then with a gap in the middle."""
    publisher.answer([1, 2], 2)
    publisher.together(*range(2, 200))
    assert read(source, 199) == list(range(1, 200))
    publisher.together(200, 203)
    assert read(source, 1) == [200]
    publisher.answer([201, 203], 203, source)
    publisher.live(204)  # after the end of the snapshot
    assert read(source, 3) == [201, 203, 204]
    assert source.missed == 1


def test_a_viewer_without_an_answer_holds_a_bounded_number_of_frames(source: LiveSource) -> None:
    """The end of the snapshot never comes: the newest frames are held until one does."""
    frame = encode(Beat(rank=0, at_ns=1, step=1, phase="input", since_ns=0))
    for number in range(1, 200_001):
        list(source._in_order(Envelope(number, 1, frame).parts(LIVE)))
    assert len(source._held_back) <= 20_000
    assert source._held_back[-1].seq == 200_000
    padded = bytes(1 << 20)
    for number in range(200_001, 200_201):
        list(source._in_order(Envelope(number, 1, padded).parts(LIVE)))
    assert sum(len(envelope.frame) for envelope in source._held_back) <= 64 << 20


def test_a_snapshot_without_an_end_is_asked_for_again(clock: Clock, publisher: Publisher, source: LiveSource) -> None:
    """What the first answer had is neither delivered nor counted twice."""
    publisher.answer([3, 7], None)
    assert read(source, 2) == [3, 7]
    assert not clock.asks_after(source, ANSWER_S / 2)
    assert clock.asks_after(source, ANSWER_S / 2)
    publisher.answer([3, 7, 8], 8)
    publisher.live(9)
    assert read(source, 2) == [8, 9]
    assert source.missed == 0


def test_resyncs_are_limited_in_rate(clock: Clock, publisher: Publisher, source: LiveSource) -> None:
    """A viewer that is too slow for the stream loses frames again and again, and every snapshot is more of them."""
    publisher.answer([1], 1)
    finish_snapshot(source)
    pauses = []
    for number in (3, 5, 7, 9):
        token, before = source._token, clock.now
        publisher.live(number)
        while source._synced:
            source.read(0.1)
        while source._token == token and not clock.asks_after(source, 0.01):
            pass
        pauses.append(clock.now - before)
        publisher.answer([number], number)
        finish_snapshot(source)
    assert pauses == pytest.approx([0.0, 0.5, 1.0, 2.0], abs=0.02)


def test_a_collector_that_was_started_again(publisher: Publisher, source: LiveSource) -> None:
    """It sends its snapshot by itself. What was held back of the one before is delivered, what comes late is not."""
    again = 1 << transport.RESTART_BITS
    publisher.answer([1, 2], None)
    publisher.live(3, 4)
    assert read(source, 2) == [1, 2]  # the end of the snapshot does not come
    while len(source._held_back) < 2:
        source.read(0.1)
    publisher.live(again + 1)
    assert read(source, 2) == [3, 4]
    publisher.live(5)
    publisher.send_snapshot(source._token, [again + 1])
    publisher.live(again + 2)
    assert read(source, 2) == [again + 1, again + 2]
    assert source.missed == 0
