"""Where a viewer's frames come from: a live run or a file. A source yields envelopes and knows how it stands."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Protocol

import zmq

from ddpwatch import rundir, transport
from ddpwatch.messages import FrameError, Message, decode
from ddpwatch.transport import SNAPSHOT, Envelope

SILENCE_S = 5.0  # the collector speaks twice a second; after this long without a word it counts as gone


class Source(Protocol):
    """A stream of frames.

    Attributes:
        over: No frame will come any more.
        unreadable: Frames that could not be decoded, skipped.
        missed: Frames that were lost on the way.
    """

    over: bool
    unreadable: int
    missed: int

    def read(self, timeout_s: float, limit: int = 5000) -> list[tuple[Message, Envelope]]:
        """The next frames, at most ``limit``; waits up to ``timeout_s`` for the first."""
        ...

    def close(self) -> None:
        """Lets go of sockets and files."""
        ...


class LiveSource:
    """Frames of a running job: first all that its collector retains, then the live stream, without gap or duplicate.

    If frames are lost because the viewer was too slow (or suspended), it asks for the retained ones again.

    Args:
        endpoint: The collector's publishing endpoint.

    Attributes:
        missed: Frames lost on the way that were not retained any more.
    """

    def __init__(self, endpoint: str) -> None:
        self.over = False
        self.unreadable = 0
        self.missed = 0
        self._token = secrets.token_hex(8).encode()
        self._context = transport.Context()
        self._socket = transport.viewer_subscribe(self._context, endpoint, self._token)
        self._synced = False
        self._held: list[Envelope] = []
        self._newest = 0
        self._recovered = 0
        self._presumed = 0

    def read(self, timeout_s: float, limit: int = 5000) -> list[tuple[Message, Envelope]]:
        """See `Source.read`."""
        frames: list[tuple[Message, Envelope]] = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return frames
        while len(frames) < limit:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            for envelope in self._order(parts):
                self._decode_into(frames, envelope)
        return frames

    def close(self) -> None:
        """See `Source.close`."""
        self._socket.close()
        self._context.term()

    def _order(self, parts: list[bytes]) -> Iterator[Envelope]:
        """Passes retained frames, holds live ones back until the retained are through, drops what came twice."""
        parsed = transport.parse_envelope(parts)
        if parsed is None:
            self.unreadable += 1
            return
        topic, envelope = parsed
        if topic != transport.LIVE:
            yield from self._retained(envelope)
        else:
            yield from self._live(envelope)

    def _live(self, envelope: Envelope) -> Iterator[Envelope]:
        if not self._synced:
            self._held.append(envelope)
        elif envelope.seq == self._newest + 1:
            self._newest = envelope.seq
            yield envelope
        elif envelope.seq > self._newest:
            self._resync(envelope)

    def _retained(self, envelope: Envelope) -> Iterator[Envelope]:
        if self._synced:
            return
        if envelope.frame:
            if envelope.seq > self._newest:
                self._recovered += 1
                yield envelope
            return
        self._synced = True
        if self._newest:  # what lay before a viewer came is not lost
            self.missed += max(0, envelope.seq - self._newest - self._recovered) - self._presumed
        self._recovered = self._presumed = 0
        self._newest = max(self._newest, envelope.seq)
        held, self._held = self._held, []
        for live in held:
            yield from self._live(live)

    def _resync(self, envelope: Envelope) -> None:
        """Frames up to this one are lost, unless they are retained: asks for those."""
        self._presumed = envelope.seq - self._newest - 1
        self.missed += self._presumed
        self._socket.unsubscribe(SNAPSHOT + self._token)
        self._token = secrets.token_hex(8).encode()
        self._synced, self._held = False, [envelope]
        self._socket.subscribe(SNAPSHOT + self._token)

    def _decode_into(self, frames: list[tuple[Message, Envelope]], envelope: Envelope) -> None:
        try:
            frames.append((decode(envelope.frame), envelope))
        except FrameError:
            self.unreadable += 1


class FileSource:
    """Frames of a recording, in file order.

    Args:
        frames: What `ddpwatch.recording.reader.read_recording` yields.
    """

    def __init__(self, frames: Iterator[tuple[Message, Envelope]]) -> None:
        self.over = False
        self.unreadable = 0
        self.missed = 0
        self._frames = frames

    def read(self, timeout_s: float, limit: int = 5000) -> list[tuple[Message, Envelope]]:
        """See `Source.read`; never waits."""
        batch = []
        for frame in self._frames:
            batch.append(frame)
            if len(batch) == limit:
                return batch
        self.over = True
        return batch

    def close(self) -> None:
        """See `Source.close`."""


def newest_run() -> rundir.RunInfo | None:
    """The live run that started last, None if there is none."""
    return next(iter(rundir.live_runs()), None)
