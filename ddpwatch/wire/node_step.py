"""Packs the steps of a node's ranks into one message, and expands it again.

Ranks of a job mostly do the same at nearly the same time, so their encoded Steps have much in common. All are
compressed as one. They come back as they were, except hook columns that were left out: these are empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Final

import msgspec
import zstandard

from ddpwatch.common.unpacking import unpacked
from ddpwatch.wire.messages import MAX_FRAME_BYTES, MAX_NODE_RANKS, FrameError, NodeStep, Step, decode
from ddpwatch.wire.transport import Envelope, Frame

MAX_UNPACKED: Final = MAX_FRAME_BYTES - (64 << 10)  # so that a message is a frame even if nothing can be compressed
LEVEL: Final = 12  # from here on, zstd looks for matches of three bytes: the upper ones of a time

_encoder = msgspec.msgpack.Encoder()
_as_sent: Final = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_NODE_RANKS)])
_steps: Final = msgspec.msgpack.Decoder(list[Step])


def pack(node: int, steps: Sequence[Step], hooks: Collection[int] | None = None) -> NodeStep:
    """Packs one step of a node's ranks into one message.

    Args:
        node: The node's number.
        steps: At most one per rank, at least one, all with the same number.
        hooks: The ranks whose hook columns are kept; None for all.

    Raises:
        FrameError: The steps are too large for one message.
    """
    content = _encoder.encode([step if hooks is None or step.rank in hooks else _without_hooks(step) for step in steps])
    if len(content) > MAX_UNPACKED:
        raise FrameError("oversize", f"{len(content)} bytes in one step of a node")
    packed = zstandard.compress(content, LEVEL)
    ranks, longest_ns = [step.rank for step in steps], max(step.duration_ns for step in steps)
    return NodeStep(node=node, step=steps[0].step, ranks=ranks, packed=packed, longest_ns=longest_ns)


def expand(message: NodeStep) -> list[Step]:
    """Returns the steps, in the order in which they were packed.

    Raises:
        FrameError: The message was not made by `pack`, or is damaged.
    """
    return [step for step, _ in _expanded(message)]


def read(envelope: Envelope) -> list[Frame]:
    """Decodes a frame: to its message; a node's step to its ranks' steps, in envelopes of the same number and time.

    Raises:
        FrameError: As `decode` and `expand`.
    """
    message = decode(envelope.frame)
    if not isinstance(message, NodeStep):
        return [(message, envelope)]
    seq, received_ns = envelope.seq, envelope.received_ns
    return [(step, Envelope(seq, received_ns, frame)) for step, frame in _expanded(message)]


def without_hooks(message: NodeStep) -> NodeStep:
    """Returns the same without any hook columns; the message itself if it cannot be read."""
    try:
        return pack(message.node, expand(message), ())
    except FrameError:
        return message


def _without_hooks(step: Step) -> Step:
    return msgspec.structs.replace(step, hook_param=[], hook_ns=[]) if step.hook_ns else step


def _expanded(message: NodeStep) -> list[tuple[Step, bytes]]:
    """Returns the steps with their frames. They are of the ranks and the number for which the message was accepted."""
    content = b""
    try:
        content = _unpacked(message.packed)
        frames = list(map(bytes, _as_sent.decode(content)))
        steps = _steps.decode(content)
    except (ValueError, RecursionError, zstandard.ZstdError, msgspec.DecodeError) as error:
        raise FrameError("invalid", f"a node's step: {error}", len(content)) from None
    if [step.rank for step in steps] != message.ranks or any(step.step != message.step for step in steps):
        raise FrameError("invalid", "a node's step: of other ranks, or of another number", len(content))
    return list(zip(steps, frames, strict=True))


def _unpacked(packed: bytes) -> bytes:
    size = zstandard.frame_content_size(packed)
    if not 0 <= size <= MAX_UNPACKED:
        raise ValueError(f"{size} bytes")
    return unpacked(packed)
