"""A real root with 128 made-up agents, and a real agent with 8 made-up ranks, over loopback: what they cost.

    python benchmarks/many_agents.py [--seconds 60] [--agents 128]

Takes twice as long as it measures, and a minute. Budget: root at most 40 % of a core and 250 MB, nothing lost, and 95 %
of steps at a viewer within a second of their end; agent at most 5 % of a core and 80 MB, and 128 agents' node steps
at most 1 MB/s.

Each agent speaks for 8 ranks with 5 steps a second, in a job that has settled on its sampling (`node_steps.py`). It
sends twice a second, as ranks do: the steps that have ended since, packed beforehand, heartbeats, and device samples;
and it pings. All traffic is encrypted with CURVE, and each agent has a key of its own. The agents are one process, the
viewer, which takes node steps as they are, is another: a machine with two cores has none to spare. The columns:
    root core       the root's CPU time as a share of a core
    root waits      for how much of the time its main thread waited for a core: where that is much, so are the ages
    root MB         its memory, at most
    agents core     the CPU time of the process that plays the agents; near 100 %, the ages are its own
    lost            node steps that have not reached the viewer, frames that the root refused or agents dropped
    age p50, p95    from the end of a step to its arrival at the viewer; up to 500 ms of it, the agent waits
    steps MB/s      node steps, all agents together
    all MB/s        all frames of all agents

In the second table, 8 ranks send the same steps raw to an agent, which packs them, samples the ranks' processes and the
host, and sends to a root (`real_agent.py`). The last column is its node steps' rate, times 128.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from benchmarks.node_steps import (
    PER_NODE,
    SAMPLED_STEPS,
    STEPS_PER_S,
    acquainted,
    node_steps,
    others,
    packed,
)  # fmt: skip
from benchmarks.real_agent import COLUMNS, agent_row
from ddpwatch.collector.uplink import Uplink
from ddpwatch.common.text import table
from ddpwatch.probe.collector_process import CollectorProcess
from ddpwatch.run import clock, rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire import transport
from ddpwatch.wire.control import Admit, Connect, Listen, Listening
from ddpwatch.wire.keys import KeyPair, new_key_pair
from ddpwatch.wire.messages import ClockExchange, Hello, Message, Node, NodeStep, Status, decode, encode
from tests.support.synthetic import Fleet

RUN = "many-agents"
STEP_NS = 10**9 // STEPS_PER_S
SEND_S = 0.5
SETTLE_S = 2.0  # between the agents' first steps and the measurement
PATIENCE_S = 120.0
READ_S = 0.01  # between two looks of the viewer
ARRIVE_S = 3.0  # for the last steps, once the root has them


def name_of(node: int) -> str:
    """As `ddpwatch.run.rundir.node` would name it."""
    return f"{node + 1:012x}"


def ranks_of(node: int) -> list[int]:
    """Those that it speaks for."""
    return list(range(node * PER_NODE, (node + 1) * PER_NODE))


# -- the agents, a process ------------------------------------------------------------------------------------------


class Agents:
    """All agents of the run."""

    def __init__(self, listening: str, root_key: str, pairs: list[KeyPair]) -> None:
        self._poller = zmq.Poller()
        context = transport.Context()
        orders = [Connect(listening, root_key, pair, name_of(node)) for node, pair in enumerate(pairs)]
        self.uplinks = [Uplink(context, self._poller, order, 0, list) for order in orders]
        self._packed = [packed(acquainted(), steps).packed for _, steps in islice(node_steps("settled"), SAMPLED_STEPS)]

    def introduce(self) -> None:
        """Sends hellos and layouts, and waits until the root has them."""
        for message in Fleet(PER_NODE * len(self.uplinks)).introduction():
            if isinstance(message, Hello):
                about = {"boot_id": clock.boot_id(), "time_ns": clock.time_namespace()}
                message = msgspec.structs.replace(message, host=f"host{message.rank // PER_NODE}", **about)
            self.uplinks[message.rank // PER_NODE].take_frame(message, encode(message))  # type: ignore[union-attr, operator]
        until(lambda: all(uplink.welcome is not None and uplink.is_done for uplink in self.uplinks), self._turn_all)

    def train(self, start_ns: int, steps: int) -> None:
        """Sends the run's steps as they end, each agent at moments of its own, until the root has them."""
        sent = [0] * len(self.uplinks)
        for number in range(1 << 62):
            turn, node = divmod(number, len(self.uplinks))
            self._answer(start_ns / 1e9 + SEND_S * number / len(self.uplinks))
            ended = min((time.monotonic_ns() - start_ns) // STEP_NS, steps)
            for message in self._messages(node, turn, range(sent[node], ended)):
                self.uplinks[node].take_frame(message, encode(message))
            sent[node] = ended
            self.uplinks[node].turn()
            if min(sent) == steps:
                break
        until(lambda: all(uplink.is_done for uplink in self.uplinks), self._turn_all)

    def _messages(self, node: int, turn: int, steps: range) -> Iterator[Message]:
        number, ranks = int(name_of(node), 16), ranks_of(node)
        for step in steps:
            yield NodeStep(node=number, step=step, ranks=ranks, packed=self._packed[step % SAMPLED_STEPS])
        if turn % 2 == 0:  # the agent itself adds pings
            messages = (decode(frame) for frame in others(node, turn // 2))
            yield from (message for message in messages if not isinstance(message, ClockExchange))

    def _answer(self, until_s: float) -> None:
        """Lets agents hear what has come, until then."""
        by_socket = {uplink._socket: uplink for uplink in self.uplinks}
        while (left_s := until_s - time.monotonic()) > 0:
            for ready, _ in self._poller.poll(round(left_s * 1000)):
                if ready in by_socket:
                    by_socket[ready].turn()

    def _turn_all(self) -> None:
        for uplink in self.uplinks:
            uplink.turn()


def play(listening: str, root_key: str, pairs: list[KeyPair], steps: int, results: Any) -> None:
    """The process of the agents. Its results: when the first step starts, then its CPU seconds per second."""
    agents = Agents(listening, root_key, pairs)
    agents.introduce()
    start_ns = time.monotonic_ns()
    results.put(start_ns)
    spent_s = time.process_time()
    agents.train(start_ns, steps)
    results.put((time.process_time() - spent_s) / ((time.monotonic_ns() - start_ns) / 1e9))


def until(condition: Any, turn: Any) -> None:
    """Goes on until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the root and its agents do not come together")
        turn()
        time.sleep(0.005)


# -- the root and the viewer ----------------------------------------------------------------------------------------


def root(keys: KeyPair, pairs: list[KeyPair]) -> tuple[CollectorProcess, Listening]:
    """A collector that listens and admits all agents."""
    collector = CollectorProcess(RUN, PER_NODE * len(pairs), None)
    collector.order(Listen(keys))
    for node, pair in enumerate(pairs):
        collector.order(Admit(name_of(node), pair.public, ranks_of(node)))
    until(lambda: collector.is_ready() and collector.listening, lambda: None)
    assert collector.listening is not None
    return collector, collector.listening


@dataclass
class Seen:
    """What a viewer has received.

    Attributes:
        ages_ms: Of the node steps that ended within the measurement.
        missing: Node steps expected and not received.
        step_bytes: Of these node steps.
        bytes: Of all frames that the root had accepted when the measurement started and ended.
        refused, dropped: By the root, but for what it had already, and by each agent.
    """

    ages_ms: list[float] = field(default_factory=list)
    missing: int = 0
    step_bytes: int = 0
    bytes: tuple[int, int] = (0, 0)
    refused: int = 0
    dropped: dict[int, int] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """All that has not arrived."""
        return self.missing + self.refused + sum(self.dropped.values())


class Viewer:
    """Receives the run, and follows the root's process."""

    def __init__(self, source: LiveSource, process: psutil.Process, first: int, steps: int) -> None:
        self.seen = Seen()
        self.peak_mb = 0.0
        self._source, self._process = source, process
        self._first, self._steps = first, steps

    def read(self, start_ns: int = 0) -> None:
        """Takes what has come, and waits for more."""
        for message, envelope in self._source.read(0.0):
            now_ns = time.monotonic_ns()
            if isinstance(message, NodeStep) and self._first <= message.step < self._first + self._steps:
                self.seen.ages_ms.append((now_ns - start_ns - (message.step + 1) * STEP_NS) / 1e6)
                self.seen.step_bytes += len(envelope.frame)
            elif isinstance(message, Status):
                before = self.seen.bytes[0] if now_ns > start_ns + (self._first + 1) * STEP_NS else message.bytes
                self.seen.bytes = before, message.bytes
                refused = (count for reason, count in message.refused.items() if reason != "repeated")
                self.seen.refused = sum(refused)
                self.peak_mb = max(self.peak_mb, self._process.memory_info().rss / 1e6)
            elif isinstance(message, Node):
                self.seen.dropped[message.node] = message.dropped
        time.sleep(READ_S)

    def cpu_s(self) -> tuple[float, float]:
        """The root's CPU time so far, and for how long its main thread has waited for a core."""
        spent = self._process.cpu_times()
        waited_ns = Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[1]
        return spent.user + spent.system, int(waited_ns) / 1e9


def measured(nodes: int, seconds: int) -> list[str]:
    """The table's cells."""
    keys, pairs = new_key_pair(), [new_key_pair() for _ in range(nodes)]
    collector, listening = root(keys, pairs)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    first, steps = int(SETTLE_S * STEPS_PER_S), seconds * STEPS_PER_S
    arguments = (listening.endpoint, keys.public, pairs, first + steps, results)
    agents = context.Process(target=play, args=arguments, daemon=True)
    process = psutil.Process(rundir.live_runs()[0].pid)
    try:
        with closing(LiveSource(rundir.endpoints(RUN)[1], as_sent=True)) as source:
            agents.start()
            viewer = Viewer(source, process, first, steps)
            until(lambda: not results.empty(), viewer.read)
            start_ns = results.get()
            while time.monotonic_ns() < start_ns + first * STEP_NS:
                viewer.read(start_ns)
            before, since = viewer.cpu_s(), time.monotonic()
            while time.monotonic_ns() < start_ns + (first + steps) * STEP_NS:
                viewer.read(start_ns)
            shares = [(b - a) / (time.monotonic() - since) for a, b in zip(before, viewer.cpu_s(), strict=True)]
            until(lambda: not results.empty(), lambda: viewer.read(start_ns))  # the root has all
            deadline = time.monotonic() + ARRIVE_S
            while time.monotonic() < deadline:
                viewer.read(start_ns)
        viewer.seen.missing = nodes * steps - len(viewer.seen.ages_ms)
        return cells(viewer.seen, shares, viewer.peak_mb, results.get(), seconds)
    finally:
        collector.leave()
        process.terminate()
        process.wait()


def cells(seen: Seen, shares: list[float], peak_mb: float, agents: float, seconds: int) -> list[str]:
    """What was measured, as text."""
    p95 = statistics.quantiles(seen.ages_ms, n=20)[-1]
    before, after = seen.bytes
    return [
        *(f"{share:.1%}" for share in shares),
        f"{peak_mb:.0f}",
        f"{agents:.0%}",
        f"{seen.lost}",
        f"{statistics.median(seen.ages_ms):.0f} ms",
        f"{p95:.0f} ms",
        f"{seen.step_bytes / seconds / 1e6:.2f}",
        f"{(after - before) / seconds / 1e6:.2f}",
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--agents", type=int, default=128, help="default: %(default)s; 0: only the real agent")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dw-", ignore_cleanup_errors=True) as folder:
        os.environ.update(DDPWATCH_DIR=folder, DDPWATCH_IFNAME="lo")
        row = measured(options.agents, options.seconds) if options.agents else None
        agent = agent_row(options.seconds)
    headings = [
        "root core",
        "root waits",
        "root MB",
        "agents core",
        "lost",
        "age p50",
        "age p95",
        "steps MB/s",
        "all MB/s",
    ]
    if row is not None:
        print("\n".join(table(headings, [row])))
        print(f"{options.agents} agents with {PER_NODE} ranks each, {STEPS_PER_S} steps/s, {options.seconds} s\n")
    print("\n".join(table(COLUMNS, [agent])))
    print(f"one agent with {PER_NODE} ranks, {STEPS_PER_S} steps/s, {options.seconds} s")


if __name__ == "__main__":
    main()
