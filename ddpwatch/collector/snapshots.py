"""Serves what viewers ask for: snapshots, piece by piece to slow readers, budgets for sampling, and stacks."""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from ddpwatch.collector.hub import Hub
from ddpwatch.sampling.lease import FULL_PPM
from ddpwatch.sampling.stack_order import StackOrder, parse_topic
from ddpwatch.wire import transport
from ddpwatch.wire.transport import LIVE, SNAPSHOT, STACKS, WANT, Envelope, Socket

RETRY_S = 0.25
RETRY_MAX_S = 4.0
GIVE_UP_S = 60.0  # without a frame read: the viewer asks again when it goes on
MAX_PENDING = 64  # viewers


@dataclass(slots=True)
class _Pending:
    """One viewer's snapshot: up to which sequence number it was sent, and when to go on."""

    sent: int = 0
    due_s: float = 0.0
    pause_s: float = RETRY_S
    progress_s: float = 0.0


class Snapshots:
    """The snapshots that viewers wait for.

    A publishing socket drops what a viewer's queue cannot take. For the snapshot that would lose its end, and the
    viewer would wait for it in vain. So snapshots are sent without dropping (to this viewer alone: nobody else has its
    topic), and continue when the queue has room again. Only the position is kept, not the frames.

    Attributes:
        has_viewers: Whether anybody follows the run. A viewer that starts to gets what it has missed with its snapshot.
    """

    def __init__(self, viewers: Socket, hub: Hub) -> None:
        self._viewers = viewers
        self._hub = hub
        self._pending: dict[bytes, _Pending] = {}
        self.has_viewers = False
        self._wanted: set[int] = set()
        self._orders: dict[bytes, StackOrder] = {}  # by topic

    @property
    def wanted_ppm(self) -> int:
        """The largest budget that viewers ask for, in ppm of a step; 0 while nobody does."""
        return min(max(self._wanted, default=0), FULL_PPM)

    @property
    def order(self) -> StackOrder | None:
        """The order to sample stacks that a viewer waits for, the oldest of several; None without one."""
        return next(iter(self._orders.values()), None)

    @property
    def is_sending(self) -> bool:
        """Whether a viewer still lacks a part of its snapshot."""
        return bool(self._pending)

    def serve(self) -> None:
        """Notes who asks, and sends as much as the queues take. Never waits."""
        self._note_requests()
        now = time.monotonic()
        due = [topic for topic, pending in self._pending.items() if now >= pending.due_s]
        if due:
            self._viewers.setsockopt(zmq.XPUB_NODROP, 1)
            try:
                for topic in due:
                    self._send(topic, self._pending[topic], now)
            finally:
                self._viewers.setsockopt(zmq.XPUB_NODROP, 0)

    def _note_requests(self) -> None:
        while True:
            try:
                request = self._viewers.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            topic = request[1:]
            if topic == LIVE:
                self.has_viewers = request[:1] == b"\x01"
            elif topic.startswith(WANT):
                self._note_wanted(topic.removeprefix(WANT), request[:1] == b"\x01")
            elif topic.startswith(STACKS):
                self._note_order(topic.removeprefix(STACKS), request[:1] == b"\x01")
            if request[:1] == b"\x00":
                self._pending.pop(topic, None)
            elif request[:1] == b"\x01" and topic.startswith(SNAPSHOT):
                self._pending[topic] = _Pending(progress_s=time.monotonic())
                if len(self._pending) > MAX_PENDING:
                    del self._pending[next(iter(self._pending))]

    def _note_wanted(self, budget: bytes, subscribed: bool) -> None:
        if not (budget.isdigit() and len(budget) <= len(str(FULL_PPM))):
            return
        if not subscribed:
            self._wanted.discard(int(budget))
        elif len(self._wanted) < MAX_PENDING:
            self._wanted.add(int(budget))

    def _note_order(self, topic: bytes, subscribed: bool) -> None:
        order = parse_topic(topic)
        if not subscribed:
            self._orders.pop(topic, None)
        elif order is not None and len(self._orders) < MAX_PENDING:
            self._orders.setdefault(topic, order)

    def _send(self, topic: bytes, pending: _Pending, now: float) -> None:
        before = pending.sent
        try:
            for batch in transport.batches(envelope for envelope in self._hub.snapshot() if envelope.seq > before):
                transport.publish(self._viewers, topic, batch, transport.DONTWAIT)
                pending.sent = batch[-1].seq
            transport.publish(
                self._viewers, topic, [Envelope(self._hub.newest, time.time_ns(), b"")], transport.DONTWAIT
            )
        except zmq.Again:
            if pending.sent > before:
                pending.pause_s, pending.progress_s = RETRY_S, now
            else:
                pending.pause_s = min(2 * pending.pause_s, RETRY_MAX_S)
            pending.due_s = time.monotonic() + pending.pause_s
            if now - pending.progress_s > GIVE_UP_S:
                del self._pending[topic]
        else:
            del self._pending[topic]
