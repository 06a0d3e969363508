"""Who may speak for which ranks: the other nodes as the root sees them. No socket, no process: `Root` feeds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ddpwatch.collector.protocol import UNSEEN_S, Batch, Open
from ddpwatch.wire.control import Admit
from ddpwatch.wire.messages import RANK_MESSAGES, ClockExchange, Device, Message, Node, NodeStep, RankSample

STATE_NS = 2_000_000_000  # at most, between two states of a node


@dataclass(slots=True)
class AdmittedNode:
    """One admitted node.

    Attributes:
        name: Names it (`ddpwatch.run.rundir.node`).
        key: Its agent's public key (Z85).
        host: What it calls itself.
        ranks: The ranks that it may speak for.
        connection: Routing id of its newest connection; empty before the first.
        restarts: How many of its agents have died.
        seq: The newest batch of this agent.
        lost: Frames that its agents had no room for.
        lost_before: Of these, those of agents that have died.
        seen_s: When something came last, in monotonic seconds.
        wanted_ppm: The budget that viewers at the agent ask for.
    """

    name: str
    key: str
    ranks: frozenset[int]
    host: str = ""
    connection: bytes = b""
    restarts: int = 0
    seq: int = 0
    lost: int = 0
    lost_before: int = 0
    seen_s: float = 0.0
    wanted_ppm: int = 0

    @property
    def number(self) -> int:
        """The number by which its messages name it."""
        return node_number(self.name)

    def is_unseen(self, now_s: float, for_s: float = UNSEEN_S) -> bool:
        """Returns whether nothing has come for that long."""
        return now_s - self.seen_s > for_s

    def state(self, now_s: float) -> Node:
        """Returns its state, for viewers."""
        return Node(
            node=self.number,
            host=self.host,
            ranks=sorted(self.ranks),
            at_ns=int(now_s * 1e9),
            seen_ns=int(self.seen_s * 1e9),
            connected=not self.is_unseen(now_s),
            dropped=self.lost,
        )


class Nodes:
    """All admitted nodes.

    Attributes:
        refused: Counts what was refused, by reason.
    """

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self._nodes: dict[str, AdmittedNode] = {}
        self._of_rank: dict[int, AdmittedNode] = {}
        self._published: dict[str, Node] = {}

    def admit(self, order: Admit, now_s: float) -> None:
        """Admits a node, or changes its ranks. Not its key: another key is another agent's."""
        node = self._nodes.setdefault(order.node, AdmittedNode(order.node, order.key, frozenset(), seen_s=now_s))
        for rank in node.ranks:
            del self._of_rank[rank]
        node.ranks = frozenset(rank for rank in order.ranks if self._of_rank.setdefault(rank, node) is node)

    def __len__(self) -> int:
        return len(self._nodes)

    def of_key(self, key: str) -> AdmittedNode | None:
        """Returns the node whose agent has this public key."""
        return next((node for node in self._nodes.values() if node.key == key), None)

    def get(self, name: str) -> AdmittedNode | None:
        """Returns the node of this name."""
        return self._nodes.get(name)

    def connected(self) -> list[AdmittedNode]:
        """Returns the nodes that have a connection, as far as is known."""
        return [node for node in self._nodes.values() if node.connection]

    def open(self, node: AdmittedNode, connection: bytes, message: Open) -> bool:
        """Takes a new connection in place of the one before. Not one of an agent that has died since."""
        if message.restarts < node.restarts:
            self.refused["replayed"] += 1
            return False
        if message.restarts > node.restarts:
            node.restarts, node.seq, node.lost_before = message.restarts, 0, node.lost
        node.connection, node.host = connection, message.host
        return True

    def accept(self, node: AdmittedNode, batch: Batch) -> list[bytes]:
        """Returns the frames of a batch, unless it has come before."""
        if batch.seq <= node.seq:
            self.refused["repeated"] += 1
            return []
        node.seq, node.lost = batch.seq, node.lost_before + batch.lost
        return batch.frames

    def of_rank(self, rank: int) -> AdmittedNode | None:
        """Returns the node of a rank; None for one of the root's own."""
        return self._of_rank.get(rank)

    def wanted_ppm(self, now_s: float) -> int:
        """Returns the largest budget that viewers at agents ask for. An agent that is out of sight asks for nothing."""
        return max((node.wanted_ppm for node in self._nodes.values() if not node.is_unseen(now_s)), default=0)

    def news(self, now_s: float) -> Iterator[Node]:
        """Yields the states of nodes that joined or changed, and of those that were not sent for a while."""
        for node in self._nodes.values():
            state, before = node.state(now_s), self._published.get(node.name)
            if before is None or _is_news(before, state):
                self._published[node.name] = state
                yield state


def node_number(name: str) -> int:
    """Returns a node's number, by its name."""
    return int(name, 16)


def not_its_to_send(message: Message, node: int, ranks: Collection[int]) -> str:
    """Returns why a node's agent may not send this; empty if it may."""
    if isinstance(message, (NodeStep, ClockExchange)):
        foreign = isinstance(message, NodeStep) and not all(rank in ranks for rank in message.ranks)
        return "foreign node" if message.node != node else "foreign rank" if foreign else ""
    if isinstance(message, Device):
        return ""
    if not isinstance(message, (*RANK_MESSAGES, RankSample)) or message.rank is None:
        return "not a node's to send"
    return "" if message.rank in ranks else "foreign rank"


def _is_news(before: Node, state: Node) -> bool:
    changed = (before.host, before.ranks, before.connected) != (state.host, state.ranks, state.connected)
    return changed or state.at_ns - before.at_ns >= STATE_NS
