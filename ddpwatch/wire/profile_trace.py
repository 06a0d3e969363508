"""The events of a profile, packed into a message: column by column, as numbers that are small, and compressed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import zstandard

from ddpwatch.common.unpacking import unpacked
from ddpwatch.wire.messages import MAX_FRAME_BYTES, MAX_TRACE_BYTES, FrameError, Ns

LEVEL: Final = 9

Starts = Sequence[tuple[int, int]]


class ProfiledEvent(NamedTuple):
    """What the profiler has recorded: an operator on a thread, or what a GPU has done on a stream; ns."""

    name: str
    start: int
    end: int
    lane: int = 0
    on_gpu: bool = False


class _Packed(msgspec.Struct, array_like=True):
    """Steps with their starts, and events: each starts so many ns after the one before."""

    starts: list[tuple[Ns, Ns]]
    names: list[str]
    lanes: list[tuple[Ns, bool]]
    name: list[Annotated[int, msgspec.Meta(ge=0)]]
    lane: list[Annotated[int, msgspec.Meta(ge=0)]]
    after: list[Ns]
    ns: list[Ns]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Packed)


def pack(events: Sequence[ProfiledEvent], starts: Starts) -> bytes:
    """Packs a profile.

    Args:
        events: Its events.
        starts: The steps' slots, with when each started (ns); the last one only ends the one before.

    Returns:
        Events of as many steps, from the first on, as a message has room for; nothing without one.
    """
    ordered = sorted(events, key=lambda event: event.start)
    for steps in range(len(starts), 1, -1):
        content = _encoder.encode(_packed([one for one in ordered if one.start < starts[steps - 1][1]], starts[:steps]))
        if len(content) <= MAX_FRAME_BYTES and len(packed := zstandard.compress(content, LEVEL)) <= MAX_TRACE_BYTES:
            return packed
    return b""


def _packed(events: Sequence[ProfiledEvent], starts: Starts) -> _Packed:
    names: dict[str, int] = {}
    lanes: dict[tuple[int, bool], int] = {}
    before = starts[0][1]
    found = _Packed(list(starts), [], [], [], [], [], [])
    for event in events:
        found.name.append(names.setdefault(event.name, len(names)))
        found.lane.append(lanes.setdefault((event.lane, event.on_gpu), len(lanes)))
        found.after.append(event.start - before)
        found.ns.append(event.end - event.start)
        before = event.start
    found.names, found.lanes = [name[:500] for name in names], list(lanes)
    return found


def unpack(packed: bytes) -> tuple[list[tuple[int, int]], list[ProfiledEvent]]:
    """Returns a profile's steps with their starts, and its events by their starts.

    Raises:
        FrameError: `pack` did not make it, or it is damaged.
    """
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= MAX_FRAME_BYTES:
            raise ValueError(f"{size} bytes")
        found = _decoder.decode(unpacked(packed))
        return found.starts, list(_events(found))
    except (ValueError, IndexError, zstandard.ZstdError, msgspec.DecodeError) as error:
        raise FrameError("invalid", f"a profile: {error}", len(packed)) from None


def _events(found: _Packed) -> Iterator[ProfiledEvent]:
    at = found.starts[0][1]
    for name, lane, after, ns in zip(found.name, found.lane, found.after, found.ns, strict=True):
        at += after
        yield ProfiledEvent(found.names[name], at, at + ns, *found.lanes[lane])
