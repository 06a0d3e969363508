"""Where a viewer's frames come from: a running job, here or through ssh, or a recording that grows.

The last is `ddpwatch.recording.follow`.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import zmq

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.run import rundir
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.viewer.over_ssh import address
from ddpwatch.viewer.over_ssh.link import SshLink
from ddpwatch.wire import node_step, transport
from ddpwatch.wire.messages import Bye, FrameError, Status, decode
from ddpwatch.wire.transport import RESTART_BITS, SNAPSHOT, Envelope, Frame, Socket

ANSWER_S = 5.0  # without a frame of a snapshot; then the viewer asks again
RESYNC_S = 0.5  # least time between two requests for a snapshot; doubles while frames are lost again and again
RESYNC_MAX_S = 30.0
HELD_FRAMES = 20_000  # live frames, while the snapshot is under way
HELD_BYTES = 64 * 1024 * 1024
SNAPSHOT_S = 10.0  # a collector sends its snapshot within this, or is gone
SILENCE_S = 5.0  # the collector sends twice a second; after this long without a frame it counts as gone


class Source(Protocol):
    """A stream of frames.

    Attributes:
        over: No more frames will come.
        unreadable: Frames that could not be decoded, skipped.
        missed: Frames lost on the way.
        trouble: Why no frames come at present, or none will any more, if the source knows: one line.
        notes: What else a user has to know of the frames, one line each; whoever reads them removes them.
    """

    over: bool
    unreadable: int
    missed: int
    trouble: str
    notes: list[str]

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        """Returns the next frames; waits up to ``timeout_s`` for the first.

        Stops after the message that reaches ``limit``: a message may hold several frames, and a frame several steps.
        """
        ...

    def order_stacks(self, order: StackOrder | None) -> None:
        """Asks for samples of stacks in place of those asked for before, None: for no more. They come as frames do.

        Raises:
            UsageError: Nothing can be asked there.
        """
        ...

    def close(self) -> None:
        """Closes sockets and files."""
        ...


def may_go_on(source: Source, endpoint: str) -> bool:
    """Returns whether frames may come after a silence: the run is live, also while its collector is started again.

    Of a run on another host, the source's other end decides.
    """
    return not source.over and (endpoint.startswith(address.SCHEME) or rundir.is_live(endpoint))


def snapshot(source: LiveSource, patience_s: float = SNAPSHOT_S) -> Iterator[Frame]:
    """Yields all that a job's collector retains, and what comes then up to a status, which comes twice a second.

    By then, ranks have sent a heartbeat, and which of them hold up the others is judged by the newest of each.

    Raises:
        UsageError: It does not answer.
    """
    deadline, has_status = time.monotonic() + patience_s, False
    while time.monotonic() < deadline:
        for message, envelope in source.read(0.2):
            yield message, envelope
            is_end = isinstance(message, Bye) and message.rank is None
            is_live = source.synced and envelope.seq > source.retained
            has_status = has_status or is_end or (is_live and isinstance(message, Status))
        if has_status and source.synced:
            return
        if source.over:
            break
    raise UsageError(source.trouble or "the run does not answer", "`ddpwatch ls` shows whether it is still live")


class LiveSource:
    """Frames of a running job: first the snapshot, then the live stream, without a gap or a duplicate.

    If frames are lost because the viewer was too slow (or suspended), it asks for a new snapshot, and also if a
    snapshot does not arrive. It asks less and less often, since every snapshot is more to read. A collector that was
    started again sends one by itself. Of the live frames held back meanwhile the oldest are dropped first: they are in
    the snapshot, or make a gap like any other.

    Args:
        endpoint: The collector's publishing endpoint, or ``ssh://user@node/run``.
        budget_ppm: What sampling may cost while this viewer is attached, in ppm of a step; 0 if nobody looks at it.
        as_sent: Leaves the steps of nodes packed: for a recording.

    Attributes:
        missed: Frames lost on the way that no snapshot could replace.
        retained: Sequence number up to which the newest snapshot goes.

    Raises:
        DdpwatchError: There is no such run on the other host, or no way to it.
    """

    def __init__(self, endpoint: str, budget_ppm: int = 0, as_sent: bool = False) -> None:
        self.over = False
        self.unreadable = 0
        self.missed = 0
        self.retained = 0
        self.trouble = ""
        self.notes: list[str] = []
        self._as_sent = as_sent
        self._token = secrets.token_hex(8).encode()
        self._context: transport.Context | None = None
        self._socket: Socket | SshLink
        if endpoint.startswith(address.SCHEME):
            self._socket = SshLink(address.parse(endpoint))
        else:
            self._context = transport.Context()
            try:
                self._socket = transport.viewer_socket(self._context, endpoint)
            except DdpwatchError:
                self._context.term()
                raise
        for topic in transport.viewer_topics(self._token, budget_ppm):
            self._socket.subscribe(topic)
        self._order: StackOrder | None = None
        self._synced = False
        self._held_back: deque[Envelope] = deque()
        self._held_bytes = 0
        self._newest = 0
        self._restarts = 0  # of the collector
        self._recovered = 0
        self._presumed_lost = 0
        self._delivered = 0  # up to which sequence number, of the snapshot under way
        self._pause_s = 0.0
        self._asked_s = time.monotonic()
        self._ask_at_s = self._asked_s + ANSWER_S  # unless synced by then

    @property
    def synced(self) -> bool:
        """True once all of the snapshot has been read, unless frames were lost since."""
        return self._synced

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        frames: list[Frame] = []
        if not self._synced:
            timeout_s = min(timeout_s, max(0.0, self._ask_at_s - time.monotonic()) + 0.001)
        arrived = self._socket.poll(int(timeout_s * 1000))
        while arrived and len(frames) < limit:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            for envelope in self._in_order(parts):
                try:
                    frames += [(decode(envelope.frame), envelope)] if self._as_sent else node_step.read(envelope)
                except FrameError:
                    self.unreadable += 1
        if not self._synced and time.monotonic() >= self._ask_at_s:
            self._ask()
        if isinstance(self._socket, SshLink):
            self.over, self.trouble = self._socket.over, self._socket.trouble
        return frames

    def order_stacks(self, order: StackOrder | None) -> None:
        if self._order is not None:
            self._socket.unsubscribe(transport.STACKS + self._order.topic)
        if order is not None:
            self._socket.subscribe(transport.STACKS + order.topic)
        self._order = order

    def close(self) -> None:
        self._socket.close()
        if self._context is not None:
            self._context.term()

    def _in_order(self, parts: list[bytes]) -> Iterator[Envelope]:
        """Passes on the snapshot, then the live frames held back meanwhile; drops duplicates."""
        parsed = transport.parse_published(parts)
        if parsed is None:
            self.unreadable += 1
            return
        topic, envelopes = parsed
        for envelope in envelopes:
            if envelope.seq >> RESTART_BITS > self._restarts:
                yield from self._start_over(envelope.seq >> RESTART_BITS)
            if topic == transport.LIVE:
                yield from self._from_live(envelope)
            elif topic == SNAPSHOT + self._token:
                yield from self._from_snapshot(envelope)

    def _start_over(self, restarts: int) -> Iterator[Envelope]:
        """Goes on with the snapshot of a collector that was started again. ZeroMQ sends it the subscriptions again."""
        newest = max(self._newest, self._delivered)
        yield from [envelope for envelope in self._held_back if envelope.seq > newest]
        self._asked_s = time.monotonic()
        self._ask_at_s = self._asked_s + ANSWER_S
        self._restarts = restarts
        self._synced = False
        self._newest = self._recovered = self._presumed_lost = self._delivered = 0
        self._held_back, self._held_bytes = deque(), 0

    def _from_live(self, envelope: Envelope) -> Iterator[Envelope]:
        if not self._synced:
            self._hold_back(envelope)
        elif envelope.seq == self._newest + 1:
            self._newest = envelope.seq
            yield envelope
        elif envelope.seq > self._newest:
            self._resync(envelope)

    def _from_snapshot(self, envelope: Envelope) -> Iterator[Envelope]:
        if self._synced:
            return
        if envelope.frame:
            self._ask_at_s = time.monotonic() + ANSWER_S
            if envelope.seq > max(self._newest, self._delivered):
                self._recovered += 1
                self._delivered = envelope.seq
                yield envelope
            return
        self._synced = True
        self.retained = envelope.seq
        if self._newest:  # frames from before the viewer attached are not lost
            self.missed += max(0, envelope.seq - self._newest - self._recovered) - self._presumed_lost
        self._recovered = self._presumed_lost = self._delivered = 0
        self._newest = max(self._newest, envelope.seq)
        held, self._held_back, self._held_bytes = self._held_back, deque(), 0
        for live in held:
            yield from self._from_live(live)

    def _resync(self, envelope: Envelope) -> None:
        """Asks later for a new snapshot: the frames before this one are lost unless it has them."""
        self._presumed_lost = envelope.seq - self._newest - 1
        self.missed += self._presumed_lost
        self._synced = False
        self._hold_back(envelope)
        now = time.monotonic()
        if now - self._asked_s > RESYNC_MAX_S:
            self._pause_s = 0.0
        self._ask_at_s = max(now, self._asked_s + self._pause_s)

    def _ask(self) -> None:
        """Asks for a snapshot, under a new token."""
        self._socket.unsubscribe(SNAPSHOT + self._token)
        self._token = secrets.token_hex(8).encode()
        self._socket.subscribe(SNAPSHOT + self._token)
        self._pause_s = min(2 * self._pause_s, RESYNC_MAX_S) or RESYNC_S
        self._asked_s = time.monotonic()
        self._ask_at_s = self._asked_s + max(ANSWER_S, self._pause_s)

    def _hold_back(self, envelope: Envelope) -> None:
        self._held_back.append(envelope)
        self._held_bytes += len(envelope.frame)
        while len(self._held_back) > HELD_FRAMES or self._held_bytes > HELD_BYTES:
            self._held_bytes -= len(self._held_back.popleft().frame)
