"""Sockets and endpoints: who binds, who connects, and the limits on both.

Ranks PUSH frames to the collector's PULL; viewers SUBscribe to its XPUB. Agents of other hosts connect a DEALER to the
ROUTER of rank 0's collector, the root, with CURVE: this alone crosses hosts. A published message has a topic, a header
(sequence number and receive time of each frame), and one frame or several that the collector sends at once.
Nothing here decodes a frame.

How a viewer joins without a gap or a duplicate: it subscribes to ``LIVE``, and then to ``SNAPSHOT`` + a random token.
Subscriptions arrive in order, so the live stream already flows when the collector sees the token. The collector sends
its snapshot on the token's topic, then an empty frame with the newest sequence number, and the viewer drops live frames
up to that number.

A viewer that somebody looks at also subscribes to ``WANT`` + a budget in ppm of the step: nothing is ever sent there,
but the collector sees it, and raises the sampling (`ddpwatch.sampling.lease`). ``STACKS`` + an order asks ranks for
samples of their stacks in the same way (`ddpwatch.sampling.stack_order`). ZeroMQ unsubscribes a viewer that dies.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.wire.keys import KeyPair
from ddpwatch.wire.messages import MAX_FRAME_BYTES, Message

LIVE: Final = b"live"
SNAPSHOT: Final = b"snap."
WANT: Final = b"want."
STACKS: Final = b"stacks."
RANK_QUEUE: Final = 1000
VIEWER_QUEUE: Final = 6_000  # messages: up to 384,000 frames, or 375 MiB of frames that are no larger than a message
PUBLISHED_FRAMES: Final = 64  # in a message, at most
PUBLISHED_BYTES: Final = 64 * 1024  # in a message, unless its only frame is larger
NODE_QUEUE: Final = 1000  # messages per connection between the root and an agent
HANDSHAKE_S: Final = 5.0  # between the two, at most: on a busy machine it takes seconds
# The collector counts and refuses frames above MAX_FRAME_BYTES; above this limit ZeroMQ drops the connection before it
# allocates anything.
TRANSPORT_LIMIT: Final = 16 * MAX_FRAME_BYTES
RESTART_BITS: Final = 40  # a sequence number's bits from here on count the collectors of the run that have died
ENDPOINTS: Final = "endpoints look like ipc:///path or tcp://127.0.0.1:29500"
_HEADER: Final = struct.Struct(">QQ")
# As enums, these cost as much as what they are for.
DONTWAIT: Final = int(zmq.DONTWAIT)
RCVMORE: Final = int(zmq.RCVMORE)
SNDMORE: Final = int(zmq.SNDMORE)

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class Polled(NamedTuple):
    """What a poll has found.

    Attributes:
        ready: The sources that can be read.
        at_ns: When it ended (monotonic).
    """

    ready: AbstractSet[object]
    at_ns: int

    def moments(self, source: Socket) -> Iterator[int]:
        """Yields by when each message from a source was there: to be asked once each is received.

        The first one was there when the poll ended, as polling reads it.
        """
        if source in self.ready:
            yield self.at_ns
        while True:
            yield time.monotonic_ns()


NOT_POLLED: Final = Polled(frozenset(), 0)


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A frame with what the collector adds.

    Attributes:
        seq: Sequence number of the frame in this run, from 1. A collector that was started again continues with
            the next multiple of 2 ** `RESTART_BITS`.
        received_ns: Wall-clock receive time on the collector's host, ns since the Unix epoch.
        frame: The encoded message, byte for byte as it was sent.
    """

    seq: int
    received_ns: int
    frame: bytes

    def parts(self, topic: bytes) -> list[bytes]:
        """Returns the envelope as a multipart message."""
        return [topic, _HEADER.pack(self.seq, self.received_ns), self.frame]


class ReceiveClock:
    """Receive times: the system's time, that never goes back. Where that is set back, healthy ranks would seem silent.

    Args:
        wall: ns since the Unix epoch.
        steady: ns of a clock that nobody sets.
    """

    def __init__(self, wall: Callable[[], int] = time.time_ns, steady: Callable[[], int] = time.monotonic_ns) -> None:
        self._wall = wall
        self._steady = steady
        self._offset_ns = wall() - steady()

    def now_ns(self) -> int:
        """Returns what time it is, in ns since the Unix epoch."""
        steady_ns = self._steady()
        self._offset_ns = max(self._offset_ns, self._wall() - steady_ns)
        return steady_ns + self._offset_ns


Frame = tuple[Message, Envelope]
"""A frame as a reader receives it: decoded, and in its envelope."""


def poll(poller: zmq.Poller, timeout_ms: int) -> Polled:
    """Waits until a source can be read, for so long at most."""
    found = poller.poll(timeout_ms)
    at_ns = time.monotonic_ns()
    return Polled({source for source, _ in found}, at_ns)


def batches(envelopes: Iterable[Envelope]) -> Iterator[list[Envelope]]:
    """Yields frames by the message: each costs the collector as much as several frames, and queues count messages."""
    batch: list[Envelope] = []
    nbytes = 0
    for envelope in envelopes:
        size = len(envelope.frame)
        if batch and (len(batch) == PUBLISHED_FRAMES or nbytes + size > PUBLISHED_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(envelope)
        nbytes += size
    if batch:
        yield batch


def publish(socket: Socket, topic: bytes, batch: Sequence[Envelope], flags: int = 0) -> None:
    """Sends a batch of frames to viewers, in one message.

    Raises:
        zmq.Again: The flags say not to wait, and a queue is full. Nothing was sent.
    """
    more = flags | SNDMORE
    socket.send(topic, more)
    socket.send(b"".join([_HEADER.pack(envelope.seq, envelope.received_ns) for envelope in batch]), more)
    for envelope in batch[:-1]:
        socket.send(envelope.frame, more)
    socket.send(batch[-1].frame, flags)


def parse_published(parts: list[bytes]) -> tuple[bytes, list[Envelope]] | None:
    """Returns the topic and envelopes of a published multipart message; None if it is something else."""
    if len(parts) < 3 or len(parts[1]) != _HEADER.size * (len(parts) - 2):
        return None
    headers = _HEADER.iter_unpack(parts[1])
    return parts[0], [Envelope(seq, at_ns, frame) for (seq, at_ns), frame in zip(headers, parts[2:], strict=True)]


def check_endpoint(endpoint: str) -> str:
    """Returns the endpoint if it is a Unix socket or loopback TCP.

    Raises:
        UsageError: It is of another kind, or reachable from other machines, which would need authentication.
    """
    if endpoint.startswith(("ipc://", "inproc://")):
        return endpoint
    if endpoint.startswith("tcp://"):
        host = endpoint[len("tcp://") :].rpartition(":")[0].strip("[]")
        if host in ("127.0.0.1", "localhost", "::1"):
            return endpoint
        raise UsageError(
            f"{endpoint}: only loopback addresses are allowed",
            "frames are not authenticated; `ddpwatch attach ssh://node/run` goes through ssh",
        )
    raise UsageError(f"{endpoint}: not an endpoint", ENDPOINTS)


def _socket(context: Context, kind: int, **options: Any) -> Socket:
    socket = context.socket(kind)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    return socket


def rank_push(context: Context) -> Socket:
    """Returns a rank's sending socket, still to be connected.

    Queues at most `RANK_QUEUE` frames and hardly delays the process's exit.
    """
    # For which an ending rank waits for a collector that is still starting, or dead
    socket = _socket(context, zmq.PUSH, SNDHWM=RANK_QUEUE, LINGER=500, RECONNECT_IVL=50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    return socket


class ConnectionMonitor:
    """Receives events of a socket's connections.

    Args:
        socket: Not yet bound or connected.
        events: Which ones (``zmq.EVENT_…``).
    """

    def __init__(self, socket: Socket, events: int) -> None:
        self._socket = socket
        self._events: Socket = socket.get_monitor_socket(events)

    @property
    def source(self) -> Socket:
        """What to poll."""
        return self._events

    def events(self) -> Iterator[int]:
        """Yields the events since the last call. Never waits."""
        while True:
            try:
                parts = self._events.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield int.from_bytes(parts[0][:2], sys.byteorder)

    def close(self) -> None:
        """Closes it, before the socket is closed: an event that nobody receives blocks ZeroMQ."""
        self._socket.disable_monitor()
        self._events.close()


def collector_pull(context: Context) -> Socket:
    """Returns the collector's socket for frames from ranks, still to be bound."""
    # Frames per connection; when the collector does not keep up, more wait in the rank
    return _socket(context, zmq.PULL, RCVHWM=1000, LINGER=0, MAXMSGSIZE=TRANSPORT_LIMIT)


def collector_publish(context: Context, endpoint: str) -> Socket:
    """Returns the collector's socket for viewers.

    A viewer that falls behind loses frames; the collector never waits.
    """
    socket = _socket(context, zmq.XPUB, SNDHWM=VIEWER_QUEUE, LINGER=500, MAXMSGSIZE=4096)
    socket.bind(check_endpoint(endpoint))
    return socket


def root_router(context: Context, keys: KeyPair, domain: bytes) -> Socket:
    """Returns the root's socket for agents of other hosts, still to be bound.

    Takes only CURVE, and asks ZAP about each key.
    """
    socket = _socket(context, zmq.ROUTER, RCVHWM=NODE_QUEUE, SNDHWM=NODE_QUEUE, LINGER=0, MAXMSGSIZE=TRANSPORT_LIMIT)
    options = {"HEARTBEAT_IVL": 2000, "HEARTBEAT_TIMEOUT": 10_000, "BACKLOG": 1024}
    options |= {"HANDSHAKE_IVL": int(1000 * HANDSHAKE_S)}
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    return socket


def agent_dealer(context: Context, endpoint: str, root_key: str, keys: KeyPair) -> Socket:
    """Returns an agent's socket, which connects to the root and knows its public key.

    Raises:
        DdpwatchError: That is no address, or no key.
    """
    socket = _socket(context, zmq.DEALER, RCVHWM=NODE_QUEUE, SNDHWM=NODE_QUEUE, LINGER=0, MAXMSGSIZE=1 << 16)
    options = {"IPV6": "[" in endpoint, "RECONNECT_IVL": 200, "RECONNECT_IVL_MAX": 1000}
    options |= {"CONNECT_TIMEOUT": 2000, "HANDSHAKE_IVL": int(1000 * HANDSHAKE_S)}
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    try:
        socket.curve_serverkey = root_key.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.connect(endpoint)
    except (zmq.ZMQError, ValueError) as error:
        socket.close()
        raise DdpwatchError(f"{endpoint[:100]!r} with key {root_key[:40]!r} is no root: {error}") from error
    return socket


def viewer_socket(context: Context, endpoint: str) -> Socket:
    """Returns a viewer's socket, without subscriptions.

    Raises:
        UsageError: The endpoint is none, or not of this machine.
    """
    check_endpoint(endpoint)
    socket = _socket(context, zmq.SUB, RCVHWM=VIEWER_QUEUE, LINGER=0, MAXMSGSIZE=TRANSPORT_LIMIT, RECONNECT_IVL=100)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise UsageError(f"{endpoint[:200]}: not an endpoint ({error.strerror})", ENDPOINTS) from error
    return socket


def viewer_topics(token: bytes, budget_ppm: int = 0) -> list[bytes]:
    """Returns what a viewer subscribes to, in this order.

    The live stream, a snapshot under ``token``, a budget above 0.
    """
    return [LIVE, SNAPSHOT + token, *([WANT + str(budget_ppm).encode()] if budget_ppm else [])]
