"""Measures what 128 nodes of 8 ranks send up, what their agents cost a real root, and what a real agent costs.

    python benchmarks/many_agents.py [--seconds 60] [--agents 128]

Takes twice as long as it measures, and two minutes. Budget: at most 1 MB/s of node steps for 1,024 ranks at 5 steps/s;
root at most 40 % of a core and 250 MB, nothing lost, and 95 % of steps at a viewer within a second of their end; agent
at most 5 % of a core and 80 MB.

The first table has a row for each mixture of steps:
    ``full``       all but one step in 32 are full, as in a job's first seconds
    ``attended``   one step in 8 is full, as with a viewer
    ``settled``    every second step is watched, one in 64 is full, as later on
Its columns: bytes of a rank's step as the rank sends it (raw) and in its node's message (up); all ranks together at 5
steps/s; the CPU time of an agent and of a viewer per rank and step (pack, expand).

In the second table, each agent speaks for 8 ranks in a job that has settled. It sends twice a second, as ranks do: the
steps that have ended since, packed beforehand, heartbeats, and device samples; and it pings. All traffic is encrypted
with CURVE, and each agent has a key of its own. The agents are one process, the viewer, which takes node steps as they
are, is another: a machine with two cores has none to spare. The columns:
    root core       the root's CPU time as a share of a core
    root waits      for how much of the time its main thread waited for a core: where that is much, so are the ages
    root MB         its memory, at most
    agents core     the CPU time of the process that plays the agents; near 100 %, the ages are its own
    lost            node steps that have not reached the viewer, frames that the root refused or agents dropped
    age p50, p95    from the end of a step to its arrival at the viewer; up to 500 ms of it, the agent waits
    steps MB/s      node steps, all agents together
    all MB/s        all frames of all agents

In the third table, 8 ranks send the same steps raw to an agent, which packs them, samples the ranks' processes and the
node, and sends to a root (`real_agent.py`). The last column is its node steps' rate, times 128.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import psutil

from benchmarks.real_agent import COLUMNS, NODES, agent_row, cpu_s
from ddpwatch.collector.node_steps import NodeStepPacker
from ddpwatch.common.text import table
from ddpwatch.probe.collector_process import CollectorProcess
from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire.control import Admit, Listen, Listening
from ddpwatch.wire.keys import KeyPair, new_key_pair
from ddpwatch.wire.messages import Node, NodeStep, Status, Step, encode
from ddpwatch.wire.node_step import expand
from tests.support.made_up_nodes import (
    MIXTURES,
    PER_NODE,
    SAMPLED_STEPS,
    STEP_NS,
    STEPS_PER_S,
    acquainted,
    name_of,
    node_steps,
    packed,
    play_agents,
    ranks_of,
    until,
)

RUN = "many-agents"
RANKS = NODES * PER_NODE
SETTLE_S = 2.0  # between the agents' first steps and the measurement
READ_S = 0.01  # between two looks of the viewer
ARRIVE_S = 3.0  # for the last steps, once the root has them


# -- bytes -----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Totals of some steps of a node."""

    steps: int = 0  # of ranks
    raw: int = 0
    up: int = 0
    pack_ns: int = 0
    expand_ns: int = 0

    def plus(self, other: Row) -> Row:
        """Both together."""
        return Row(*(a + b for a, b in zip(self, other, strict=True)))

    def cells(self, name: str) -> list[str]:
        """Returns them as the table shows them."""
        each = self.steps or 1
        rate = RANKS * STEPS_PER_S / each / 1e6
        return [
            name, f"{self.raw / each:,.0f}", f"{self.up / each:,.1f}", f"{self.raw * rate:.2f}",
            f"{self.up * rate:.2f}", f"{self.pack_ns / each / 1000:.0f}", f"{self.expand_ns / each / 1000:.0f}",
        ]  # fmt: skip


def of_step(packer: NodeStepPacker, steps: list[Step]) -> Row:
    """One step of a node."""
    raw = sum(len(encode(step)) for step in steps)
    start = time.process_time_ns()
    message = packed(packer, steps)
    between = time.process_time_ns()
    up = len(encode(message))
    again = time.process_time_ns()
    found = expand(message)
    return Row(len(found), raw, up, between - start, time.process_time_ns() - again)


def sizes() -> list[str]:
    """The first table."""
    rows = []
    for mixture in MIXTURES:
        total, packer = Row(), acquainted()
        for _, steps in islice(node_steps(mixture), SAMPLED_STEPS):
            total = total.plus(of_step(packer, steps))
        rows.append(total.cells(mixture))
    return table(["steps", "raw B", "up B", "raw MB/s", "up MB/s", "pack µs", "expand µs"], rows)


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


def measured(nodes: int, seconds: int) -> list[str]:
    """The table's cells."""
    keys, pairs = new_key_pair(), [new_key_pair() for _ in range(nodes)]
    collector, listening = root(keys, pairs)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    first, steps = int(SETTLE_S * STEPS_PER_S), seconds * STEPS_PER_S
    arguments = (listening.endpoint, keys.public, pairs, first + steps, results)
    agents = context.Process(target=play_agents, args=arguments, daemon=True)
    process = psutil.Process(rundir.live_runs()[0].pid)
    try:
        with closing(LiveSource(rundir.endpoints(RUN)[1], as_sent=True)) as source:
            agents.start()
            viewer = Viewer(source, process, first, steps)
            until(lambda: not results.empty(), viewer.read)
            start_ns = results.get()
            while time.monotonic_ns() < start_ns + first * STEP_NS:
                viewer.read(start_ns)
            before, since = cpu_s(process), time.monotonic()
            while time.monotonic_ns() < start_ns + (first + steps) * STEP_NS:
                viewer.read(start_ns)
            shares = [(b - a) / (time.monotonic() - since) for a, b in zip(before, cpu_s(process), strict=True)]
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
    parser.add_argument("--agents", type=int, default=NODES, help="default: %(default)s; 0: only the real agent")
    options = parser.parse_args()
    print("\n".join(sizes()))
    print(f"{RANKS} ranks on {NODES} nodes, {STEPS_PER_S} steps/s\n", flush=True)
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
