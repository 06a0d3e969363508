"""Where a viewer's frames come from: a running job, or a recording that grows (`ddpwatch.recording.follow`)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Protocol

import zmq

from ddpwatch import transport
from ddpwatch.messages import FrameError, decode
from ddpwatch.transport import SNAPSHOT, Envelope, Frame

SILENCE_S = 5.0  # the collector sends twice a second; after this long without a frame it counts as gone


class Source(Protocol):
    """A stream of frames.

    Attributes:
        over: No more frames will come.
        unreadable: Frames that could not be decoded, skipped.
        missed: Frames lost on the way.
    """

    over: bool
    unreadable: int
    missed: int

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        """Returns the next frames, at most ``limit``; waits up to ``timeout_s`` for the first."""
        ...

    def close(self) -> None:
        """Closes sockets and files."""
        ...


class LiveSource:
    """Frames of a running job: first the snapshot, then the live stream, without a gap or a duplicate.

    If frames are lost because the viewer was too slow (or suspended), it asks for a new snapshot.

    Args:
        endpoint: The collector's publishing endpoint.

    Attributes:
        missed: Frames lost on the way that no snapshot could replace.
    """

    def __init__(self, endpoint: str) -> None:
        self.over = False
        self.unreadable = 0
        self.missed = 0
        self._token = secrets.token_hex(8).encode()
        self._context = transport.Context()
        self._socket = transport.viewer_subscribe(self._context, endpoint, self._token)
        self._synced = False
        self._held_back: list[Envelope] = []
        self._newest = 0
        self._recovered = 0
        self._presumed_lost = 0

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        """See `Source.read`."""
        frames: list[Frame] = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return frames
        while len(frames) < limit:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            for envelope in self._in_order(parts):
                self._decode_into(frames, envelope)
        return frames

    def close(self) -> None:
        """See `Source.close`."""
        self._socket.close()
        self._context.term()

    def _in_order(self, parts: list[bytes]) -> Iterator[Envelope]:
        """Passes on the snapshot, then the live frames held back meanwhile; drops duplicates."""
        parsed = transport.parse_envelope(parts)
        if parsed is None:
            self.unreadable += 1
            return
        topic, envelope = parsed
        if topic != transport.LIVE:
            yield from self._from_snapshot(envelope)
        else:
            yield from self._from_live(envelope)

    def _from_live(self, envelope: Envelope) -> Iterator[Envelope]:
        if not self._synced:
            self._held_back.append(envelope)
        elif envelope.seq == self._newest + 1:
            self._newest = envelope.seq
            yield envelope
        elif envelope.seq > self._newest:
            self._resync(envelope)

    def _from_snapshot(self, envelope: Envelope) -> Iterator[Envelope]:
        if self._synced:
            return
        if envelope.frame:
            if envelope.seq > self._newest:
                self._recovered += 1
                yield envelope
            return
        self._synced = True
        if self._newest:  # frames from before the viewer attached are not lost
            self.missed += max(0, envelope.seq - self._newest - self._recovered) - self._presumed_lost
        self._recovered = self._presumed_lost = 0
        self._newest = max(self._newest, envelope.seq)
        held, self._held_back = self._held_back, []
        for live in held:
            yield from self._from_live(live)

    def _resync(self, envelope: Envelope) -> None:
        """Asks for a new snapshot: the frames before this one are lost unless it has them."""
        self._presumed_lost = envelope.seq - self._newest - 1
        self.missed += self._presumed_lost
        self._socket.unsubscribe(SNAPSHOT + self._token)
        self._token = secrets.token_hex(8).encode()
        self._synced, self._held_back = False, [envelope]
        self._socket.subscribe(SNAPSHOT + self._token)

    def _decode_into(self, frames: list[Frame], envelope: Envelope) -> None:
        try:
            frames.append((decode(envelope.frame), envelope))
        except FrameError:
            self.unreadable += 1
