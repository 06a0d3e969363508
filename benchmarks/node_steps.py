"""What a run of 128 hosts sends up: bytes, and what it costs agents, the root and viewers.

    python benchmarks/node_steps.py [--seconds 60]

Takes about three minutes. Budget: at most 1 MB/s up for 1,024 ranks at 5 steps/s, in a job that has settled on its
sampling; root: at most 40 % of a core and 250 MB, without sockets and keys here.

128 made-up hosts of 8 ranks each take steps of 300 parameters and 25 buckets, whose stamps differ by up to a
millisecond from rank to rank and step to step. The first table has a row for each kind of step and each mixture:
    ``full``       all but one step in 32 are full, as in a job's first seconds
    ``attended``   one step in 8 is full, as with a viewer
    ``settled``    every second step is watched, one in 64 is full, as later on
Its columns:
    raw B      bytes of a rank's step as the rank sends it
    up B       bytes of a rank's step in its node's message
    raw MB/s   all ranks together at 5 steps/s
    up MB/s    the same, packed
    pack µs    an agent's CPU time per rank and step
    expand µs  a viewer's
The second table is of the root's hub, in a process of its own: it takes the messages of the mixture ``settled``, with
the heartbeats, device samples and pings of 128 agents, as many as come in so many seconds. Its columns: frames per
second, CPU time as a share of a core, memory that the hub has added, and frames that it keeps for late viewers.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ddpwatch.collector.hub import Hub
from ddpwatch.collector.node_steps import NodeStepPacker
from ddpwatch.common.text import table
from ddpwatch.probe.derive import HOOKS_PERIOD
from ddpwatch.sampling.schedule import SamplingSchedule, is_sampled
from ddpwatch.wire.messages import Beat, ClockExchange, Device, Hello, Node, NodeStep, Step, StepStatus, encode
from ddpwatch.wire.node_step import expand
from tests.support.synthetic import EPOCH_NS, START_NS, Fleet

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NODES, PER_NODE, STEPS_PER_S = 128, 8, 5
RANKS = NODES * PER_NODE
BEATS_PER_S = 2
SAMPLED_STEPS = 64
FIRST_STEP = 1024  # the first ones of a job are full
MIXTURES = {"full": (1, 1), "attended": (1, 8), "settled": (2, 64)}  # watched and full period


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
        """As the table shows them."""
        each = self.steps or 1
        rate = RANKS * STEPS_PER_S / each / 1e6
        return [
            name, f"{self.raw / each:,.0f}", f"{self.up / each:,.1f}", f"{self.raw * rate:.2f}",
            f"{self.up * rate:.2f}", f"{self.pack_ns / each / 1000:.0f}", f"{self.expand_ns / each / 1000:.0f}",
        ]  # fmt: skip


def level_of(schedule: SamplingSchedule, number: int) -> StepStatus:
    """How much of a step is recorded."""
    return "unwatched" if schedule.is_unwatched(number) else "shadow" if schedule.is_shadow(number) else "ok"


def as_sent(step: Step, level: StepStatus) -> Step:
    """A full step as a rank sends it at that level."""
    about = {"comm_first_seq": 25 * step.step, "sender_ns": step.own_ns // 3, "cpu_ns": step.duration_ns - step.own_ns}
    step = msgspec.structs.replace(step, comm_seq=list(range(len(step.comm_label))), **about)
    if level == "unwatched":
        return Step(
            rank=step.rank, step=step.step, status=level, start_ns=step.start_ns, duration_ns=step.duration_ns,
            synced=False, own_ns=2_000, cpu_ns=step.cpu_ns,
        )  # fmt: skip
    if level == "shadow":
        hooks: dict[str, Any] = {} if is_sampled(step.step, HOOKS_PERIOD) else {"hook_param": [], "hook_ns": []}
        return msgspec.structs.replace(step, status=level, comm_done=[None] * len(step.comm_label), **hooks)
    return step


def node_steps(mixture: str, nodes: int = 1) -> Iterator[tuple[StepStatus, list[Step]]]:
    """The steps of a node's ranks, one after the other."""
    schedule, fleet = SamplingSchedule(), Fleet(PER_NODE * nodes)
    schedule.watched.value, schedule.full.value = MIXTURES[mixture]
    for number in range(FIRST_STEP, 1 << 30):
        level = level_of(schedule, number)
        yield level, [as_sent(fleet.step(rank, number), level) for rank in range(PER_NODE * nodes)]


def packed(packer: NodeStepPacker, steps: list[Step]) -> NodeStep:
    """What the packer makes of a step of all its ranks."""
    [message] = [found for step in steps for found in packer.take_step(step) if isinstance(found, NodeStep)]
    return message


def measured(packer: NodeStepPacker, steps: list[Step]) -> Row:
    """One step of a node."""
    raw = sum(len(encode(step)) for step in steps)
    start = time.process_time_ns()
    message = packed(packer, steps)
    between = time.process_time_ns()
    up = len(encode(message))
    again = time.process_time_ns()
    found = expand(message)
    return Row(len(found), raw, up, between - start, time.process_time_ns() - again)


def acquainted() -> NodeStepPacker:
    """A packer that knows the node's ranks."""
    packer = NodeStepPacker(0)
    for rank in range(PER_NODE):
        packer.take_step(Step(rank=rank, step=0, start_ns=0, duration_ns=0))
    packer.rest()
    return packer


def sizes() -> list[str]:
    """The first table."""
    rows, kinds = [], dict[str, Row]()
    for mixture in MIXTURES:
        total, packer = Row(), acquainted()
        for level, steps in islice(node_steps(mixture), SAMPLED_STEPS):
            row = measured(packer, steps)
            total = total.plus(row)
            kind = f"{level}, with hook fires" if level == "shadow" and steps[0].hook_ns else level
            kinds[kind] = kinds.get(kind, Row()).plus(row)
        rows.append(total.cells(mixture))
    rows = [*(row.cells(f"one kind: {kind}") for kind, row in kinds.items()), *rows]
    return table(["steps", "raw B", "up B", "raw MB/s", "up MB/s", "pack µs", "expand µs"], rows)


# -- the root --------------------------------------------------------------------------------------------------------


def frames_of_a_cycle() -> list[list[tuple[int, bytes]]]:
    """What all nodes send in `SAMPLED_STEPS` steps: per step, each frame with its node."""
    found: list[list[tuple[int, bytes]]] = [[] for _ in range(SAMPLED_STEPS)]
    packer = acquainted()
    for position, (_, steps) in enumerate(islice(node_steps("settled"), SAMPLED_STEPS)):
        message = packed(packer, steps)
        for node in range(NODES):
            ranks = list(range(node * PER_NODE, (node + 1) * PER_NODE))
            mine = NodeStep(node=node, step=message.step, ranks=ranks, packed=message.packed)
            found[position].append((node, encode(mine)))
    return found


def others(node: int, second: int) -> Iterator[bytes]:
    """What else a node sends in a second."""
    at_ns = START_NS + second * 10**9
    for rank in range(node * PER_NODE, (node + 1) * PER_NODE):
        for half in range(BEATS_PER_S):
            at = at_ns + half * 500_000_000
            yield encode(Beat(rank=rank, at_ns=at, step=5 * second, phase="forward", since_ns=at - 10**7, issued=100))
    for index in range(PER_NODE):
        yield encode(Device(host=f"host{node}", kind="cuda", index=index, at_ns=at_ns, utilization=90.0, power_w=500.0))
    yield encode(Device(host=f"host{node}", kind="cpu", at_ns=at_ns, utilization=30.0, net_tx_bytes_s=1e6))
    if second % 2 == 0:
        times: dict[str, Any] = {"sent_ns": at_ns, "received_ns": at_ns, "replied_ns": at_ns, "returned_ns": at_ns}
        yield encode(ClockExchange(node=node, node_boot_id=f"boot {node}", root_boot_id="boot 0", **times))


def resident_mb() -> float:
    """This process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


def serve(seconds: int, results: Any) -> None:
    """The root's hub: CPU seconds, MB, frames and messages kept at the end."""
    hub, cycle = Hub(RANKS, clock=("boot 0", "")), frames_of_a_cycle()
    ranks = [range(node * PER_NODE, (node + 1) * PER_NODE) for node in range(NODES)]
    for hello in (message for message in Fleet(RANKS).introduction() if isinstance(message, Hello)):
        hello.boot_id = f"boot {hello.rank // PER_NODE}"
        hub.keep(hello, encode(hello), EPOCH_NS)
    gc.collect()
    spent, before_mb = 0.0, resident_mb()
    for second in range(seconds):
        now_ns = EPOCH_NS + second * 10**9
        sent = [(node, frame) for node in range(NODES) for frame in others(node, second)]
        for number in range(second * STEPS_PER_S, (second + 1) * STEPS_PER_S):
            sent += cycle[number % SAMPLED_STEPS]
        start = time.process_time()
        for node, frame in sent:
            assert hub.accept_from_node(bytes(bytearray(frame)), node, ranks[node], now_ns) is not None
        for node in range(NODES if second % 2 == 0 else 0):
            about = Node(node=node, host=f"host{node}", ranks=list(ranks[node]), at_ns=now_ns, seen_ns=now_ns)
            hub.keep(about, encode(about), now_ns)
        spent += time.process_time() - start
    del sent
    gc.collect()
    results.put((spent, resident_mb() - before_mb, hub.frames, sum(1 for _ in hub.snapshot())))


def root(seconds: int) -> list[str]:
    """The second table."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=serve, args=(seconds, results))
    process.start()
    spent, grown_mb, frames, kept = results.get()
    process.join()
    cells = [f"{frames / seconds:,.0f}", f"{spent / seconds:.1%}", f"{grown_mb:.0f}", f"{kept:,}"]
    return table(["frames/s", "core", "growth MB", "kept"], [cells])


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="of the root's table")
    seconds = parser.parse_args().seconds
    print(f"{RANKS} ranks on {NODES} hosts, {STEPS_PER_S} steps/s\n")
    print("\n".join(sizes()), "\n", flush=True)
    print("\n".join(root(seconds)))


if __name__ == "__main__":
    main()
