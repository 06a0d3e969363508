"""Keys of a run on several hosts, and the seal on what its ranks leave in the job's store. Both are in memory only."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import zmq

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.run.regular import read_regular

SECRET_FILE = "DDPWATCH_SECRET_FILE"
_MAC_DIGITS = 64


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, as Z85 text. Only memory and sockets hold the secret: no argument, environment or file does."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


def new_key_pair() -> KeyPair:
    """Makes a key pair.

    Raises:
        DdpwatchError: ZeroMQ was built without CURVE.
    """
    try:
        public, secret = zmq.curve_keypair()
    except zmq.ZMQError as error:
        raise DdpwatchError("this ZeroMQ has no CURVE, so ranks on other hosts are not watched") from error
    return KeyPair(public.decode(), secret.decode())


class Seal:
    """Signs entries of the store with a secret that all ranks share, where the store has other writers.

    Without a secret, entries are left as they are. An entry's name is signed, too: it has a nonce, so no entry can be
    put in another's place.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret

    def sealed(self, name: str, text: str) -> str:
        """Returns the text, with its signature in front."""
        return self._mac(name, text) + text if self._secret else text

    def opened(self, name: str, entry: str) -> str:
        """Returns the text of an entry.

        Raises:
            DdpwatchError: Its signature is missing or wrong.
        """
        if not self._secret:
            return entry
        mac, text = entry[:_MAC_DIGITS], entry[_MAC_DIGITS:]
        if not hmac.compare_digest(mac.encode(), self._mac(name, text).encode()):
            hint = f"give every rank the same {SECRET_FILE}; if they have it, somebody else writes to the store"
            raise DdpwatchError("an entry of the job's store is not signed with this job's secret", hint)
        return text

    def _mac(self, name: str, text: str) -> str:
        return hmac.new(self._secret, f"{name}\n{text}".encode(), hashlib.sha256).hexdigest()


def seal_of(environment: Mapping[str, str] = os.environ) -> Seal:
    """Returns the seal with the secret of `SECRET_FILE`.

    Raises:
        UsageError: The file cannot be read, or is empty.
    """
    path = environment.get(SECRET_FILE)
    if not path:
        return Seal()
    try:
        secret = read_regular(Path(path)).strip()
    except OSError as error:
        raise UsageError(f"{SECRET_FILE}={path}: {error.strerror}", "the file must be on every host") from error
    if not secret:
        raise UsageError(f"{SECRET_FILE}={path} is empty", "put 32 random bytes there, the same on every host")
    return Seal(secret)
