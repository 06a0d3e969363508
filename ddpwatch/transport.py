"""Sockets and endpoints: who binds, who connects, and the limits on both.

Ranks PUSH frames to the collector's PULL; viewers SUBscribe to its XPUB. A published frame has three parts:
topic, envelope header (sequence number and receive time), frame. Nothing here decodes a frame.

Joining without gap or duplicate: a viewer subscribes to ``LIVE`` and then to a topic of its own,
``SNAPSHOT`` + a random token. Subscriptions arrive in order, so when the collector sees the token the live
stream already flows. It answers on the token's topic with all it retains, ends with an empty frame that
carries the newest sequence number, and the viewer drops live frames up to that number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import zmq

from ddpwatch.errors import UsageError
from ddpwatch.messages import MAX_FRAME_BYTES

LIVE: Final = b"live"
SNAPSHOT: Final = b"snap."
RANK_QUEUE: Final = 1000
# How long a rank that ends may wait for a collector that is still starting, or dead. A job's exit is worth more.
LAST_WORDS_MS: Final = 500
VIEWER_QUEUE: Final = 100_000
# What a socket accepts at all. Between MAX_FRAME_BYTES and this the collector counts and refuses a frame
# itself; beyond it ZeroMQ drops the connection before allocating.
TRANSPORT_LIMIT: Final = 16 * MAX_FRAME_BYTES
_HEADER: Final = struct.Struct(">QQ")

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A raw frame with what the collector knows of it.

    Attributes:
        seq: Running number of the frame in this run, from 1.
        received_ns: Wall-clock receive time on the collector's host, ns since the Unix epoch.
        frame: The bytes as the sender sent them.
    """

    seq: int
    received_ns: int
    frame: bytes

    def parts(self, topic: bytes) -> list[bytes]:
        """The envelope as a multipart message."""
        return [topic, _HEADER.pack(self.seq, self.received_ns), self.frame]


def parse_envelope(parts: list[bytes]) -> tuple[bytes, Envelope] | None:
    """The topic and envelope of a published multipart message, or None if it is not one."""
    if len(parts) != 3 or len(parts[1]) != _HEADER.size:
        return None
    seq, received_ns = _HEADER.unpack(parts[1])
    return parts[0], Envelope(seq, received_ns, parts[2])


def check_endpoint(endpoint: str) -> str:
    """Accepts Unix sockets and loopback TCP; anything else waits until it can be authenticated.

    Raises:
        UsageError: The endpoint is of another kind, or would be reachable from other machines.
    """
    if endpoint.startswith(("ipc://", "inproc://")):
        return endpoint
    if endpoint.startswith("tcp://"):
        host = endpoint[len("tcp://") :].rpartition(":")[0].strip("[]")
        if host in ("127.0.0.1", "localhost", "::1"):
            return endpoint
        raise UsageError(
            f"{endpoint}: only loopback addresses are allowed",
            "frames are not authenticated; use ssh to the machine that runs the job",
        )
    raise UsageError(f"{endpoint}: not an endpoint", "it looks like ipc:///path or tcp://127.0.0.1:port")


def _socket(context: Context, kind: int, **options: Any) -> Socket:
    socket = context.socket(kind)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    return socket


def rank_push(context: Context, endpoint: str) -> Socket:
    """The sending end in a rank. Queues a bounded number of frames and never delays the process's exit."""
    socket = _socket(context, zmq.PUSH, SNDHWM=RANK_QUEUE, LINGER=LAST_WORDS_MS, RECONNECT_IVL=50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    socket.connect(check_endpoint(endpoint))
    return socket


def collector_pull(context: Context, endpoint: str) -> Socket:
    """The receiving end in the collector."""
    socket = _socket(context, zmq.PULL, RCVHWM=20 * RANK_QUEUE, LINGER=0, MAXMSGSIZE=TRANSPORT_LIMIT)
    socket.bind(check_endpoint(endpoint))
    return socket


def collector_publish(context: Context, endpoint: str) -> Socket:
    """The publishing end in the collector. A viewer that falls behind loses frames; the collector never waits."""
    socket = _socket(context, zmq.XPUB, SNDHWM=VIEWER_QUEUE, LINGER=500, MAXMSGSIZE=4096)
    socket.bind(check_endpoint(endpoint))
    return socket


def viewer_subscribe(context: Context, endpoint: str, token: bytes) -> Socket:
    """The receiving end in a viewer, already asking for what the collector retains under ``token``."""
    socket = _socket(context, zmq.SUB, RCVHWM=VIEWER_QUEUE, LINGER=0, MAXMSGSIZE=TRANSPORT_LIMIT, RECONNECT_IVL=100)
    socket.connect(check_endpoint(endpoint))
    socket.subscribe(LIVE)
    socket.subscribe(SNAPSHOT + token)
    return socket
