"""A fake collector."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire import transport
from ddpwatch.wire.messages import Beat, Message, encode
from ddpwatch.wire.transport import LIVE, SNAPSHOT, Envelope
from tests.support.frames import enveloped, status


class Publisher:
    """Publishes numbered heartbeats, loses some of them, and keeps others for a snapshot."""

    def __init__(self, endpoint: str) -> None:
        self._context = transport.Context()
        self._socket = transport.collector_publish(self._context, endpoint)

    def live(self, *numbers: int) -> None:
        for number in numbers:
            self._socket.send_multipart(self._envelope(number).parts(LIVE))

    def together(self, *numbers: int) -> None:
        """Publishes them as a collector does that has received them at once."""
        self.send(LIVE, map(self._envelope, numbers))

    def send(self, topic: bytes, envelopes: Iterable[Envelope]) -> None:
        """Publishes frames as a collector does."""
        for batch in transport.batches(envelopes):
            transport.publish(self._socket, topic, batch)

    def message(self, number: int, message: Message) -> None:
        """Publishes another message than a heartbeat."""
        self._socket.send_multipart(Envelope(number, 1, encode(message)).parts(LIVE))

    def request(self) -> bytes:
        """The next topic that viewers have subscribed to (first byte: 1) or all left (0); empty without one."""
        return self._socket.recv() if self._socket.poll(50) else b""

    def answer(self, kept: list[int], newest: int | None, viewer: LiveSource | None = None) -> None:
        """Waits until a viewer asks for a snapshot, and sends these numbers; without the end if ``newest`` is None.

        Args:
            viewer: It reads meanwhile, so that it finds a gap, and asks once its pause is over.
        """
        deadline = time.monotonic() + 60.0
        while not (self._socket.poll(10) and self._answer(self._socket.recv(), kept, newest)):
            assert time.monotonic() < deadline, "no viewer asks"
            if viewer is not None:
                assert viewer.read(0.01) == []

    def retain(self, messages: Iterable[Message]) -> None:
        """Waits until a viewer asks, and sends these as what is retained, then a live status."""
        while not (request := self.request()).startswith(b"\x01" + SNAPSHOT):
            pass
        kept = enveloped(list(messages))
        for number, (message, envelope) in enumerate(kept):
            self._socket.send_multipart(Envelope(number, envelope.received_ns, encode(message)).parts(request[1:]))
        self._socket.send_multipart(Envelope(len(kept) - 1, 1, b"").parts(request[1:]))
        self.message(len(kept), status())

    def send_snapshot(self, token: bytes, kept: list[int]) -> None:
        """Sends a snapshot that ends with the newest of these numbers, asked or not."""
        self._answer(b"\x01" + SNAPSHOT + token, kept, kept[-1])

    def _answer(self, request: bytes, kept: list[int], newest: int | None) -> bool:
        if request[:1] != b"\x01" or not request[1:].startswith(SNAPSHOT):
            return False
        for number in kept:
            self._socket.send_multipart(self._envelope(number).parts(request[1:]))
        if newest is not None:
            self._socket.send_multipart(Envelope(newest, 1, b"").parts(request[1:]))
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    @staticmethod
    def _envelope(number: int) -> Envelope:
        return Envelope(number, 1, encode(Beat(rank=0, at_ns=1, step=number, phase="input", since_ns=0)))
