"""What goes through the pipes of ssh.

Down: one line (``ddpwatch-stdio``, protocol, version, run, ranks), and then published messages, each behind its length.
Up: lines. ``+TOPIC`` subscribes, ``-TOPIC`` unsubscribes, an empty one says that the viewer is still there.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from ddpwatch.errors import DdpwatchError
from ddpwatch.version import __version__
from ddpwatch.wire.transport import LIVE, SNAPSHOT, STACKS, TRANSPORT_LIMIT, WANT

PROTOCOL: Final = 1
HERE: Final = b"\n"
HERE_S: Final = 5.0  # between two signs of life of a viewer
VIEWER_GONE_S: Final = 60  # without one
_MAGIC: Final = b"ddpwatch-stdio "
_BANNER_BYTES: Final = 1 << 16  # what a login shell may print before the first line
_TOPIC_BYTES: Final = 64
_LENGTHS: Final = struct.Struct(">BBI")  # of a message's three parts


class Opening(NamedTuple):
    """The first line: who speaks, and of which run."""

    protocol: int
    version: str
    run_id: str
    ranks: int

    def line(self) -> bytes:
        """Returns it as it is sent."""
        return _MAGIC + f"{self.protocol} {self.version} {self.run_id} {self.ranks}\n".encode()


def opening(run_id: str, ranks: int) -> Opening:
    """Returns the first line of this version."""
    return Opening(PROTOCOL, __version__, run_id, ranks)


def pack(parts: list[bytes]) -> bytes:
    """Returns a published message: topic, envelope header, frame."""
    topic, header, frame = parts
    return b"".join((_LENGTHS.pack(len(topic), len(header), len(frame)), topic, header, frame))


def request(sign: bytes, topic: bytes) -> bytes:
    """Returns the line that subscribes (``+``) or unsubscribes (``-``)."""
    return sign + topic + b"\n"


def parse_request(line: bytes) -> tuple[bytes, bytes] | None:
    """Returns the sign and topic of a line; None if it asks for nothing."""
    sign, topic = line[:1], line[1:]
    known = topic == LIVE or topic.startswith((SNAPSHOT, STACKS, WANT))
    return (sign, topic) if sign in (b"+", b"-") and known and len(topic) <= _TOPIC_BYTES else None


class Unpacker:
    """Takes apart what arrives, in pieces of any size.

    Attributes:
        opening: The first line, once it is there. What is printed before it is skipped.
    """

    def __init__(self) -> None:
        self.opening: Opening | None = None
        self._buffer = bytearray()
        self._skipped = bytearray()

    @property
    def printed(self) -> str:
        """What came in place of the first line."""
        return "" if self.opening else bytes(self._skipped + self._buffer).decode(errors="replace")

    def feed(self, piece: bytes) -> Iterator[list[bytes]]:
        """Yields the messages that are complete.

        Raises:
            DdpwatchError: This is no ddpwatch, or one with another protocol.
        """
        self._buffer += piece
        while self.opening is None and b"\n" in self._buffer:
            self._read_line()
        if self.opening is None:
            if len(self._skipped) + len(self._buffer) > _BANNER_BYTES:
                raise DdpwatchError("something other than ddpwatch answers", "what does the login shell print there?")
            return
        yield from self._messages()

    def _read_line(self) -> None:
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        _, magic, words = line.rpartition(_MAGIC)  # a prompt without an end of line may stand before it
        if not magic:
            self._skipped += line + b"\n"
            return
        self.opening = _parse_opening(words.decode(errors="replace").split())

    def _messages(self) -> Iterator[list[bytes]]:
        start, buffer = 0, self._buffer
        while len(buffer) - start >= _LENGTHS.size:
            lengths = _LENGTHS.unpack_from(buffer, start)
            if lengths[2] > TRANSPORT_LIMIT:
                raise DdpwatchError(f"a message of {lengths[2]} bytes", "is the connection a terminal?")
            if len(buffer) - start < _LENGTHS.size + sum(lengths):
                break
            start += _LENGTHS.size
            parts = []
            for length in lengths:
                parts.append(bytes(buffer[start : start + length]))
                start += length
            yield parts
        del buffer[:start]


def _parse_opening(words: list[str]) -> Opening:
    """Raises DdpwatchError if the protocol is another one."""
    if words[:1] != [str(PROTOCOL)] or len(words) != 4 or not re.fullmatch(r"[0-9]{1,7}", words[3]):
        version = words[1][:20] if len(words) > 1 else "?"
        raise DdpwatchError(f"ddpwatch {version} there does not speak with {__version__} here", "install the same one")
    return Opening(PROTOCOL, words[1], words[2], int(words[3]))
