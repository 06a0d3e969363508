"""What agents of other nodes and the root say to each other, over CURVE.

An agent opens each connection with `Open`, and sends once it is welcome. It numbers its batches and keeps each until
the root has acknowledged it, so a connection that breaks loses and doubles nothing.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ddpwatch.sampling.lease import FULL_PPM
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.wire.messages import Count, Name, Ns

PROTOCOL_VERSION: Final = 1
UNSEEN_S: Final = 6.0  # without anything from an agent, it is not known how its ranks are
ZAP_DOMAIN: Final = b"ddpwatch"
Frames = Annotated[list[bytes], Meta(max_length=65536)]
Budget = Annotated[int, Meta(ge=0, le=FULL_PPM)]
Slot = Annotated[int, Meta(ge=0, lt=1 << 44)]  # what the ranks' page holds (`ddpwatch.sampling.lease`)


class Open(msgspec.Struct, tag="open", frozen=True):
    """First on each connection. ``restarts`` are the agent's, ``first`` is the next batch, ``host`` the host's name."""

    restarts: Count
    first: Count
    host: Name = ""
    version: Count = PROTOCOL_VERSION


class Introduction(msgspec.Struct, tag="introduction", frozen=True):
    """Hellos, groups and layouts that were acknowledged by a root that has died."""

    frames: Frames


class Batch(msgspec.Struct, tag="batch", frozen=True):
    """Frames in their order. ``lost`` counts frames that had no room in the agent, since its start."""

    seq: Annotated[int, Meta(ge=1, lt=1 << 53)]
    frames: Frames
    lost: Count = 0


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """A sign of life and a measurement of the clocks. ``wanted_ppm`` is the budget that the agent's viewers ask for."""

    sent_ns: Ns
    wanted_ppm: Budget = 0


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """``seq`` is the newest batch that this root has from this agent, 0 if none."""

    seq: Count
    host: Name
    run_id: Name


class Reopen(msgspec.Struct, tag="reopen", frozen=True):
    """The root does not know this connection: it was started again."""


class Ack(msgspec.Struct, tag="ack", frozen=True):
    """All batches up to this one have come."""

    seq: Count


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """The ping's ``sent_ns``, and when the root received and answered it: on the clock of ``boot_id``, ``time_ns``.

    ``pings`` is how many the root has time for in a round.
    """

    sent_ns: Ns
    received_ns: Ns
    replied_ns: Ns
    boot_id: Name
    time_ns: Name
    pings: Count = 0


class GrantedLease(msgspec.Struct, tag="lease", frozen=True):
    """A lease from the root: what sampling may cost from a slot on, for `ddpwatch.sampling.lease.LEASE_NS`."""

    ppm: Budget
    first_slot: Slot


Up = Open | Introduction | Batch | Ping
Down = Welcome | Reopen | Ack | Pong | GrantedLease | StackOrder
_encoder = msgspec.msgpack.Encoder()
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


def pack(message: Up | Down) -> bytes:
    """Encodes a message."""
    return _encoder.encode(message)


def unpack_up(data: bytes) -> Up | None:
    """Returns a message to the root; None if it is something else."""
    try:
        return _up.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def unpack_down(data: bytes) -> Down | None:
    """Returns a message to an agent; None if it is something else."""
    try:
        return _down.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
