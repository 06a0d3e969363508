"""How the ranks of a job find their collector: rank 0 starts it, and answers the other ranks through the job's store.

The store may hold what the job has left there before a restart: elastic agents reuse it, and each agent counts restarts
by itself. So a rank asks under a nonce of its own and accepts only the answer to that. A counter in the store numbers
the questions, and rank 0 answers all of them, also those whose ranks have gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ddpwatch import clock, rundir
from ddpwatch.collector_process import CollectorProcess
from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.identity import attempt
from ddpwatch.recording.names import reserve

FIND_TIMEOUT_S = 60.0
ASK_AGAIN_S = 5.0  # a question may get lost: its rank counted it, and rank 0 looked before it was there
LOOK_S = 5.0  # between two looks for questions, once all ranks have asked
START_S = 10.0
NO_COLLECTOR = "none"  # the endpoint where every rank writes a file
_log = logging.getLogger("ddpwatch")


class JobUnwatchedError(DdpwatchError):
    """Rank 0 cannot watch the job, and has said so: no other rank needs to."""


class CollectorAddress(msgspec.Struct):
    """What rank 0 answers. With an empty endpoint, that it cannot watch."""

    run_id: str
    endpoint: str
    boot_id: str


class Question(msgspec.Struct):
    """What another rank asks, and the nonce under which it looks for the answer."""

    rank: int
    nonce: str


class Rendezvous:
    """One rank's way to the collector. Only the sender thread calls its methods.

    On rank 0, making it starts the collector, on the training thread: a DataLoader's fork must not come in between.
    Asks the store with ``check``, ``add``, ``get`` and ``set``, which return at once: a waiting call would hold the
    store's lock, and the training thread would wait with it.

    Args:
        rank: This rank.
        world_size: How many there are.
        session: Number of this session in the process, from 1.
        store: The job's c10d store; None for a job of one process.
        record: Where the collector writes a recording, or None. Only rank 0's counts.

    Attributes:
        run_id: Id of the run; empty on another rank than 0 until it is known there.
    """

    def __init__(
        self, rank: int, world_size: int, session: int, store: Any, record: str | os.PathLike[str] | None
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._prefix = f"ddpwatch/{session}"
        self._start_s = time.monotonic()
        self._deadline_s = self._start_s + FIND_TIMEOUT_S
        self._collector: CollectorProcess | None = None
        self._address: CollectorAddress | None = None
        self._error: Exception | None = None
        self.run_id = new_run_id(session) if rank == 0 else ""
        self._nonce = secrets.token_hex(16)
        self._ask_again_s = 0.0
        self._asked: set[int] = set()
        self._answered = 0  # number of the last question that was looked at
        self._next_look_s = 0.0
        if rank == 0 and not os.environ.get("DDPWATCH_RECORD_DIR"):  # then every rank writes a rank file
            try:
                self._collector = self._start_collector(record)
            except Exception as error:  # `find` reports it: the other ranks want an answer, too
                self._error = error

    def find(self) -> CollectorAddress | None:
        """The collector's address, or None while it is not known, or the collector is not ready.

        Raises:
            JobUnwatchedError: Rank 0 cannot watch.
            DdpwatchError: The collector does not start, or rank 0 does not answer in time, or with what is no run.
        """
        if self._rank == 0:
            return self._own_address()
        if self._address is None:
            self._address = self._answer()
        return self._address

    def tend(self) -> None:
        """On rank 0: starts the collector again if it has died, and answers the other ranks.

        Raises:
            DdpwatchError: The collector has died too often.
        """
        if self._collector is not None and self._address is not None:
            self._collector.is_ready()
        self.answer()

    def answer(self) -> None:
        """On rank 0: answers the other ranks, as long as the store is there."""
        if self._rank == 0 and self._address is not None:
            try:
                self._answer_all(self._address)
            except Exception as error:
                _log.debug("ddpwatch answers no rank any longer: %s", error)
                self._store = None

    @property
    def is_awaited(self) -> bool:
        """On rank 0: whether other ranks are about to ask, as all do when the job starts."""
        asking = self._rank == 0 and self._store is not None and len(self._asked) < self._world_size - 1
        return asking and time.monotonic() < self._start_s + START_S

    def refuse(self) -> bool:
        """On rank 0, which cannot watch: answers just that. Whether other ranks may still ask."""
        if self._rank:
            return False
        self._answer_all(CollectorAddress("", "", ""))
        return self._store is not None and time.monotonic() < self._deadline_s

    def leave(self) -> None:
        """Releases the store and the collector. Safe to call in a forked child."""
        self._store = None
        if self._collector is not None:
            self._collector.leave()
            self._collector = None

    # -- rank 0 ----------------------------------------------------------------------------------------------

    def _own_address(self) -> CollectorAddress | None:
        if self._error is not None:
            raise self._error
        if self._address is None:
            if self._collector is not None and not self._collector.is_ready():
                return None
            endpoint = NO_COLLECTOR if self._collector is None else self._collector.endpoint
            self._address = CollectorAddress(self.run_id, endpoint, clock.boot_id())
            self.answer()
        return self._address

    def _start_collector(self, record: str | os.PathLike[str] | None) -> CollectorProcess:
        path = None if record is None else recording_path(record)
        collector = CollectorProcess(self.run_id, self._world_size, path)
        if "DDPWATCH_RUN" not in os.environ and (note := rundir.fallback()):  # `ddpwatch run` says it itself
            _log.warning("ddpwatch: %s", note)
        return collector

    def _answer_all(self, address: CollectorAddress) -> None:
        """Answers the new questions. Some time after all ranks have asked, it looks less often.

        Questions that were left in the store count as well, so not at once.
        """
        if self._store is None or self._world_size == 1 or time.monotonic() < self._next_look_s:
            return
        answer = msgspec.json.encode(address).decode()
        for question in self._new_questions():
            self._store.set(f"{self._prefix}/answer/{question.nonce}", answer)
            self._asked.add(question.rank)
        if len(self._asked) >= self._world_size - 1 and time.monotonic() > self._start_s + START_S:
            self._next_look_s = time.monotonic() + LOOK_S

    def _new_questions(self) -> Iterator[Question]:
        """The questions since the last call. A rank that died when it had just counted its question leaves a gap."""
        last = self._answered + 2 if self._answered else self._store.add(f"{self._prefix}/questions", 0)
        number = self._answered + 1
        while number <= last:
            key = f"{self._prefix}/question/{number}"
            if self._store.check([key]):
                yield msgspec.json.decode(self._store.get(key), type=Question)
                self._answered, last = number, max(last, number + 2)
            number += 1

    # -- the other ranks -------------------------------------------------------------------------------------

    def _answer(self) -> CollectorAddress | None:
        """Rank 0's answer to this rank's own question; None while there is none."""
        now, key = time.monotonic(), f"{self._prefix}/answer/{self._nonce}"
        if now >= self._ask_again_s:
            self._ask_again_s = now + ASK_AGAIN_S
            number = self._store.add(f"{self._prefix}/questions", 1)
            question = msgspec.json.encode(Question(self._rank, self._nonce)).decode()
            self._store.set(f"{self._prefix}/question/{number}", question)
        if not self._store.check([key]):
            if now > self._deadline_s:
                raise DdpwatchError(f"rank 0 has not called watch() within {FIND_TIMEOUT_S:.0f} s")
            return None
        address = msgspec.json.decode(self._store.get(key), type=CollectorAddress)
        if not address.endpoint:
            raise JobUnwatchedError("rank 0 cannot watch the job")
        self.run_id, self._store = rundir.check_run_id(address.run_id), None
        return address


def new_run_id(session: int) -> str:
    """Id of a new run. `ddpwatch run` gives the start, and may start several jobs: each gets an id of its own.

    Restarts and further sessions have their numbers at the end.
    """
    given = os.environ.get("DDPWATCH_RUN")
    if given is None:
        return rundir.new_run_id(sys.argv[0])
    further = [part for part in (attempt(), session - 1) if part]
    return ".".join([f"{given}-{secrets.token_hex(2)}", *map(str, further)])


def recording_path(record: str | os.PathLike[str]) -> Path:
    """Where to record to: to a new file, whether an earlier job, a restart or another job has left one of that name."""
    path, restarts = Path(record).absolute(), attempt()
    path = path.with_suffix(f".{restarts}{path.suffix}") if restarts else path
    try:
        free = reserve(path)
    except OSError:  # the collector goes on trying
        _log.warning("ddpwatch cannot record to %s: its directory is missing or not writable", path)
        return path
    if free != path:
        _log.warning("ddpwatch records to %s: %s exists", free, path.name)
    return free
