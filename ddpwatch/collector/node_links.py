"""A collector's part in a job on several nodes: it is the root, or another node's agent. On one node, it is neither.

The rank that started the collector says which (`ddpwatch.wire.control`).
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator

import zmq

from ddpwatch.collector.attention import NODES_LEAD_NS, Attention
from ddpwatch.collector.hub import Hub
from ddpwatch.collector.nodes import AdmittedNode
from ddpwatch.collector.protocol import GrantedLease, Welcome
from ddpwatch.collector.root import Root
from ddpwatch.collector.uplink import Uplink
from ddpwatch.errors import DdpwatchError
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.wire import transport
from ddpwatch.wire.control import Admit, Connect, ControlSocket, Listen, Report, Unreachable
from ddpwatch.wire.messages import RANK_MESSAGES, Bye, Device, Group, Hello, Layout, Message, RankSample, decode

UNSEEN_END_S = 60.0  # without anything from a node, its ranks do not keep the run from ending
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_log = logging.getLogger("ddpwatch.collector")


class NodeLinks:
    """The collector's ways to other nodes, and to the rank that started it. Only `finish` waits.

    Args:
        context, poller: Of the collector.
        control: The socket to the rank, or -1.
        run_id: The run.
        agent: Whether this is the agent of another node than rank 0's.
        restarts: How many collectors of this run have died on this node.
        hub: What is known of the ranks.
        attention: This node's lease.
    """

    def __init__(
        self,
        context: transport.Context,
        poller: zmq.Poller,
        control: int,
        run_id: str,
        agent: bool,
        restarts: int,
        hub: Hub,
        attention: Attention,
    ) -> None:
        self._context = context
        self._poller = poller
        self._run_id = run_id
        self._is_agent = agent
        self._restarts = restarts
        self._hub = hub
        self._attention = attention
        self._root: Root | None = None
        self._uplink: Uplink | None = None
        self._has_complained = False
        self._control = None if control < 0 else ControlSocket(socket.socket(fileno=control))
        if self._control is not None:
            poller.register(self._control, zmq.POLLIN)

    def report(self, report: Report) -> None:
        """Reports to the rank."""
        if self._control is not None:
            self._control.send(report)

    def turn(self, polled: transport.Polled) -> Iterator[tuple[AdmittedNode, bytes]]:
        """Does what is due; yields the frames that have come from other nodes, still to be checked."""
        if self._control is not None and (self._control.fileno() in polled.ready or self._control.has_unsent):
            self._obey()
        if self._root is not None:
            if (listening := self._root.listen()) is not None:
                self.report(listening)
            yield from self._root.receive(polled)
        if self._uplink is not None:
            for wish in self._uplink.turn(polled):
                if isinstance(wish, GrantedLease):
                    self._attention.follow(wish.ppm, wish.first_slot, time.monotonic_ns())
                else:
                    self._attention.follow_order(wish)
            if self._uplink.is_unreachable and not self._has_complained:
                self._has_complained = True
                self.report(Unreachable(self._uplink.endpoint))

    def grant(self, wanted_ppm: int, is_due: bool) -> None:
        """Renews the lease if that is due, or if viewers want another. An agent only passes on what they want."""
        if self._is_agent:
            if self._uplink is not None:
                self._uplink.wanted_ppm = wanted_ppm
            return
        if self._root is not None:
            wanted_ppm = max(wanted_ppm, self._root.nodes.wanted_ppm(time.monotonic()))
        if is_due or self._attention.is_news(wanted_ppm):
            self._attention.renew(wanted_ppm, time.monotonic_ns())
            if self._root is not None:
                self._root.lease(self._attention.term(time.monotonic_ns()))

    def order(self, wanted: StackOrder | None) -> None:
        """Passes on the order to sample stacks that a viewer wants. An agent takes none: it has only its ranks."""
        if not self._is_agent:
            before = self._attention.order
            self._attention.take_order(wanted)
            if self._root is not None and self._attention.order not in (None, before):
                self._root.order(self._attention.order)

    def send_up(self, message: Message, frame: bytes) -> None:
        """Sends a frame up from an agent, unless it is about this collector."""
        is_own = isinstance(message, Bye) and message.rank is None
        if self._uplink is not None and isinstance(message, (*RANK_MESSAGES, Device, RankSample)) and not is_own:
            self._uplink.take_frame(message, frame)

    def states(self, now_s: float) -> Iterator[Message]:
        """Yields news of the other nodes, on the root."""
        if self._root is not None:
            yield from self._root.nodes.news(now_s)

    def is_elsewhere(self, rank: int) -> bool:
        """Returns whether the rank is on another node, as far as the root knows."""
        return self._root is not None and self._root.nodes.of_rank(rank) is not None

    def is_gone(self, rank: int, now_s: float) -> bool:
        """Returns whether the rank's node has been out of sight for so long that nobody waits for it."""
        node = None if self._root is None else self._root.nodes.of_rank(rank)
        return node is not None and node.is_unseen(now_s, UNSEEN_END_S)

    @property
    def refused(self) -> Counter[str]:
        """What the root has refused, by reason."""
        return Counter() if self._root is None else self._root.nodes.refused

    @property
    def whole(self) -> str:
        """On an agent: what to type for the whole run."""
        welcome = None if self._uplink is None else self._uplink.welcome
        return "" if welcome is None else whole_run(welcome)

    def finish(self, signalled: bool) -> None:
        """Lets the root have an agent's rest, if it is there."""
        deadline = time.monotonic() + (0.2 if signalled else 2.0)  # for an agent's last frames
        while self._uplink is not None and not self._uplink.is_done and time.monotonic() < deadline:
            self._uplink.turn()
            self._poller.poll(20)

    def drain(self) -> None:
        """Takes no frames any more on the root, but what would block its sockets."""
        if self._root is not None:
            self._root.drain()

    def close(self) -> None:
        """Closes all sockets."""
        for end in (self._root, self._uplink, self._control):
            if end is not None:
                end.close()

    # -- orders of the rank ----------------------------------------------------------------------------------

    def _obey(self) -> None:
        if self._control is None:
            return
        self._control.send()
        for order in self._control.receive():
            if isinstance(order, Listen) and self._root is None:
                self._listen(order)
            elif isinstance(order, Admit) and self._root is not None:
                self._root.nodes.admit(order, time.monotonic())
            elif isinstance(order, Connect) and self._uplink is None:
                self._connect(order)
        if self._control.fileno() < 0:  # the rank has gone
            self._poller.unregister(self._control)
            self._control = None

    def _listen(self, order: Listen) -> None:
        self._root = Root(self._context, order, self._run_id, self._obey)
        self._attention.lead_ns = NODES_LEAD_NS
        for source in self._root.sources:
            self._poller.register(source, zmq.POLLIN)

    def _connect(self, order: Connect) -> None:
        try:
            self._uplink = Uplink(self._context, self._poller, order, self._restarts, self._introductions)
        except DdpwatchError as error:
            _log.error("no connection to the root: %s", error)
            self.report(Unreachable(order.endpoint))
            return
        for envelope in self._hub.snapshot():  # what came before the order
            self.send_up(decode(envelope.frame), envelope.frame)

    def _introductions(self) -> Iterator[bytes]:
        """Yields what a root has to know of the ranks to understand their steps, and which of them have ended."""
        for envelope in self._hub.snapshot():
            message = decode(envelope.frame)
            if isinstance(message, (Hello, Group, Layout)) or (isinstance(message, Bye) and message.rank is not None):
                yield envelope.frame


def whole_run(welcome: Welcome) -> str:
    """Returns what to type for the whole run; empty if a name of the root's would be another command."""
    names = (welcome.host, welcome.run_id)
    return "ddpwatch attach ssh://{}/{}".format(*names) if all(map(_PLAIN_NAME.fullmatch, names)) else ""
