"""A rank that lies: it writes to the job's store what it should not, and knocks at the root with a key of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ddpwatch.collector.protocol import Batch, Open, pack
from ddpwatch.probe.agent_rendezvous import CollectorAddress, Join, RootAddress, join_prefix
from ddpwatch.probe.rendezvous_server import AddressRequest
from ddpwatch.probe.store_requests import PendingRequest, understood
from ddpwatch.run import rundir
from ddpwatch.wire import transport
from ddpwatch.wire.keys import KeyPair, Seal, new_key_pair
from ddpwatch.wire.messages import Beat, encode

PREFIX = "ddpwatch/1"  # of the first session's questions
FALSE_NODE = "bad"
JUNK = 200
LIES = ("its rank is on a host of its own", "its host has a key of its own")
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED


class Liar:
    """Lies piece by piece, between two steps; writes what came of it to a file: ``in`` or ``refused`` per knock.

    Args:
        store: The job's.
        rank: The rank as which it poses: its own, which is watched.
        said: The file.
    """

    def __init__(self, store: Any, rank: int, said: Path) -> None:
        self._store, self._rank, self._said = store, rank, said
        self._context = transport.Context()
        self._lies = self._lie()

    def turn(self) -> None:
        """Goes on."""
        next(self._lies, None)

    def _lie(self) -> Iterator[None]:
        for number in range(JUNK):
            self._store.set(f"{PREFIX}/question/{self._store.add(f'{PREFIX}/questions', 1)}", f"junk {number}")
        about = yield from self._answered(PREFIX, AddressRequest(self._rank, FALSE_NODE))
        address = understood(about, CollectorAddress)
        found = []
        for node in (FALSE_NODE, rundir.node()):
            keys = new_key_pair()
            join = Join(self._rank, node, keys.public)
            answer = yield from self._answered(join_prefix(address.session), join)
            found.append((yield from self._knock(understood(answer, RootAddress), keys)))
        self._context.destroy(linger=0)
        (whole := self._said.with_suffix(".new")).write_text(" ".join(found))
        whole.rename(self._said)

    def _answered(self, prefix: str, text: AddressRequest | Join) -> Generator[None, None, str]:
        """Rank 0's answer to a question that is none of this rank's."""
        question = PendingRequest(self._store, prefix, Seal(), msgspec.json.encode(text).decode())
        while (answer := question.answer()) is None:
            yield
        return answer

    def _knock(self, root: RootAddress, keys: KeyPair) -> Generator[None, None, str]:
        """Connects as an agent, and sends a frame; whether it was let in."""
        dealer = transport.agent_dealer(self._context, root.endpoint, root.key, keys)
        monitor = transport.ConnectionMonitor(dealer, _EVENTS)
        dealer.send(pack(Open(0, 1, "liar")))
        beat = Beat(rank=self._rank, at_ns=1, step=1, phase="lie", since_ns=0)
        dealer.send(pack(Batch(1, [encode(beat)])))
        while not (events := list(monitor.events())):
            yield
        monitor.close()
        dealer.close(linger=0)
        return "in" if zmq.EVENT_HANDSHAKE_SUCCEEDED in events else "refused"
