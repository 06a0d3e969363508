"""A rank on another node than rank 0's: it joins, and the first one of its node starts an agent for all of them.

An agent is a collector that sends up to rank 0's, the root, what it gets. The agent's public key, and which ranks it
speaks for, go through the job's store; so does the root's answer. Secret keys stay in this process and in the agent's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Annotated, Any

import msgspec

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.collector_process import LOCAL_ONLY, CollectorProcess
from ddpwatch.probe.store_requests import PendingRequest, StoreGoneError, understood
from ddpwatch.run import rundir
from ddpwatch.wire.control import Connect, NodeName
from ddpwatch.wire.keys import Seal, new_key_pair

JOIN_TIMEOUT_S = 20.0
_log = logging.getLogger("ddpwatch")


class JobUnwatchedError(DdpwatchError):
    """The job is not watched, or not on this node, and another rank warns about it."""


class CollectorAddress(msgspec.Struct):
    """Where a rank's frames go. With an empty endpoint: rank 0 cannot watch.

    Attributes:
        node: The collector's node (`rundir.node`); empty if any will do, as no process is asked.
        session: A nonce of this run, below which ranks of other nodes join.
        name: Names the collector's files in the run directory, if that is not the run's id.
    """

    run_id: str
    endpoint: str
    node: str = ""
    session: str = ""
    name: str = ""

    @property
    def files(self) -> str:
        """What the collector's files are called."""
        return self.name or self.run_id


class Join(msgspec.Struct):
    """A rank's request to be admitted, with the agent's public key if this rank has started the agent."""

    rank: int
    node: NodeName
    key: Annotated[str, msgspec.Meta(max_length=40)] = ""


class RootAddress(msgspec.Struct):
    """The answer: where the root listens, and its public key. With an empty endpoint: nowhere, and why."""

    endpoint: str
    key: str = ""
    error: str = ""


def join_prefix(session: str) -> str:
    """Returns where joining ranks ask in the store. The session is a nonce: nothing old lies there."""
    return f"ddpwatch/{session}"


class AgentRendezvous:
    """One rank's way to its node's agent. For the sender thread.

    Args:
        rank: This rank.
        world_size: How many there are.
        store: The job's c10d store.
        seal: Signs what is put there.
        root: What rank 0 has answered.

    Raises:
        JobUnwatchedError: No agent can be started here, and the first rank of the node says so.
        DdpwatchError: No agent can be started here.
    """

    def __init__(self, rank: int, world_size: int, store: Any, seal: Seal, root: CollectorAddress) -> None:
        node = rundir.node()
        name = rundir.check_run_id(f"{root.run_id}.{node}")
        self._keys = new_key_pair()
        self._agent: CollectorProcess | None = None
        with contextlib.suppress(FileExistsError):  # another rank of this node was first
            self._agent = CollectorProcess(name, world_size, None, node)
        self._address = CollectorAddress(root.run_id, rundir.endpoints(name)[0], node, root.session, name)
        key = "" if self._agent is None else self._keys.public
        text = msgspec.json.encode(Join(rank, node, key)).decode()
        self._join: PendingRequest | None = PendingRequest(store, join_prefix(root.session), seal, text)
        self._deadline_s = time.monotonic() + JOIN_TIMEOUT_S

    def find(self) -> CollectorAddress | None:
        """Returns the agent's address, once it takes frames and the root knows this rank.

        Without a root, it comes after a while.
        """
        if self._join is not None:
            self._connect(self._join)
        is_ready = self._agent is None or self._agent.is_ready()
        return self._address if is_ready and self._join is None else None

    def tend(self) -> None:
        """Starts the agent again if it has died.

        Raises:
            DdpwatchError: It has died too often.
        """
        if self._agent is not None:
            self._agent.is_ready()

    def leave(self) -> None:
        """Leaves the agent to itself. Safe to call in a forked child."""
        self._join = None
        if self._agent is not None:
            self._agent.leave()
            self._agent = None

    def _connect(self, join: PendingRequest) -> None:
        try:
            answer = join.answer()
        except StoreGoneError as error:  # the job is over, or about to be
            raise JobUnwatchedError(error.message) from error
        if answer is not None:
            root = understood(answer, RootAddress)
        elif time.monotonic() > self._deadline_s:
            root = RootAddress("", error=f"rank 0 has not answered within {JOIN_TIMEOUT_S:.0f} s")
        else:
            return
        self._join = None
        if self._agent is None:
            return
        if root.endpoint:
            self._agent.order(Connect(root.endpoint, root.key, self._keys, self._address.node))
        else:
            _log.warning("ddpwatch: %s; %s", root.error, LOCAL_ONLY)


def is_first_here() -> bool:
    """Returns whether this is the rank of its node that speaks for all, as far as the launcher says."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def here_node() -> str:
    """Returns this node (`rundir.node`); empty without a run directory."""
    try:
        return rundir.node()
    except DdpwatchError:  # it is reported where it matters
        return ""
