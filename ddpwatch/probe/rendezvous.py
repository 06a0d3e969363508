"""How the ranks of a job find their collector: rank 0 starts it, and answers the other ranks through the job's store.

Ranks on other nodes join a second time, for their node's agent (`ddpwatch.probe.agent_rendezvous`).
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.agent_rendezvous import (
    AgentRendezvous,
    CollectorAddress,
    JobUnwatchedError,
    here_node,
    is_first_here,
)
from ddpwatch.probe.collector_process import CollectorProcess
from ddpwatch.probe.identity import attempt
from ddpwatch.probe.lineage import succeed
from ddpwatch.probe.rendezvous_server import AddressRequest, RendezvousServer
from ddpwatch.probe.store_requests import PendingRequest, StoreConnection, StoreGoneError, understood
from ddpwatch.recording.names import reserve
from ddpwatch.run import rundir
from ddpwatch.wire.keys import Seal, seal_of

FIND_TIMEOUT_S = 60.0
NO_COLLECTOR = "none"  # the endpoint where every rank writes a file
_log = logging.getLogger("ddpwatch")


class Rendezvous:
    """One rank's way to the collector. Only the sender thread calls its methods, but for `start` and `cancel`.

    Args:
        rank: This rank.
        world_size: How many there are.
        session: Number of this session in the process, from 1.
        store: The job's c10d store; None for a job of one process.
        record: Where the collector writes a recording, or None. Only rank 0's counts.

    Attributes:
        run_id: Id of the run; empty on another rank than 0 until it is known there.
        previous: The run that the job was before; empty without one, and until `find` has found the collector.
    """

    def __init__(
        self, rank: int, world_size: int, session: int, store: Any, record: str | os.PathLike[str] | None
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._record = record
        self._session = session
        self._prefix = f"ddpwatch/{session}"
        self._deadline_s = time.monotonic() + FIND_TIMEOUT_S
        self._collector: CollectorProcess | None = None
        self._server: RendezvousServer | None = None
        self._request: PendingRequest | None = None
        self._agent: AgentRendezvous | None = None
        self._address: CollectorAddress | None = None
        self._told: CollectorAddress | None = None  # the same, maybe before its collector is up
        self._error: Exception | None = None
        self.previous = ""
        self.run_id = new_run_id(session) if rank == 0 else ""

    def start(self) -> None:
        """Starts the collector on rank 0. On the training thread: a DataLoader's fork must not come in between."""
        if self._rank:
            return
        try:  # `find` reports an error: the other ranks want an answer, too
            if self._store is not None and self._world_size > 1:
                own = StoreConnection(self._store, own=True)
                self._server = RendezvousServer(own, self._prefix, Seal(), self._world_size)
                self._server = RendezvousServer(own, self._prefix, seal_of(), self._world_size)
            if not os.environ.get("DDPWATCH_RECORD_DIR"):  # then every rank writes a rank file
                self._collector = self._start_collector(self._record)
        except Exception as error:
            self._error = error

    def cancel(self) -> None:
        """Takes `start` back."""
        if self._collector is not None:
            self._collector.cancel()
            self._collector = None
        self.leave()

    def find(self) -> CollectorAddress | None:
        """Returns the collector's address, or None while it is not known, or the collector is not ready.

        Raises:
            JobUnwatchedError: Rank 0 cannot watch or is gone, or this rank's node cannot, and another rank says so.
            DdpwatchError: The collector does not start, or rank 0 does not answer in time, or with what is no run.
        """
        if self._address is None:
            self._address = self._own_address() if self._rank == 0 else self._found()
            if self._address is not None:
                is_there = self._address.endpoint == NO_COLLECTOR or rundir.is_published(self._address.files)
                self.previous = succeed(self._address.run_id, self._session, leaves_note=is_there)
        return self._address

    def tend(self) -> None:
        """Starts this rank's collector again if it has died. On rank 0, answers the other ranks.

        Raises:
            DdpwatchError: The collector has died too often.
        """
        if self._agent is not None:
            self._agent.tend()
        if self._collector is not None and self._address is not None:
            self._collector.is_ready()
        self.answer()

    def answer(self) -> None:
        """Answers the other ranks on rank 0, as long as the store is there; those of its node at once."""
        if self._server is not None and self._told is not None:
            try:
                self._server.serve(self._told, self._collector, early=self._address is None)
            except Exception as error:
                _log.debug("ddpwatch no longer answers other ranks: %s", error)
                self._store = self._server = None

    @property
    def is_on_rank_0s_node(self) -> bool:
        """Whether what this rank leaves in the run directory is found there by rank 0's collector."""
        return self._told is not None and self._told.node == here_node()

    @property
    def is_awaited(self) -> bool:
        """On rank 0: whether other ranks are about to ask, as all do when the job starts."""
        return self._server is not None and self._server.is_awaited

    def refuse(self) -> bool:
        """Answers on rank 0 that it cannot watch. Returns whether other ranks may still ask."""
        if self._server is None:
            return False
        self._server.serve(CollectorAddress("", ""), None)
        return time.monotonic() < self._deadline_s

    def leave(self) -> None:
        """Releases the store and the collector. Safe to call in a forked child."""
        self._store = self._server = self._request = None
        for started in (self._agent, self._collector):
            if started is not None:
                started.leave()
        self._agent = self._collector = None

    # -- rank 0 ----------------------------------------------------------------------------------------------

    def _own_address(self) -> CollectorAddress | None:
        if self._error is not None:
            raise self._error
        if self._collector is None:
            self._told = self._address = CollectorAddress(self.run_id, NO_COLLECTOR)
        else:
            about = self._collector.endpoint, rundir.node(), secrets.token_hex(16)
            self._told = self._told or CollectorAddress(self.run_id, *about)
            self._address = self._told if self._collector.is_ready() else None
        self.answer()
        return self._address

    def _start_collector(self, record: str | os.PathLike[str] | None) -> CollectorProcess:
        path = None if record is None else recording_path(record)
        collector = CollectorProcess(self.run_id, self._world_size, path)
        if "DDPWATCH_RUN" not in os.environ and (note := rundir.fallback()):  # `ddpwatch run` says it itself
            _log.warning("ddpwatch: %s", note)
        return collector

    # -- the other ranks -------------------------------------------------------------------------------------

    def _found(self) -> CollectorAddress | None:
        if self._agent is not None:
            return self._agent.find()
        address = self._told = self._told or self._answer()
        if address is None or address.node == "" or os.environ.get("DDPWATCH_RECORD_DIR"):
            return address
        if address.node == here_node():
            return None if self._is_to_come(address) else address
        self._agent = self._join_agent(address)
        return None

    def _answer(self) -> CollectorAddress | None:
        """Returns rank 0's answer to this rank's own request; None while there is none."""
        if self._request is None:
            node = here_node()
            text = msgspec.json.encode(AddressRequest(self._rank, node)).decode()
            here = node != "" and self._is_on_one_node()
            self._request = PendingRequest(StoreConnection(self._store), self._prefix, seal_of(), text, here)
        try:
            answer = self._request.answer()
        except StoreGoneError as error:  # the job is over, or about to be
            raise JobUnwatchedError(error.message) from error
        if answer is None:
            if time.monotonic() > self._deadline_s:
                raise DdpwatchError(f"rank 0 has not called watch() within {FIND_TIMEOUT_S:.0f} s")
            return None
        address = understood(answer, CollectorAddress)
        if not address.endpoint:
            raise JobUnwatchedError("rank 0 cannot watch the job")
        self.run_id = rundir.check_run_id(address.run_id)
        return address

    @staticmethod
    def _is_to_come(address: CollectorAddress) -> bool:
        """Returns whether the collector is still to come."""
        try:
            return rundir.is_claimed(address.run_id)
        except DdpwatchError as error:  # rank 0 has given up, and says so
            raise JobUnwatchedError(error.message) from error

    def _is_on_one_node(self) -> bool:
        """Returns whether all ranks are on this node, as far as the launcher says."""
        local = os.environ.get("LOCAL_WORLD_SIZE") == str(self._world_size)
        return local or os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")

    def _join_agent(self, root: CollectorAddress) -> AgentRendezvous:
        try:
            return AgentRendezvous(self._rank, self._world_size, StoreConnection(self._store), seal_of(), root)
        except DdpwatchError as error:
            if is_first_here():
                raise
            raise JobUnwatchedError(error.message) from error


def new_run_id(session: int) -> str:
    """Returns a new run's id. `ddpwatch run` gives the start; of several jobs that it starts, each gets its own.

    Restarts and further sessions have their numbers at the end.
    """
    given = os.environ.get("DDPWATCH_RUN")
    if given is None:
        return rundir.new_run_id(sys.argv[0])
    further = [part for part in (attempt(), session - 1) if part]
    return ".".join([f"{given}-{secrets.token_hex(2)}", *map(str, further)])


def recording_path(record: str | os.PathLike[str]) -> Path:
    """Returns where to record to.

    It is a new file, whether an earlier job, a restart or another job has left one of that name.
    """
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
