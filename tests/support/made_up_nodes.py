"""Made-up nodes of 8 ranks, with 5 steps a second: what the ranks send to their agent, and what agents send up.

Steps have 300 parameters and 25 buckets, whose stamps differ by up to a millisecond from rank to rank and step to step.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import msgspec
import zmq

from ddpwatch.collector.node_steps import NodeStepPacker
from ddpwatch.collector.uplink import Uplink
from ddpwatch.probe.derive import HOOKS_PERIOD
from ddpwatch.run import clock
from ddpwatch.run.regular import allow_all_files
from ddpwatch.sampling.schedule import SamplingSchedule, is_sampled
from ddpwatch.wire import transport
from ddpwatch.wire.control import Connect
from ddpwatch.wire.keys import KeyPair
from ddpwatch.wire.messages import Beat, Device, Hello, Message, NodeStep, Step, StepStatus, encode
from tests.support.synthetic import START_NS, Fleet

PER_NODE, STEPS_PER_S, BEATS_PER_S = 8, 5, 2
STEP_NS = 10**9 // STEPS_PER_S
SAMPLED_STEPS = 64  # made beforehand, over and over
FIRST_STEP = 1024  # the first ones of a job are full
MIXTURES = {"full": (1, 1), "attended": (1, 8), "settled": (2, 64)}  # watched and full period
SEND_S = 0.5
PATIENCE_S = 120.0


def name_of(node: int) -> str:
    """As `ddpwatch.run.rundir.node` would name it."""
    return f"{node + 1:012x}"


def ranks_of(node: int) -> list[int]:
    """Those that it speaks for."""
    return list(range(node * PER_NODE, (node + 1) * PER_NODE))


def level_of(schedule: SamplingSchedule, number: int) -> StepStatus:
    """How much of a step is recorded."""
    return "unwatched" if schedule.is_bare(number) else "shadow" if schedule.is_light(number) else "ok"


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


def node_steps(mixture: str) -> Iterator[tuple[StepStatus, list[Step]]]:
    """The steps of a node's ranks, one after the other."""
    schedule, fleet = SamplingSchedule(), Fleet(PER_NODE)
    schedule.watched.value, schedule.full.value = MIXTURES[mixture]
    for number in range(FIRST_STEP, 1 << 30):
        level = level_of(schedule, number)
        yield level, [as_sent(fleet.step(rank, number), level) for rank in range(PER_NODE)]


def packed(packer: NodeStepPacker, steps: list[Step]) -> NodeStep:
    """What the packer makes of a step of all its ranks."""
    [message] = [found for step in steps for found in packer.take_step(step) if isinstance(found, NodeStep)]
    return message


def acquainted() -> NodeStepPacker:
    """A packer that knows the node's ranks."""
    packer = NodeStepPacker(0)
    for rank in range(PER_NODE):
        packer.take_step(Step(rank=rank, step=0, start_ns=0, duration_ns=0))
    packer.rest()
    return packer


def others(node: int, second: int) -> Iterator[Message]:
    """What else a node sends in a second, besides pings."""
    at_ns = START_NS + second * 10**9
    for rank in range(node * PER_NODE, (node + 1) * PER_NODE):
        for half in range(BEATS_PER_S):
            at = at_ns + half * 500_000_000
            yield Beat(rank=rank, at_ns=at, step=5 * second, phase="forward", since_ns=at - 10**7, issued=100)
    for index in range(PER_NODE):
        yield Device(host=f"host{node}", kind="cuda", index=index, at_ns=at_ns, utilization=90.0, power_w=500.0)
    yield Device(host=f"host{node}", kind="cpu", at_ns=at_ns, utilization=30.0, net_tx_bytes_s=1e6)


def until(condition: Any, turn: Any) -> None:
    """Goes on until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the root and its agents do not come together")
        turn()
        time.sleep(0.005)


class Agents:
    """All agents of the run."""

    def __init__(self, listening: str, root_key: str, pairs: list[KeyPair]) -> None:
        self._poller = zmq.Poller()
        allow_all_files()
        context = transport.Context()
        context.max_sockets = 4 * len(pairs)  # two an agent; ZeroMQ's default is 1023
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
            yield from others(node, turn // 2)

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


def play_agents(listening: str, root_key: str, pairs: list[KeyPair], steps: int, results: Any) -> None:
    """The process of the agents. Its results: when the first step starts, then its CPU seconds per second."""
    agents = Agents(listening, root_key, pairs)
    agents.introduce()
    start_ns = time.monotonic_ns()
    results.put(start_ns)
    spent_s = time.process_time()
    agents.train(start_ns, steps)
    results.put((time.process_time() - spent_s) / ((time.monotonic_ns() - start_ns) / 1e9))


class Ranks:
    """The ranks of a second node, from `PER_NODE` on: each has a process, which sleeps, and a connection to the agent.

    A rank sends what it has together with its heartbeat.
    """

    def __init__(self, stack: ExitStack, endpoint: str) -> None:
        context = transport.Context()
        stack.callback(context.destroy, linger=0)
        self._sockets = [transport.rank_push(context) for _ in range(PER_NODE)]
        for socket in self._sockets:
            socket.connect(endpoint)
        self._processes = [subprocess.Popen(["sleep", "infinity"]) for _ in range(PER_NODE)]
        stack.callback(self._end)
        steps = islice(node_steps("settled"), SAMPLED_STEPS)
        self._cycle = [
            [msgspec.structs.replace(step, rank=step.rank + PER_NODE) for step in ranks] for _, ranks in steps
        ]

    def introduce(self) -> None:
        """Sends hellos and layouts."""
        for message in Fleet(2 * PER_NODE).introduction():
            if isinstance(message, Hello) and message.rank >= PER_NODE:
                pid = self._processes[message.rank - PER_NODE].pid
                about = {"boot_id": clock.boot_id(), "time_ns": clock.time_namespace(), "pid_ns": clock.pid_namespace()}
                message = msgspec.structs.replace(message, pid=pid, start_ticks=clock.start_ticks(pid), **about)
            self._send(message)

    def train(self, count: int) -> None:
        """Sends so many steps, and heartbeats, all ranks at moments of their own; takes as long as the steps do."""
        start_s = time.monotonic()
        for turn in range(count * BEATS_PER_S // STEPS_PER_S + 1):
            ended = [min(number * STEPS_PER_S // BEATS_PER_S, count) for number in (turn, turn + 1)]
            for index in range(PER_NODE):
                time.sleep(max(0.0, start_s + (turn + index / PER_NODE) / BEATS_PER_S - time.monotonic()))
                for message in self._messages(index, range(*ended)):
                    self._send(message)

    def _messages(self, index: int, steps: range) -> Iterator[Message]:
        now_ns = time.monotonic_ns()
        for number in steps:
            step = self._cycle[number % SAMPLED_STEPS][index]
            yield msgspec.structs.replace(step, step=number, start_ns=now_ns - step.duration_ns)
        at = steps[-1] if steps else 0
        yield Beat(rank=PER_NODE + index, at_ns=now_ns, step=at, phase="forward", since_ns=now_ns, issued=25 * at)

    def _send(self, message: Message) -> None:
        rank = getattr(message, "rank", None)
        if rank is not None and rank >= PER_NODE:
            self._sockets[rank - PER_NODE].send(encode(message))

    def _end(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        for process in self._processes:
            process.kill()
            process.wait()
