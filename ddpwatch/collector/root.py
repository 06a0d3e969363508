"""The root: rank 0's collector, where the agents of all other nodes send what they get.

It is the only thing that listens on the network, and only if the job has other nodes. ZeroMQ asks it about each key
(ZAP, ZeroMQ's RFC 27), and labels each message with the node that the key belongs to.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator

import zmq
import zmq.utils.z85

from ddpwatch.collector.addresses import AddressSearch, endpoint, ports
from ddpwatch.collector.nodes import AdmittedNode, Nodes
from ddpwatch.collector.protocol import (
    ZAP_DOMAIN,
    Ack,
    Batch,
    Down,
    GrantedLease,
    Introduction,
    Open,
    Ping,
    Pong,
    Reopen,
    Welcome,
    pack,
    unpack_up,
)  # fmt: skip
from ddpwatch.errors import DdpwatchError
from ddpwatch.run import clock
from ddpwatch.run.regular import allow_all_files
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.wire import transport
from ddpwatch.wire.control import Listen, Listening

RECEIVE_LIMIT = 500  # messages per turn
RECEIVE_BYTES = 16 * 1024 * 1024  # per turn, and one message: they are in memory at once
BIND_AGAIN_S = 0.5
PINGS = 256  # in a round of all nodes
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_log = logging.getLogger("ddpwatch.collector")


class Root:
    """Receives the frames of other nodes, and sends them leases.

    Args:
        context: Of the collector.
        order: The root's keys, and its endpoint if it had one before.
        run_id: The run.
        ask: Reads rank 0's newest orders: an agent may be faster than they are.

    Attributes:
        nodes: The other nodes.
        sources: What to poll.
    """

    def __init__(self, context: transport.Context, order: Listen, run_id: str, ask: Callable[[], None]) -> None:
        allow_all_files()  # a connection per node, of which there may be a thousand
        self.nodes = Nodes()
        self._run_id = run_id
        self._ask = ask
        self._clock = clock.boot_id(), clock.time_namespace()
        self._asked = context.socket(zmq.REP)
        self._asked.linger = 0  # a reply that nobody takes any more must not hold up the end
        self._asked.bind("inproc://zeromq.zap.01")
        self._agents = transport.root_router(context, order.keys, ZAP_DOMAIN)
        self._failures = transport.ConnectionMonitor(self._agents, _FAILED)
        self.sources = (self._asked, self._agents, self._failures.source)
        self._before = order.endpoint
        self._search: AddressSearch | None = None
        self._bind_s = 0.0  # when to try the next time
        self._is_settled = False

    def listen(self) -> Listening | None:
        """Starts to listen, as soon as that is possible: then where, or once why it never will. Never waits."""
        if self._is_settled:
            return None
        try:
            bound = self._bound_again() if self._before else self._bound()
        except (DdpwatchError, zmq.ZMQError, OSError) as error:
            self._is_settled = True
            _log.error("rank 0's collector does not listen: %s", error)
            return Listening("", f"rank 0's collector does not listen: {error}")
        if bound is None:
            return None
        self._is_settled = True
        _log.info("listening at %s", bound)
        return Listening(bound)

    def receive(self, polled: transport.Polled) -> Iterator[tuple[AdmittedNode, bytes]]:
        """Yields the frames that have come from admitted nodes, still to be checked. Never waits."""
        if self._asked in polled.ready:
            self._answer_zap()
        if self._failures.source in polled.ready:
            self.drain()
        arrived = deque(self._arrived(polled) if self._agents in polled.ready else ())
        if arrived:
            self._ask()  # now: it has admitted the ranks that these frames are about before they were sent
        while arrived:
            yield from self._received(*arrived.popleft())

    def lease(self, term: tuple[int, int] | None) -> None:
        """Sends the lease's term to all nodes."""
        if term is not None:
            for node in self.nodes.connected():
                self._send(node.connection, GrantedLease(*term))

    def order(self, order: StackOrder | None) -> None:
        """Sends an order to sample stacks to all nodes."""
        if order is not None:
            for node in self.nodes.connected():
                self._send(node.connection, order)

    def drain(self) -> None:
        """Counts the handshakes that have failed: an event that nobody receives blocks ZeroMQ."""
        self.nodes.refused["bad handshake"] += len(list(self._failures.events()))

    def close(self) -> None:
        """Stops listening."""
        self._failures.close()
        self._agents.close()
        self._asked.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _bound(self) -> str | None:
        self._search = self._search or AddressSearch()
        if (address := self._search.address()) is None:
            return None
        self._agents.setsockopt(zmq.IPV6, ":" in address)
        for port in (numbers := ports(os.environ)):
            try:
                self._agents.bind(endpoint(address, port))
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
            else:
                return self._agents.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        raise DdpwatchError(f"all ports of {address} from {min(numbers)} to {max(numbers)} are in use")

    def _bound_again(self) -> str | None:
        """Returns where the root before it has listened.

        Agents look nowhere else, so a port that is taken is tried again.
        """
        now = time.monotonic()
        if now < self._bind_s:
            return None
        try:
            self._agents.setsockopt(zmq.IPV6, "[" in self._before)
            self._agents.bind(self._before)
        except zmq.ZMQError as error:
            if not self._bind_s:
                _log.warning("cannot listen at %s yet: %s", self._before, error)
            self._bind_s = now + BIND_AGAIN_S
            return None
        return self._before

    def _answer_zap(self) -> None:
        """Admits nodes by their public keys, and names them."""
        while True:
            try:
                parts = self._asked.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            node = self._of_credentials(parts)
            if node is None:
                self.nodes.refused["unknown key"] += 1
            code, text, name = (b"400", b"unknown key", "") if node is None else (b"200", b"OK", node.name)
            self._asked.send_multipart([b"1.0", parts[1], code, text, name.encode(), b""])

    def _of_credentials(self, parts: list[bytes]) -> AdmittedNode | None:
        if len(parts) != 7 or parts[2] != ZAP_DOMAIN or parts[5] != b"CURVE" or len(parts[6]) != 32:
            return None
        key = zmq.utils.z85.encode(parts[6]).decode()
        if self.nodes.of_key(key) is None:
            self._ask()
        return self.nodes.of_key(key)

    def _arrived(self, polled: transport.Polled) -> Iterator[tuple[bytes, list[zmq.Frame], int]]:
        """Yields the messages that are there: connection, parts, and by when it was there."""
        nbytes, moments = 0, polled.moments(self._agents)
        for _ in range(RECEIVE_LIMIT):
            try:
                connection, *parts = self._agents.recv_multipart(transport.DONTWAIT, copy=False)
            except zmq.Again:
                return
            yield connection.bytes, parts, next(moments)
            nbytes += sum(map(len, parts))
            if nbytes >= RECEIVE_BYTES:
                return

    def _received(
        self, connection: bytes, parts: list[zmq.Frame], received_ns: int
    ) -> Iterator[tuple[AdmittedNode, bytes]]:
        node = self.nodes.get(str(parts[0].get("User-Id"))) if len(parts) == 1 else None
        message = None if node is None else unpack_up(parts[0].bytes)
        if node is None or message is None:
            self.nodes.refused["not an agent's to send"] += 1
        elif isinstance(message, Open):
            self._welcome(node, connection, message)
        elif connection != node.connection:
            self._send(connection, Reopen())
        else:
            node.seen_s = time.monotonic()
            if isinstance(message, Ping):
                node.wanted_ppm = message.wanted_ppm
                pings = PINGS // len(self.nodes)
                self._send(connection, Pong(message.sent_ns, received_ns, time.monotonic_ns(), *self._clock, pings))
            else:
                yield from ((node, frame) for frame in self._frames(node, message))

    def _frames(self, node: AdmittedNode, message: Batch | Introduction) -> list[bytes]:
        """Returns a message's frames.

        They are acknowledged before they are passed on: if this root dies, none comes again.
        """
        if isinstance(message, Introduction):
            return message.frames
        frames = self.nodes.accept(node, message)
        self._send(node.connection, Ack(node.seq))
        return frames

    def _welcome(self, node: AdmittedNode, connection: bytes, message: Open) -> None:
        if self.nodes.open(node, connection, message):
            node.seen_s = time.monotonic()
            self._send(connection, Welcome(node.seq, socket.gethostname(), self._run_id))

    def _send(self, connection: bytes, message: Down) -> None:
        """Sends it; an agent that has gone, or does not read, misses it."""
        try:
            self._agents.send(connection, transport.DONTWAIT | transport.SNDMORE)
            self._agents.send(pack(message), transport.DONTWAIT)
        except zmq.ZMQError as error:
            _log.debug("not sent: %s", error)
