"""Rank 0's answers to the other ranks: where the collector is, and for ranks on other nodes, where the root listens."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.agent_rendezvous import CollectorAddress, Join, RootAddress, here_node, join_prefix
from ddpwatch.probe.collector_process import CollectorProcess
from ddpwatch.probe.store_requests import Request, RequestQueue
from ddpwatch.wire.control import Admit, Listen
from ddpwatch.wire.keys import KeyPair, Seal, new_key_pair

LOOK_S = 5.0  # between two looks for requests, once all ranks have asked
START_S = 10.0
_log = logging.getLogger("ddpwatch")


class AddressRequest(msgspec.Struct):
    """A rank's first request: who it is, and on which node."""

    rank: int
    node: str = ""


@dataclass(slots=True)
class _Node:
    """Another node: its agent's public key, and its ranks."""

    key: str = ""
    ranks: list[int] = field(default_factory=list)


class RendezvousServer:
    """Answers both kinds of requests: of all ranks, and of those on other nodes.

    The first join makes the collector the root: a job on one node has no listener.

    Args:
        store: The job's c10d store.
        prefix: Of the first requests' names in the store.
        seal: Signs what is put there.
        world_size: How many ranks the job has.
    """

    def __init__(self, store: Any, prefix: str, seal: Seal, world_size: int) -> None:
        self._store = store
        self._seal = seal
        self._world_size = world_size
        self._requests = RequestQueue(store, prefix, seal)
        self._joins: RequestQueue | None = None
        self._waiting: list[tuple[Request, Join]] = []
        self._asked: dict[int, str] = {}
        self._nodes: dict[str, _Node] = {}
        self._node_of: dict[int, str] = {}
        self._keys: KeyPair | None = None
        self._here = here_node()
        self._later: list[Request] = []
        self._start_s = time.monotonic()
        self._next_look_s = 0.0

    def serve(self, address: CollectorAddress, collector: CollectorProcess | None, early: bool = False) -> None:
        """Answers new requests. Some time after all ranks have asked, it looks less often.

        Requests that were left in the store count as well, so not at once.

        Args:
            address: What is answered.
            collector: The collector, which is to admit other nodes.
            early: Whether it is not up yet: then only ranks of this node get an answer.
        """
        now = time.monotonic()
        if now < self._next_look_s:
            return
        answer = msgspec.json.encode(address).decode()
        requests, self._later = [*self._later, *self._requests.new_requests()], []
        for request in requests:
            if (asked := _decoded(request, AddressRequest)) is None:
                continue
            if early and asked.node != self._here:
                self._later.append(request)
            else:
                self._requests.reply(request, answer, here=asked.node == self._here != "")
                self._asked[asked.rank] = asked.node
        if collector is not None and not early and any(node != address.node for node in self._asked.values()):
            self._admit_nodes(address, collector)
        if now > self._start_s + START_S and len(self._asked) >= self._world_size - 1 and not self._waiting:
            self._next_look_s = now + LOOK_S

    @property
    def is_awaited(self) -> bool:
        """Whether ranks are about to ask, or to join."""
        asking = len(self._asked) < self._world_size - 1 or self._waiting
        joining = any(rank not in self._node_of for rank in self._asked) and self._joins is not None
        return bool(asking or joining) and time.monotonic() < self._start_s + START_S

    def _admit_nodes(self, address: CollectorAddress, collector: CollectorProcess) -> None:
        self._joins = self._joins or RequestQueue(self._store, join_prefix(address.session), self._seal)
        joins = [
            (request, join) for request in self._joins.new_requests() if (join := _decoded(request, Join)) is not None
        ]
        self._waiting += joins
        if not self._waiting:
            return
        root = self._root(collector)  # first: only a root admits
        for node in sorted({join.node for _, join in joins if self._admit(join, address.node)}):
            collector.order(Admit(node, self._nodes[node].key, self._nodes[node].ranks))
        if root is not None:
            answer = msgspec.json.encode(root).decode()
            for request, _ in self._waiting:
                self._joins.reply(request, answer)
            self._waiting.clear()

    def _admit(self, join: Join, here: str) -> bool:
        """Binds a rank to its node, and a node to its key; the first of each counts. Whether that node has a key.

        Ranks on this node are nobody else's.
        """
        may_join = 0 < join.rank < self._world_size and self._asked.get(join.rank) != here
        if not may_join or self._node_of.setdefault(join.rank, join.node) != join.node:
            _log.debug("ddpwatch does not admit rank %d of %s", join.rank, join.node)
            return False
        node = self._nodes.setdefault(join.node, _Node())
        node.key = node.key or join.key
        if join.rank not in node.ranks:
            node.ranks.append(join.rank)
        return bool(node.key)

    def _root(self, collector: CollectorProcess) -> RootAddress | None:
        """Returns where the root listens; None while it does not say so."""
        if self._keys is None:
            try:
                self._keys = new_key_pair()
            except DdpwatchError as error:
                return RootAddress("", error=error.message)
            collector.order(Listen(self._keys))
        collector.is_ready()
        said = collector.listening
        return None if said is None else RootAddress(said.endpoint, self._keys.public, said.error)


def _decoded(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(request.text, type=kind)
    except msgspec.DecodeError:
        return None
