"""What a rank and its collector say to each other."""

from __future__ import annotations

import socket

from ddpwatch.wire.control import Admit, ControlSocket, Listen, Listening, Ready
from ddpwatch.wire.keys import KeyPair


def test_messages_arrive_in_order_however_they_are_cut() -> None:
    mine, its = socket.socketpair()
    here, there = ControlSocket(mine), ControlSocket(its)
    sent = [Listen(KeyPair("p", "s")), Admit("a1", "k", [2, 3]), Listening("tcp://10.0.0.1:1"), Ready()]
    for message in sent:
        here.send(message)
    data = its.recv(10)  # the rest comes later
    there._received = data
    assert there.receive() == sent
    assert there.receive() == []
    here.close()
    assert there.receive() == []
    assert there.fileno() == -1
    assert there.receive() == []
    there.send(Ready())


def test_a_full_channel_loses_nothing_and_never_waits() -> None:
    mine, its = socket.socketpair()
    here, there = ControlSocket(mine), ControlSocket(its)
    orders = [Admit(f"{number:x}", "k" * 40, list(range(1000))) for number in range(200)]
    for order in orders:
        here.send(order)
    found = []
    while len(found) < len(orders):
        here.send()
        found += there.receive()
    assert found == orders
    here.close()
    there.close()


def test_what_is_no_message_is_skipped() -> None:
    mine, its = socket.socketpair()
    there = ControlSocket(its)
    mine.sendall(b'nonsense\n{"type":"other"}\n{"type":"ready"}\n')
    assert there.receive() == [Ready()]
    mine.close()
    there.close()
