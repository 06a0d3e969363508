"""What a rank and the collector that it started say to each other: JSON lines over a pair of sockets, or a last file.

The rank holds keys and addresses, so that a collector that is started again gets the same ones.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Annotated

import msgspec

from ddpwatch.run.regular import MOST_BYTES, read_regular, write_whole
from ddpwatch.wire.keys import KeyPair

LINE_LIMIT = 1 << 20  # a node's ranks are the longest
NodeName = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,12}$")]  # `ddpwatch.run.rundir.node`


class Listen(msgspec.Struct, tag="listen", frozen=True):
    """To the collector of rank 0: be the root, with these keys; at the endpoint that it had before, if it had one."""

    keys: KeyPair
    endpoint: str = ""


class Admit(msgspec.Struct, tag="admit", frozen=True):
    """To the root: whose public key this is, and the ranks that this node may speak for. The newest one counts."""

    node: NodeName
    key: str
    ranks: list[int]


class Connect(msgspec.Struct, tag="connect", frozen=True):
    """To the agent of another host: where the root is, its public key, and the agent's own keys and node."""

    endpoint: str
    key: str
    keys: KeyPair
    node: NodeName


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """From the collector: it takes frames."""


class Listening(msgspec.Struct, tag="listening", frozen=True):
    """From the root: where it listens; with an empty endpoint, why it does not."""

    endpoint: str
    error: str = ""


class Unreachable(msgspec.Struct, tag="unreachable", frozen=True):
    """From an agent, once: the root does not answer."""

    endpoint: str


Order = Listen | Admit | Connect
Report = Ready | Listening | Unreachable
_decoder: msgspec.json.Decoder[Order | Report] = msgspec.json.Decoder(Order | Report)


class ControlSocket:
    """One end of the pair. Never waits: what the other end does not take yet is sent with the next call."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = b""
        self._received = b""

    def fileno(self) -> int:
        """Returns its number, for a poller; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something still waits to be sent."""
        return bool(self._unsent)

    def send(self, message: Order | Report | None = None) -> None:
        """Sends a message, after those that still wait; None: only those."""
        if message is not None:
            self._unsent += msgspec.json.encode(message) + b"\n"
        with contextlib.suppress(OSError):  # full, or nobody is there any longer
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_NOSIGNAL) :]

    def receive(self) -> list[Order | Report]:
        """Returns what has come. Closes this end once the other one is closed."""
        with contextlib.suppress(BlockingIOError):
            while data := self._read():
                self._received += data
            self.close()
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > LINE_LIMIT:
            self.close()
        return [message for line in lines if (message := _message(line)) is not None]

    def close(self) -> None:
        """Closes it. Safe to call more than once."""
        self._socket.close()

    def _read(self) -> bytes:
        try:
            return self._socket.recv(1 << 16)
        except BlockingIOError:
            raise
        except OSError:  # closed on either side
            return b""


def _message(line: bytes) -> Order | Report | None:
    with contextlib.suppress(msgspec.DecodeError):
        return _decoder.decode(line)
    return None


class RestFile:
    """What a rank leaves in the run directory that ends before its collector is up, as in a very short job.

    Takes frames in place of a socket, and writes them when it is closed.

    Args:
        path: The file, which does not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._frames = bytearray()

    def send(self, data: bytes, flags: int = 0) -> None:
        """Takes a frame, as long as the file can be read again; a job of seconds sends less."""
        if len(self._frames) + len(data) < MOST_BYTES:
            self._frames += len(data).to_bytes(4, "little") + data

    def close(self) -> None:
        """Writes the file. A collector that looks meanwhile does not see it; on a full disk, nothing stays."""
        with contextlib.suppress(OSError):
            write_whole(self._path, bytes(self._frames))


def take_rest(path: Path) -> list[bytes]:
    """Returns the frames that a rank has left; they are there no longer."""
    try:
        left = read_regular(path, flags=os.O_NOFOLLOW)
        path.unlink(missing_ok=True)
    except OSError:
        return []
    frames = []
    while left:
        end = 4 + int.from_bytes(left[:4], "little")
        frames.append(left[4:end])
        left = left[end:]
    return frames
