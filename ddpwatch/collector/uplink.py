"""An agent's connection to the root: what goes up, in order and bounded, and what comes down.

Without a root, the agent goes on for its own viewers, and keeps trying.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, starmap
from typing import NamedTuple

import zmq

from ddpwatch.collector.node_steps import NodeStepPacker, Packed
from ddpwatch.collector.nodes import node_number
from ddpwatch.collector.protocol import (
    Ack,
    Batch,
    Down,
    GrantedLease,
    Introduction,
    Open,
    Ping,
    Pong,
    Up,
    Welcome,
    pack,
    unpack_down,
)  # fmt: skip
from ddpwatch.run import clock
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.wire import transport
from ddpwatch.wire.control import Connect
from ddpwatch.wire.messages import Bye, ClockExchange, Group, Hello, Layout, Message, Step, encode
from ddpwatch.wire.transport import HANDSHAKE_S

QUEUE_BYTES = 16 << 20  # half a minute of a busy node, and more
BATCH_BYTES = 1 << 20
WINDOW = 64  # batches on their way: a root that is slow gets no more
SILENT_S = 4.0  # without anything, a connection that worked is replaced: the root answers every 2 s at least
ANSWER_S = HANDSHAKE_S + 1.0  # a connection that has never worked is replaced after this; ZeroMQ retries until then
UNREACHABLE_S = 10.0
PINGS = 8  # in a round, at least
LONG_ROUND_NS = 10_000_000  # after which a long round has no more
FIRST_LONG_ROUNDS, LONG_ROUND_EVERY = 4, 8  # each takes 10 ms of a core of both nodes
PING_S = 2.0  # from one round of pings to the next
_log = logging.getLogger("ddpwatch.collector")


class _Entry(NamedTuple):
    """A frame. A ``key`` makes it essential, as long as no newer one has the same."""

    frame: bytes
    key: Hashable


@dataclass(slots=True)
class _Parcel:
    """One batch."""

    seq: int
    entries: list[_Entry]
    nbytes: int


class UpQueue:
    """What the root has not acknowledged. No socket.

    Beyond the limit, the oldest frames are dropped, and counted. Of the essential ones, the newest of each key stay, up
    to half the limit, small ones first: without these, nothing else makes sense.

    Args:
        limit: Of the frames' size together, in bytes.

    Attributes:
        lost: Frames dropped.
    """

    def __init__(self, limit: int = QUEUE_BYTES) -> None:
        self.lost = 0
        self._limit = limit
        self._parcels: deque[_Parcel] = deque()
        self._nbytes = 0
        self._seq = 0
        self._sent = 0  # up to which number, on this connection

    def add_frame(self, frame: bytes, key: Hashable = None) -> None:
        """Appends a frame, which is essential if it has a key."""
        last = self._parcels[-1] if self._parcels else None
        if last is None or last.seq <= self._sent or last.nbytes + len(frame) > BATCH_BYTES:
            self._seq += 1
            last = _Parcel(self._seq, [], 0)
            self._parcels.append(last)
        last.entries.append(_Entry(frame, key))
        last.nbytes += len(frame)
        self._nbytes += len(frame)
        if self._nbytes > self._limit:
            self._make_room()

    def acknowledge(self, seq: int) -> None:
        """Forgets what has arrived."""
        while self._parcels and self._parcels[0].seq <= seq:
            self._nbytes -= self._parcels.popleft().nbytes

    def rewind(self) -> None:
        """Sends everything again that was not acknowledged."""
        self._sent = 0

    def unsent(self) -> Iterator[Batch]:
        """Yields the next batches, as far as the window allows."""
        for parcel in [parcel for parcel in self._window() if parcel.seq > self._sent]:
            self._sent = parcel.seq
            yield Batch(parcel.seq, [entry.frame for entry in parcel.entries], self.lost)

    @property
    def first(self) -> int:
        """Number of the oldest batch that was not acknowledged, or of the next."""
        return self._parcels[0].seq if self._parcels else self._seq + 1

    def __len__(self) -> int:
        return len(self._parcels)

    def _window(self) -> list[_Parcel]:
        return [self._parcels[index] for index in range(min(WINDOW, len(self._parcels)))]

    def _make_room(self) -> None:
        """Drops the oldest frames, but for essential ones, down to nine tenths of the limit."""
        essential = self._essential()
        kept: deque[_Parcel] = deque()
        while self._parcels and self._nbytes > 0.9 * self._limit:
            parcel = self._parcels.popleft()
            entries = [entry for entry in parcel.entries if essential.get(entry.key) is entry]
            nbytes = sum(len(entry.frame) for entry in entries)
            self.lost += len(parcel.entries) - len(entries)
            self._nbytes += nbytes - parcel.nbytes
            if entries:
                kept.append(_Parcel(parcel.seq, entries, nbytes))
        self._parcels = kept + self._parcels

    def _essential(self) -> dict[Hashable, _Entry]:
        """Returns the newest frame of each key, as far as half the limit reaches: small ones first, as a hello is."""
        newest: dict[Hashable, _Entry] = {}
        for parcel in reversed(self._parcels):
            for entry in reversed(parcel.entries):
                if entry.key is not None:
                    newest.setdefault(entry.key, entry)
        smallest = sorted(newest.values(), key=lambda entry: len(entry.frame))
        until = accumulate(len(entry.frame) for entry in smallest)
        return {entry.key: entry for entry, nbytes in zip(smallest, until, strict=True) if 2 * nbytes <= self._limit}


class ClockPings:
    """Rounds of pings: the fastest there bounds the clocks best from one side, the fastest back from the other.

    Attributes:
        goes_on: Whether the round has more pings.
    """

    def __init__(self) -> None:
        self.goes_on = self._is_long = False
        self._rounds = 0
        self._next_round_s = 0.0
        self._answers: list[tuple[Pong, int]] = []

    def is_due(self, now_s: float) -> bool:
        """Returns whether a round starts now. One in which a ping got lost is given up."""
        if now_s < self._next_round_s:
            return False
        self.goes_on, self._answers, self._next_round_s = True, [], now_s + PING_S
        self._is_long = self._rounds < FIRST_LONG_ROUNDS or self._rounds % LONG_ROUND_EVERY == 0
        self._rounds += 1
        return True

    def answered(self, pong: Pong, returned_ns: int) -> list[tuple[Pong, int]]:
        """Returns the round's best answers (one or two) with their returns, after the last one; none before."""
        self._answers.append((pong, returned_ns))
        number, lasted_ns = len(self._answers), returned_ns - self._answers[0][0].sent_ns
        has_time = self._is_long and lasted_ns < LONG_ROUND_NS
        self.goes_on = number < PINGS or (number < pong.pings and has_time)
        if self.goes_on:
            return []
        there = min(self._answers, key=lambda answer: answer[0].received_ns - answer[0].sent_ns)
        back = min(self._answers, key=lambda answer: answer[1] - answer[0].replied_ns)
        return [there] if there is back else [there, back]


class Uplink:
    """The agent's end of the connection.

    Args:
        context: Of the collector.
        poller: Polls the connection, together with the sockets of its owner.
        order: Where the root is, and the keys.
        restarts: How many agents of this node have died.
        introduce: The hellos, groups and layouts that the agent keeps.

    Attributes:
        wanted_ppm: The budget that viewers here ask for.
        welcome: The root's newest welcome; None before the first.
    """

    def __init__(
        self,
        context: transport.Context,
        poller: zmq.Poller,
        order: Connect,
        restarts: int,
        introduce: Callable[[], Iterable[bytes]],
    ) -> None:
        self.wanted_ppm = 0
        self.welcome: Welcome | None = None
        self._context = context
        self._poller = poller
        self._order = order
        self._restarts = restarts
        self._introduce = introduce
        self._queue = UpQueue()
        self._packer = NodeStepPacker(node_number(order.node))
        self._pings = ClockPings()
        self._clock = clock.boot_id(), clock.time_namespace()
        self._is_welcome = False
        self._has_hello = False  # before, the root would not know whose clock is measured
        self._since_s = time.monotonic()
        self._socket = self._opened()

    def take_frame(self, message: Message, frame: bytes) -> None:
        """Takes a frame to send up: a step together with those of the other ranks here."""
        if isinstance(message, Step):
            self._add_steps(self._packer.take_step(message))
            return
        if isinstance(message, Bye) and message.rank is not None:
            self._add_steps([*self._packer.rest(), *self._packer.leave(message.rank)])
        self._has_hello = self._has_hello or isinstance(message, Hello)
        self._queue.add_frame(frame, _key(message))

    def turn(self, polled: transport.Polled = transport.NOT_POLLED) -> list[GrantedLease | StackOrder]:
        """Sends and receives what there is; the leases and orders that have come. Never waits."""
        wishes = [wish for wish in starmap(self._heard, self._received(polled)) if wish is not None]
        now = time.monotonic()
        self._add_steps(self._packer.flush(time.monotonic_ns()))
        if now - self._heard_s > (SILENT_S if self._is_welcome else ANSWER_S):
            self._reopen()
        if self._is_welcome:
            if self._pings.is_due(now):
                self._ping()
            for batch in self._queue.unsent():
                self._send(batch)
        return wishes

    @property
    def endpoint(self) -> str:
        """The root's."""
        return self._order.endpoint

    @property
    def is_unreachable(self) -> bool:
        """Whether no root has ever answered, for long enough to say so."""
        return self.welcome is None and time.monotonic() - self._since_s > UNREACHABLE_S

    @property
    def is_done(self) -> bool:
        """Whether all has arrived, or nobody is there to receive it. A root may still have to answer the first time."""
        is_gone = not self._is_welcome and self.welcome is not None
        return not self._queue or is_gone or self.is_unreachable

    def close(self) -> None:
        """Closes the connection."""
        self._poller.unregister(self._socket)
        self._socket.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _add_steps(self, steps: Iterable[Packed]) -> None:
        for step in steps:
            self._queue.add_frame(encode(step))

    def _opened(self) -> transport.Socket:
        self._is_welcome, self._heard_s = False, time.monotonic()
        opened = transport.agent_dealer(self._context, self._order.endpoint, self._order.key, self._order.keys)
        self._poller.register(opened, zmq.POLLIN)
        opened.send(pack(Open(self._restarts, self._queue.first, socket.gethostname())), zmq.DONTWAIT)
        return opened

    def _reopen(self) -> None:
        self.close()
        self._socket = self._opened()

    def _received(self, polled: transport.Polled) -> Iterator[tuple[bytes, int]]:
        """Yields what has come, and by when it was there."""
        source = self._socket
        moments = polled.moments(source)
        while source is self._socket:  # it is replaced when the root does not know it
            try:
                data = source.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield data, next(moments)

    def _heard(self, data: bytes, there_ns: int) -> GrantedLease | StackOrder | None:
        message = unpack_down(data)
        if message is None:
            return None
        self._heard_s = time.monotonic()
        if isinstance(message, (GrantedLease, StackOrder)):
            return message
        self._obey(message, there_ns)
        return None

    def _obey(self, message: Down, there_ns: int) -> None:
        if isinstance(message, Welcome):
            self._enter(message)
        elif isinstance(message, Ack):
            self._queue.acknowledge(message.seq)
        elif isinstance(message, Pong):
            self._measure(message, there_ns)
        else:
            self._reopen()

    def _enter(self, welcome: Welcome) -> None:
        """Goes on where the root is. One that knows nothing of what was acknowledged needs introductions."""
        if welcome.seq == 0 and self._queue.first > 1:
            for frames in _in_portions(self._introduce()):
                self._send(Introduction(frames))
        self._queue.acknowledge(welcome.seq)
        self._queue.rewind()
        self.welcome, self._is_welcome = welcome, True

    def _ping(self) -> None:
        self._send(Ping(time.monotonic_ns(), self.wanted_ppm))

    def _measure(self, pong: Pong, returned_ns: int) -> None:
        best = self._pings.answered(pong, returned_ns)
        if self._pings.goes_on:
            self._ping()
        if self._has_hello:
            for answer in best:
                self._queue.add_frame(encode(self._exchange(*answer)))

    def _exchange(self, pong: Pong, returned_ns: int) -> ClockExchange:
        return ClockExchange(
            node=node_number(self._order.node),
            node_boot_id=self._clock[0],
            node_time_ns=self._clock[1],
            root_boot_id=pong.boot_id,
            root_time_ns=pong.time_ns,
            sent_ns=pong.sent_ns,
            received_ns=pong.received_ns,
            replied_ns=pong.replied_ns,
            returned_ns=returned_ns,
        )

    def _send(self, message: Up) -> None:
        try:
            self._socket.send(pack(message), zmq.DONTWAIT)
        except zmq.ZMQError as error:  # full: the connection is opened again after a while, and all of it sent again
            _log.debug("not sent: %s", error)


def _key(message: Message) -> Hashable:
    """Returns the key of what steps cannot be understood without: a message replaces the one of its key. Else None."""
    if isinstance(message, Layout):
        return Layout, message.rank, message.module
    if isinstance(message, Group):
        return Group, message.rank, message.id
    return (type(message), message.rank) if isinstance(message, (Hello, Bye)) else None


def _in_portions(frames: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the frames in messages of about `BATCH_BYTES`."""
    portion: list[bytes] = []
    for frame in frames:
        if portion and sum(map(len, portion)) + len(frame) > BATCH_BYTES:
            yield portion
            portion = []
        portion.append(frame)
    if portion:
        yield portion
