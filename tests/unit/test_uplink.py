"""What an agent keeps for the root, and how agents and the root speak, over loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn

import pytest
import zmq

from ddpwatch.collector import root as root_module
from ddpwatch.collector import uplink as uplink_module
from ddpwatch.collector.attention import Attention
from ddpwatch.collector.hub import Hub
from ddpwatch.collector.node_links import NodeLinks, whole_run
from ddpwatch.collector.nodes import AdmittedNode, Nodes
from ddpwatch.collector.protocol import (
    Batch,
    GrantedLease,
    Introduction,
    Open,
    Ping,
    Pong,
    Welcome,
    pack,
    unpack_down,
    unpack_up,
)  # fmt: skip
from ddpwatch.collector.root import Root
from ddpwatch.collector.uplink import BATCH_BYTES, WINDOW, ClockPings, Uplink, UpQueue
from ddpwatch.sampling.lease import FULL_PPM
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.wire import transport
from ddpwatch.wire.control import Admit, Connect, ControlSocket, Listen, Listening, Unreachable
from ddpwatch.wire.keys import KeyPair, new_key_pair
from ddpwatch.wire.messages import Beat, ClockExchange, Message, decode, encode
from tests.support.frames import hello

NODE = "0a1b2c3d4e5f"
OTHER = "ffffffffffff"
MS = 1_000_000
INTRODUCTIONS = [bytes(BATCH_BYTES), b"introduction"]  # too much for one message


# -- the queue -------------------------------------------------------------------------------------------------------


def test_what_is_not_acknowledged_is_sent_again() -> None:
    queue = UpQueue()
    queue.add_frame(b"a")
    queue.add_frame(b"b")
    assert [(batch.seq, batch.frames) for batch in queue.unsent()] == [(1, [b"a", b"b"])]
    queue.add_frame(b"c")
    assert [(batch.seq, batch.frames) for batch in queue.unsent()] == [(2, [b"c"])]
    assert list(queue.unsent()) == []
    queue.acknowledge(1)
    queue.rewind()
    assert [batch.seq for batch in queue.unsent()] == [2]
    queue.acknowledge(2)
    assert (len(queue), queue.first) == (0, 3)


def test_a_batch_and_the_window_are_bounded() -> None:
    queue = UpQueue(limit=WINDOW * 4 * BATCH_BYTES)
    for _ in range(WINDOW + 2):
        queue.add_frame(bytes(BATCH_BYTES // 2 + 1))
    assert [len(batch.frames) for batch in queue.unsent()] == [1] * WINDOW
    queue.acknowledge(2)
    assert [batch.seq for batch in queue.unsent()] == [WINDOW + 1, WINDOW + 2]


def test_without_room_the_oldest_are_dropped_and_counted_but_nothing_essential() -> None:
    queue = UpQueue(limit=1000)
    queue.add_frame(b"hello", key="rank 0")
    for number in range(30):
        queue.add_frame(b"%099d" % number)
    frames = [frame for batch in queue.unsent() for frame in batch.frames]
    assert frames[0] == b"hello"
    assert frames[1:] == [b"%099d" % number for number in range(queue.lost, 30)]
    assert 20 <= queue.lost <= 22
    assert list(UpQueue().unsent()) == []


def test_essential_frames_are_bounded_and_the_newest_of_each_key_stay() -> None:
    queue = UpQueue(limit=1000)
    for number in range(60):
        queue.add_frame(b"layout %091d" % number, key=("layout", number % 2))
    frames = [frame for batch in queue.unsent() for frame in batch.frames]
    assert sum(map(len, frames)) <= 1000
    assert frames[-2:] == [b"layout %091d" % 58, b"layout %091d" % 59]
    assert queue.lost == 60 - len(frames)


def test_essential_frames_that_differ_get_half_the_room_small_ones_and_then_the_newest_first() -> None:
    queue = UpQueue(limit=1000)
    queue.add_frame(b"hello", key="hello")
    for number in range(60):
        queue.add_frame(b"layout %091d" % number, key=number)
        queue.add_frame(b"%09d" % number)
    frames = [frame for batch in queue.unsent() for frame in batch.frames]
    assert sum(map(len, frames)) <= 1000
    assert frames[0] == b"hello"
    assert frames[-2:] == [b"layout %091d" % 59, b"%09d" % 59]
    assert queue.lost == 121 - len(frames)


def test_a_dropped_frame_shows_in_the_next_batch() -> None:
    queue = UpQueue(limit=10)
    for _ in range(3):
        queue.add_frame(bytes(6))
        last = [batch.lost for batch in queue.unsent()]
    assert last == [2]


def pong(sent_ns: int, there_ns: int, back_ns: int, pings: int = 0) -> tuple[Pong, int]:
    """An answer after 100 ns, and when it was back; both clocks show the same."""
    received_ns = sent_ns + there_ns
    return Pong(sent_ns, received_ns, received_ns + 100, "", "", pings), received_ns + 100 + back_ns


def test_of_a_round_of_pings_the_fastest_there_and_the_fastest_back_count() -> None:
    pings = ClockPings()
    assert pings.is_due(1.0)
    assert not pings.is_due(1.5)
    there, back = [50, 40, 30, 90, 80, 70, 60, 50], [900, 300, 500, 200, 800, 700, 600, 1000]
    pongs = [pong(number * MS, *ns) for number, ns in enumerate(zip(there, back, strict=True))]
    assert [pings.answered(*each) for each in pongs] == [*[[]] * 7, [pongs[2], pongs[3]]]
    assert not pings.goes_on


def test_a_round_whose_fastest_ping_is_the_fastest_both_ways_gives_one_exchange() -> None:
    pings = ClockPings()
    assert pings.is_due(1.0)
    pongs = [pong(number * MS, ns, ns) for number, ns in enumerate((9, 3, 5, 4, 8, 7, 6, 10))]
    assert [pings.answered(*each) for each in pongs] == [*[[]] * 7, [pongs[1]]]


def test_a_round_has_more_pings_where_they_are_fast() -> None:
    pings = ClockPings()
    assert pings.is_due(1.0)
    found = [pings.answered(*pong(number * MS // 2, 100, 100, 32)) for number in range(21)]
    assert [bool(exchanges) for exchanges in found] == [False] * 20 + [True]


def test_the_first_rounds_and_every_eighth_have_more_pings() -> None:
    pings = ClockPings()
    sent = []
    for now_s in range(0, 48, 2):
        assert pings.is_due(now_s)
        sent.append(0)
        while pings.goes_on:
            pings.answered(*pong(sent[-1] * MS // 2, 100, 100, 32))
            sent[-1] += 1
    assert [number for number, count in enumerate(sent) if count == 21] == [0, 1, 2, 3, 8, 16]
    assert set(sent) == {8, 21}


def test_a_root_with_many_nodes_gets_fewer_pings_from_each() -> None:
    pings = ClockPings()
    assert pings.is_due(1.0)
    found = [pings.answered(*pong(number * MS // 2, 100, 100, 12)) for number in range(12)]
    assert [bool(exchanges) for exchanges in found] == [False] * 11 + [True]


def test_a_ping_was_there_when_the_poll_ended_whatever_else_came_first(pair: Pair) -> None:
    """So what the collector does between the poll and the ping does not widen the clock's bounds."""
    root, agent = pair.start(), pair.agent()
    pair.until(lambda: agent.welcome is not None)
    pair.until(lambda: not agent._pings.goes_on)
    agent._ping()
    found = polled(root, timeout_ms=30_000)
    assert found.at_ns < time.monotonic_ns()
    list(root.receive(found))
    pong = unpack_down(agent._socket.recv())
    assert isinstance(pong, Pong)
    assert pong.received_ns == found.at_ns
    assert next(found.moments(agent._socket)) > found.at_ns  # of a source that the poll has not found


def polled(root: Root, timeout_ms: int = 0) -> transport.Polled:
    poller = zmq.Poller()
    for source in root.sources:
        poller.register(source, zmq.POLLIN)
    return transport.poll(poller, timeout_ms)


# -- agent and root --------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A root and what connects to it."""

    context: transport.Context = field(default_factory=transport.Context)
    keys: KeyPair = field(default_factory=new_key_pair)
    agent_keys: KeyPair = field(default_factory=new_key_pair)
    admitted: list[Admit] = field(default_factory=list)
    received: list[tuple[str, bytes]] = field(default_factory=list)
    leases: list[GrantedLease | StackOrder] = field(default_factory=list)
    uplinks: list[Uplink] = field(default_factory=list)
    dealers: list[transport.Socket] = field(default_factory=list)
    root: Root | None = None
    root_context: transport.Context | None = None
    listening: Listening | None = None

    @property
    def endpoint(self) -> str:
        """Where the root listens, or did."""
        return "" if self.listening is None else self.listening.endpoint

    def start(self, endpoint: str = "") -> Root:
        """A root that listens and admits the agent; at the same endpoint as one before."""
        root = self.begin(endpoint)
        self.until(lambda: self.listening)
        assert self.endpoint, self.listening
        return root

    def begin(self, endpoint: str = "") -> Root:
        """A root that does not listen yet."""
        self.listening = None
        self.root_context = context = transport.Context()
        self.root = Root(context, Listen(self.keys, endpoint), "run", lambda: None)
        for order in self.admitted or [Admit(NODE, self.agent_keys.public, [2, 3])]:
            self.root.nodes.admit(order, time.monotonic())
        return self.root

    def stop(self) -> str:
        """Ends the root; its endpoint."""
        assert self.root is not None
        assert self.root_context is not None
        self.root.close()
        self.root_context.destroy(linger=0)  # only then is the port free
        self.root = None
        return self.endpoint

    def agent(self, introduce: Callable[[], list[bytes]] = list) -> Uplink:
        """The agent's end."""
        order = Connect(self.endpoint, self.keys.public, self.agent_keys, NODE)
        self.uplinks.append(Uplink(self.context, zmq.Poller(), order, 0, introduce))
        return self.uplinks[-1]

    def dealer(self, keys: KeyPair | None = None) -> transport.Socket:
        """A connection with whatever keys."""
        made = transport.agent_dealer(self.context, self.endpoint, self.keys.public, keys or self.agent_keys)
        self.dealers.append(made)
        return self.dealers[-1]

    def until(self, condition: Callable[[], object]) -> None:
        """Lets both ends go on until the condition holds."""
        deadline = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < deadline
            self.turn()
            time.sleep(0.002)  # between two looks

    def turn(self) -> None:
        """Lets both ends go on once."""
        if self.root is not None:
            self.listening = self.root.listen() or self.listening
            self.received += [(node.name, frame) for node, frame in self.root.receive(polled(self.root))]
        for each in self.uplinks:
            self.leases += each.turn()

    def beats(self) -> list[tuple[int, int]]:
        """Rank and step of the heartbeats that have come."""
        found = [decode(frame) for _, frame in self.received if frame not in INTRODUCTIONS]
        return [(message.rank, message.step) for message in found if isinstance(message, Beat)]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.uplinks:
            each.close()
        for dealer in self.dealers:
            dealer.close(linger=0)
        if self.root is not None:
            self.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("DDPWATCH_IFNAME", "lo")
    with Pair() as made:
        yield made


def beat(step: int, rank: int = 2) -> Beat:
    return Beat(rank=rank, at_ns=1, step=step, phase="forward", since_ns=1)


def send(agent: Uplink, message: Message) -> None:
    agent.take_frame(message, encode(message))


def node_of(pair: Pair) -> AdmittedNode:
    assert pair.root is not None
    node = pair.root.nodes.get(NODE)
    assert node is not None
    return node


def test_frames_go_up_in_order_and_leases_come_down(pair: Pair) -> None:
    root, agent = pair.start(), pair.agent()
    agent.wanted_ppm = 7
    for step in range(5):
        send(agent, beat(step))
    pair.until(lambda: len(pair.beats()) == 5 and agent.is_done)
    assert pair.beats() == [(2, step) for step in range(5)]
    assert root.nodes.wanted_ppm(time.monotonic()) == 7
    assert agent.welcome is not None
    assert agent.welcome.run_id == "run"
    root.lease((20_000, 41))
    pair.until(lambda: pair.leases)
    assert pair.leases == [GrantedLease(20_000, 41)]


def test_orders_come_down(pair: Pair) -> None:
    root, agent, order = pair.start(), pair.agent(), StackOrder(9, 2, 0, 50, 70)
    pair.until(lambda: agent.welcome is not None)
    root.order(None)
    root.order(order)
    pair.until(lambda: pair.leases)
    assert pair.leases == [order]


def test_what_is_to_be_typed_for_the_whole_run_holds_no_other_command() -> None:
    assert (
        whole_run(Welcome(0, "node-1.cluster", "train-1200-ab")) == "ddpwatch attach ssh://node-1.cluster/train-1200-ab"
    )
    assert whole_run(Welcome(0, "-oProxyCommand=x", "run")) == ""
    assert whole_run(Welcome(0, "node1; x", "run")) == ""
    assert whole_run(Welcome(0, "node1", "run $(x)")) == ""


def test_the_clocks_are_measured_once_a_rank_has_introduced_itself(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.start()
    agent = pair.agent()
    pair.until(lambda: agent.welcome is not None)
    pongs: list[Pong] = []
    monkeypatch.setattr(agent._pings, "answered", lambda pong, at: pongs.append(pong) or [(pong, at)])
    pair.until(lambda: pongs)
    pair.turn()
    assert pair.received == []  # no rank has introduced itself: the root does not know whose clock that is
    send(agent, hello(2))
    pair.until(lambda: len(pair.received) > 1)
    first, exchange = [decode(frame) for _, frame in pair.received[:2]]
    assert first == hello(2)
    assert isinstance(exchange, ClockExchange)
    assert exchange.node == int(NODE, 16)
    assert exchange.sent_ns <= exchange.received_ns <= exchange.replied_ns <= exchange.returned_ns


def test_a_root_that_was_started_again_gets_introductions_and_nothing_twice(pair: Pair) -> None:
    pair.start()
    agent = pair.agent(lambda: INTRODUCTIONS)
    send(agent, beat(0))
    pair.until(lambda: agent.is_done and pair.beats())
    endpoint = pair.stop()
    send(agent, beat(1))
    agent.turn()
    pair.start(endpoint)
    pair.until(lambda: [frame for _, frame in pair.received if frame in INTRODUCTIONS] == INTRODUCTIONS)
    pair.until(lambda: len(pair.beats()) == 2 and agent.is_done)
    assert pair.beats() == [(2, 0), (2, 1)]


def test_an_agent_that_loses_its_connection_sends_what_is_missing_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, agent = pair.start(), pair.agent()
    send(agent, beat(0))
    pair.until(lambda: agent.is_done and pair.beats())
    send(agent, beat(1))
    agent.turn()  # on its way, and never acknowledged on this connection
    monkeypatch.setattr(uplink_module, "SILENT_S", -10.0)
    agent.turn()
    monkeypatch.undo()
    assert not agent._is_welcome
    pair.until(lambda: len(pair.beats()) == 2 and agent.is_done)
    assert pair.beats() == [(2, 0), (2, 1)]
    assert root.nodes.refused["unknown key"] == 0


def test_a_root_receives_a_bounded_number_of_bytes_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest comes with the next turns, and nothing is lost."""
    root, agent = pair.start(), pair.agent()
    pair.until(lambda: agent.welcome is not None)
    monkeypatch.setattr(root_module, "RECEIVE_BYTES", 1)
    turns = []

    def arrive(polled: transport.Polled) -> Iterator[tuple[bytes, list[zmq.Frame], int]]:
        turns.append(found := list(arrived(polled)))
        return iter(found)

    arrived = root._arrived
    monkeypatch.setattr(root, "_arrived", arrive)
    for step in range(5):
        send(agent, beat(step))
        agent.turn()
    pair.until(lambda: len(pair.beats()) == 5 and agent.is_done)
    assert pair.beats() == [(2, step) for step in range(5)]
    assert {len(found) for found in turns} <= {0, 1}


def test_what_is_passed_on_has_been_acknowledged(pair: Pair) -> None:
    """A root that is killed in between leaves a gap, and a step that was passed on does not come again."""
    root, agent = pair.start(), pair.agent()
    pair.until(lambda: agent.welcome is not None)
    send(agent, beat(0))
    frames: list[tuple[AdmittedNode, bytes]] = []
    while not frames:
        agent.turn()
        frames += islice(root.receive(polled(root)), 1)
    pair.root = None  # it gets no further
    pair.until(lambda: not agent._queue)
    pair.root = root


def test_a_handshake_is_not_given_up_before_its_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it takes long, on a busy machine, the next one would take as long."""
    root, agent = pair.start(), pair.agent()
    first, now = agent._socket, time.monotonic()
    at_most_s = first.getsockopt(zmq.HANDSHAKE_IVL) / 1000
    assert at_most_s == root._agents.getsockopt(zmq.HANDSHAKE_IVL) / 1000
    monkeypatch.setattr(time, "monotonic", lambda: now + at_most_s)
    agent.turn()
    assert agent._socket is first
    monkeypatch.setattr(time, "monotonic", lambda: now + 2 * at_most_s)
    agent.turn()
    assert agent._socket is not first


def test_an_agent_without_a_root_says_so_once_it_is_certain(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.start()
    agent = pair.agent()
    pair.stop()
    assert not agent.is_unreachable
    monkeypatch.setattr(uplink_module, "UNREACHABLE_S", 0.0)
    assert agent.is_unreachable
    assert agent.is_done  # nobody waits for what cannot be sent


def test_what_a_short_job_has_sent_waits_for_the_roots_first_answer(pair: Pair) -> None:
    """A job may end before its hosts are connected; the root waits for the ranks that it does not know."""
    pair.start()
    agent = pair.agent()
    send(agent, beat(0))
    while not agent.is_done:
        pair.turn()
    assert pair.beats() == [(2, 0)]


def test_another_key_is_refused_and_counted(pair: Pair) -> None:
    root = pair.start()
    pair.dealer(new_key_pair()).send(pack(Open(0, 1)))
    pair.until(lambda: root.nodes.refused["unknown key"])
    assert node_of(pair).connection == b""
    assert pair.received == []


def test_who_has_the_key_of_one_node_does_not_speak_as_another(pair: Pair) -> None:
    """The node is that of the key, whatever the messages say."""
    other = new_key_pair()
    pair.admitted = [Admit(NODE, pair.agent_keys.public, [2, 3]), Admit(OTHER, other.public, [4, 2])]
    root = pair.start()
    dealer = pair.dealer(other)
    dealer.send(pack(Open(0, 1, "pretender")))
    dealer.send(pack(Batch(1, [b"frame"])))
    pair.until(lambda: pair.received)
    assert pair.received == [(OTHER, b"frame")]
    found = root.nodes.get(OTHER)
    assert found is not None
    assert found.ranks == {4}  # rank 2 is another node's


def test_an_agent_with_a_wrong_key_of_the_root_says_nothing_and_costs_nobody(pair: Pair) -> None:
    """A store that lies: the handshake fails and is counted."""
    others, wrong = new_key_pair(), new_key_pair()
    pair.admitted = [Admit(NODE, pair.agent_keys.public, [2, 3]), Admit(OTHER, others.public, [4])]
    root, honest = pair.start(), pair.agent()
    lied_to = Uplink(pair.context, zmq.Poller(), Connect(pair.endpoint, wrong.public, others, OTHER), 0, list)
    pair.uplinks.append(lied_to)
    send(lied_to, beat(0, rank=4))
    for step in range(20):
        send(honest, beat(step))
    pair.until(lambda: root.nodes.refused["bad handshake"] and len(pair.beats()) == 20 and honest.is_done)
    assert pair.beats() == [(2, step) for step in range(20)]
    assert lied_to.welcome is None
    assert len(lied_to._queue) == 1


def test_an_agent_with_a_wrong_address_of_the_root_says_nothing_there(pair: Pair) -> None:
    """Whoever listens there has another key than the root."""
    pair.start()
    with Pair() as false:
        false.admitted = [Admit(NODE, pair.agent_keys.public, [2, 3])]
        root = false.start()
        order = Connect(false.endpoint, pair.keys.public, pair.agent_keys, NODE)
        false.uplinks.append(lied_to := Uplink(false.context, zmq.Poller(), order, 0, list))
        send(lied_to, beat(0))
        false.until(lambda: root.nodes.refused["bad handshake"])
        assert (false.received, lied_to.welcome) == ([], None)


@pytest.mark.parametrize(("endpoint", "key"), [("", "k" * 40), ("tcp://\x1b[2J:1", "k" * 40), ("tcp://[::1]:1", "k")])
def test_what_is_no_address_or_key_leaves_an_agent_with_its_own_viewers(endpoint: str, key: str) -> None:
    mine, its = socket.socketpair()
    context, rank = transport.Context(), ControlSocket(mine)
    hosts = NodeLinks(context, zmq.Poller(), control := its.detach(), "run", True, 0, Hub(8), Attention("run", 8, {}))
    rank.send(Connect(endpoint, key, new_key_pair(), NODE))
    assert list(hosts.turn(transport.Polled({control}, 0))) == []
    assert rank.receive() == [Unreachable(endpoint)]
    hosts.close()
    rank.close()
    context.destroy(linger=0)


def test_replays_and_junk_are_refused_and_counted(pair: Pair) -> None:
    root = pair.start()
    dealer = pair.dealer()
    for message in (Open(1, 1), Batch(1, [b"1"]), Batch(3, [b"3"]), Batch(2, [b"late"]), Batch(3, [b"again"])):
        dealer.send(pack(message))
    dealer.send(pack(Open(0, 1)))  # of an agent that has died since
    dealer.send(b"junk")
    dealer.send_multipart([b"junk", b"junk"])
    pair.until(lambda: root.nodes.refused["not an agent's to send"] == 2)
    assert pair.received == [(NODE, b"1"), (NODE, b"3")]
    assert root.nodes.refused["repeated"] == 2
    assert root.nodes.refused["replayed"] == 1


def test_an_agent_that_was_started_again_counts_from_one(pair: Pair) -> None:
    pair.start()
    first = pair.dealer()
    for message in (Open(0, 1), Batch(1, [b"1"], lost=3)):
        first.send(pack(message))
    pair.until(lambda: pair.received)
    second = pair.dealer()
    for message in (Open(1, 1), Batch(1, [b"2"])):
        second.send(pack(message))
    pair.until(lambda: len(pair.received) == 2)
    first.send(pack(Batch(2, [b"of the dead"])))
    first.send(pack(Ping(1)))
    pair.until(lambda: first.poll(0) and isinstance(unpack_down(first.recv()), Welcome) is False)
    assert pair.received == [(NODE, b"1"), (NODE, b"2")]
    assert node_of(pair).lost == 3
    second.send(pack(Batch(2, [b"3"], lost=2)))
    pair.until(lambda: len(pair.received) == 3)
    assert node_of(pair).lost == 5


def test_a_budget_that_is_none_is_refused() -> None:
    """It would take the place of the slot in the ranks' page, and nothing could be granted any more."""
    assert unpack_up(pack(Ping(1, FULL_PPM))) == Ping(1, FULL_PPM)
    assert unpack_up(pack(Ping(1, 1 << 40))) is None
    assert unpack_down(pack(GrantedLease(FULL_PPM, 1 << 43))) == GrantedLease(FULL_PPM, 1 << 43)
    assert unpack_down(pack(GrantedLease(1, 1 << 50))) is None
    assert unpack_down(pack(StackOrder(1, 1 << 30, 0, 5, 7))) is None


def test_a_rank_is_on_the_first_host_that_names_it_until_that_one_gives_it_up() -> None:
    nodes = Nodes()
    nodes.admit(Admit(NODE, "key", [2, 3]), 0.0)
    nodes.admit(Admit(OTHER, "other", [3, 4]), 0.0)
    assert [node and node.name for node in map(nodes.of_rank, (1, 2, 3, 4))] == [None, NODE, NODE, OTHER]
    nodes.admit(Admit(NODE, "key", [2]), 0.0)
    nodes.admit(Admit(OTHER, "other", [3, 4]), 0.0)
    assert [node and node.name for node in map(nodes.of_rank, (2, 3, 4))] == [NODE, OTHER, OTHER]


def test_a_silent_node_is_unseen_until_it_sends_again(pair: Pair) -> None:
    root = pair.start()
    pair.dealer().send(pack(Open(0, 1, "beta")))
    pair.until(lambda: node_of(pair).connection)
    now = node_of(pair).seen_s
    (state,) = root.nodes.news(now)
    assert (state.host, state.ranks, state.connected) == ("beta", [2, 3], True)
    assert list(root.nodes.news(now + 1)) == []
    assert not node_of(pair).is_unseen(now + 5)
    (state,) = root.nodes.news(now + 7)
    assert (state.connected, node_of(pair).is_unseen(now + 7)) == (False, True)
    node_of(pair).wanted_ppm = 7  # by a viewer that is gone with its agent
    assert (root.nodes.wanted_ppm(now), root.nodes.wanted_ppm(now + 7)) == (7, 0)
    node_of(pair).seen_s = now + 8
    (state,) = root.nodes.news(now + 8)
    assert state.connected


def test_a_port_that_is_taken_is_left_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.start()
    taken = pair.endpoint.rpartition(":")[2]
    monkeypatch.setenv("DDPWATCH_PORTS", taken)
    second = Pair()
    second.begin()
    second.until(lambda: second.listening)
    second.stop()
    second.context.destroy()
    assert second.listening is not None
    assert second.endpoint == ""
    assert f"all ports of 127.0.0.1 from {taken} to {taken} are in use" in second.listening.error


def test_a_root_that_was_started_again_waits_for_its_port(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents look nowhere else."""
    monkeypatch.setattr(root_module, "BIND_AGAIN_S", 0.0)
    pair.start()
    agent = pair.agent()
    pair.until(lambda: agent.welcome is not None)
    endpoint = pair.stop()
    with socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
        root = pair.begin(endpoint)
        assert root.listen() is root.listen() is None
    agent.welcome = None
    pair.until(lambda: agent.welcome is not None)
    assert pair.endpoint == endpoint


def test_a_slow_name_server_does_not_hold_up_the_root(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_by, answers = [], threading.Event()

    def ask(*_: object, **__: object) -> NoReturn:
        asked_by.append(threading.current_thread())
        if asked_by[-1] is not threading.main_thread():
            assert answers.wait(30.0)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.delenv("DDPWATCH_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    root = pair.begin()
    assert threading.main_thread() not in asked_by
    assert root.listen() is root.listen() is None
    answers.set()
    pair.until(lambda: pair.listening)
    assert pair.endpoint.startswith("tcp://127.0.0.1:")
    assert threading.main_thread() not in asked_by


def test_an_introduction_is_no_batch(pair: Pair) -> None:
    pair.start()
    dealer = pair.dealer()
    dealer.send(pack(Introduction([b"before it is welcome"])))
    dealer.send(pack(Open(0, 5)))
    dealer.send(pack(Introduction([b"hello"])))
    pair.until(lambda: pair.received)
    assert pair.received == [(NODE, b"hello")]
    assert node_of(pair).seq == 0
