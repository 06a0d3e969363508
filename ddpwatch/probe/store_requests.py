"""Requests and answers through the job's store, which may hold what was there before a restart.

A rank asks under a nonce of its own and accepts only the answer to that. A counter in the store numbers the requests,
and rank 0 answers all of them, also those whose ranks have gone.

Only ``check``, ``add``, ``get`` and ``set`` are called, which return at once: a waiting call would hold the store's
lock, and the training thread would wait with it. The other way round, rank 0, which answers as long as the job lasts,
has a connection of its own. Once the store is gone, nothing is called.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import select
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from ddpwatch.errors import DdpwatchError
from ddpwatch.run import rundir
from ddpwatch.run.regular import read_regular, write_whole
from ddpwatch.wire.keys import SECRET_FILE, Seal

ASK_AGAIN_S = 5.0  # a request may get lost: its rank counted it, and rank 0 looked before it was there
MOST_LOOKS = 4096  # at a time: anybody who reaches the store may have set the counter
Kind = TypeVar("Kind")
_log = logging.getLogger("ddpwatch")


class StoreGoneError(DdpwatchError):
    """The process that holds the job's store has ended."""


class StoreConnection:
    """The job's store, as long as there is somebody to answer.

    Once the process that holds it has ended, a call would raise, and torch would print a stack trace of its own before
    that. So the connection is looked at first.

    Args:
        store: The job's c10d store.
        own: Whether to use a connection of its own. A connection takes one call at a time: while the training thread
            waits for a name (in ``new_group`` with a rank that is late), another thread that asks would wait as well.
            It is made by the first call. A store that is no ``TCPStore``, or that cannot be cloned (older torch), is
            used as it is.
    """

    def __init__(self, store: Any, own: bool = False) -> None:
        self._job_store = store
        self._is_own = own
        self._used: Any = None
        self._ends: select.poll | None = None  # polls whether the other end has been closed

    def _store(self) -> Any:
        if self._used is None:
            self._used = self._job_store
            try:
                if self._is_own and isinstance(_innermost(self._job_store), dist.TCPStore):
                    self._used = self._job_store.clone()
            except Exception as error:  # no such method, or no further connection
                _log.debug("ddpwatch shares the job's connection to the store: %s", error)
            self._ends = _ends_of(self._used)
        if self._ends is not None and self._ends.poll(0):
            raise StoreGoneError("the process that holds the job's store has ended")
        return self._used

    def check(self, names: list[str]) -> bool:
        """Returns whether all these names are there."""
        return bool(self._store().check(names))

    def add(self, name: str, amount: int) -> int:
        """Adds to a counter; returns its new value."""
        return int(self._store().add(name, amount))

    def get(self, name: str) -> bytes:
        """Returns what is under a name that is there."""
        return bytes(self._store().get(name))

    def set(self, name: str, text: str) -> None:
        """Puts something under a name."""
        self._store().set(name, text)


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _ends_of(store: Any) -> select.poll | None:
    """Returns what polls whether the other end of a TCPStore's connection was closed; None if that cannot be seen."""
    found = re.search(r"SocketImpl\(fd=(\d+)", repr(_innermost(store)))
    if found is None or not hasattr(select, "POLLRDHUP"):  # another store, or no Linux
        return None
    poll = select.poll()
    poll.register(int(found[1]), select.POLLRDHUP)
    return poll


class Request(msgspec.Struct):
    """What a rank asks, and the nonce under which its rank looks for the answer."""

    nonce: str
    text: str


def understood(answer: str, kind: type[Kind]) -> Kind:
    """Returns what rank 0 has answered.

    Raises:
        DdpwatchError: It is something else.
    """
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        hint = f"somebody else writes to the store: {SECRET_FILE} keeps them out"
        raise DdpwatchError("the job's store holds something other than rank 0's answer", hint) from error


class PendingRequest:
    """A rank's request, until it is answered.

    Args:
        store: The job's c10d store.
        prefix: Of the names in the store.
        seal: Signs what is put there.
        text: What it says.
        here: Whether rank 0 seems to be on this node. Then its answer is a file in the run directory, and the store is
            left alone until it is time to ask again: rank 0 may hold the store, and end at any moment.
    """

    def __init__(self, store: Any, prefix: str, seal: Seal, text: str, here: bool = False) -> None:
        self._here = here
        self._store = store
        self._prefix = prefix
        self._seal = seal
        self._request = Request(secrets.token_hex(16), text)
        self._ask_again_s = 0.0

    def answer(self) -> str | None:
        """Returns rank 0's answer; None while there is none. Asks again now and then.

        Raises:
            DdpwatchError: The answer is not signed as it should be.
        """
        now, name = time.monotonic(), f"{self._prefix}/answer/{self._request.nonce}"
        if self._here and (answer := _take_answer(self._request.nonce)):
            return self._seal.opened(name, answer)
        if now >= self._ask_again_s:
            self._here = self._here and not self._ask_again_s  # otherwise it has another run directory, or is late
            self._ask_again_s = now + ASK_AGAIN_S
            self._ask(f"{self._prefix}/question/{self._store.add(f'{self._prefix}/questions', 1)}")
        if self._here:
            return None
        if not self._store.check([name]):
            return None
        _take_answer(self._request.nonce)  # where rank 0 takes this node for its own, but was late
        return self._seal.opened(name, self._store.get(name).decode())

    def _ask(self, name: str) -> None:
        self._store.set(name, self._seal.sealed(name, msgspec.json.encode(self._request).decode()))


class RequestQueue:
    """The requests as rank 0 reads and answers them."""

    def __init__(self, store: Any, prefix: str, seal: Seal) -> None:
        self._store = store
        self._prefix = prefix
        self._seal = seal
        self._level = logging.WARNING  # once is enough
        self._read = 0  # number of the last request that was looked at
        self._left: set[str] = set()  # nonces of the answers in the run directory

    def new_requests(self) -> Iterator[Request]:
        """Yields the requests since the last call.

        A rank that died when it had just counted its request leaves a gap.
        """
        last = self._read + 2 if self._read else self._store.add(f"{self._prefix}/questions", 0)
        number = self._read + 1
        most = number + MOST_LOOKS
        while number <= last and number < most:
            name = f"{self._prefix}/question/{number}"
            if self._store.check([name]):
                self._read, last = number, max(last, number + 2)
                if (request := self._request_at(name)) is not None:
                    yield request
            number += 1

    def reply(self, request: Request, text: str, here: bool = False) -> None:
        """Answers a request; of a rank with this run directory, there as well."""
        name = f"{self._prefix}/answer/{request.nonce}"
        sealed = self._seal.sealed(name, text)
        if here and request.nonce not in self._left:  # a rank that asks again looks into the store
            self._left.add(request.nonce)
            _leave(request.nonce, sealed)
        self._store.set(name, sealed)

    def _request_at(self, name: str) -> Request | None:
        try:
            return msgspec.json.decode(self._seal.opened(name, self._store.get(name).decode()), type=Request)
        except (DdpwatchError, ValueError) as error:
            level, self._level = self._level, logging.DEBUG
            _log.log(level, "ddpwatch did not answer a rank: %s", error)
            return None


def _leave(nonce: str, answer: str) -> None:
    """Puts an answer into the run directory; without room there, the one in the store has to do."""
    with contextlib.suppress(OSError, DdpwatchError):
        write_whole(rundir.answer(nonce), answer.encode())


def _take_answer(nonce: str) -> str:
    """Takes an answer out of the run directory; empty while there is none."""
    try:
        path = rundir.answer(nonce)
        answer = read_regular(path, flags=os.O_NOFOLLOW)
        path.unlink(missing_ok=True)
        return answer.decode()
    except (OSError, UnicodeDecodeError, DdpwatchError):
        return ""
