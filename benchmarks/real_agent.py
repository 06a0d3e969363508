"""A real agent of 8 made-up ranks, and what it costs: the last table of `many_agents.py`."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import psutil

from ddpwatch.probe.collector_process import CollectorProcess
from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire.control import Admit, Connect, Listen
from ddpwatch.wire.keys import new_key_pair
from ddpwatch.wire.messages import Message, NodeStep, Status, Step
from tests.support.made_up_nodes import PER_NODE, STEPS_PER_S, Ranks

RUN, NODE = "real-agent", "0a9e47"
AGENT = f"{RUN}.{NODE}"  # as `ddpwatch.probe.agent_rendezvous` calls it
NODES = 128
SETTLE_S, ARRIVE_S = 3.0, 3.0  # before the measurement, and after it
PATIENCE_S = 60.0
COLUMNS = ("agent core", "waits", "MB", "lost", "steps kB/s", "all kB/s", "128 agents MB/s")


class Viewer:
    """Counts at the root what the agent sends up.

    Attributes:
        ranks: How many steps of ranks came within the measurement.
        step_bytes: Of the node steps that held them.
        bytes: Of all frames, as the root said last.
    """

    def __init__(self, source: LiveSource, steps: range) -> None:
        self.ranks = self.step_bytes = self.bytes = 0
        self._source, self._steps = source, steps

    def read(self, seconds: float) -> None:
        """Takes what comes in that time."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            for message, envelope in self._source.read(left_s):
                self._take(message, len(envelope.frame))

    def _take(self, message: Message, nbytes: int) -> None:
        if isinstance(message, (NodeStep, Step)) and message.step in self._steps:
            self.ranks += len(message.ranks) if isinstance(message, NodeStep) else 1
            self.step_bytes += nbytes
        elif isinstance(message, Status):
            self.bytes = message.bytes


def agent_row(seconds: int) -> list[str]:
    """The table's cells."""
    first, count = round(SETTLE_S * STEPS_PER_S), seconds * STEPS_PER_S
    with ExitStack() as stack:
        process = _agent(stack)
        source = stack.enter_context(closing(LiveSource(rundir.endpoints(RUN)[1], as_sent=True)))
        viewer, ranks = Viewer(source, range(first, first + count)), Ranks(stack, rundir.endpoints(AGENT)[0])
        ranks.introduce()
        thread = threading.Thread(target=ranks.train, args=(first + count,), daemon=True)
        thread.start()
        viewer.read(SETTLE_S)
        before, nbytes, since_s = cpu_s(process), viewer.bytes, time.monotonic()
        viewer.read(seconds)
        took_s, after, nbytes = time.monotonic() - since_s, cpu_s(process), viewer.bytes - nbytes
        peak_mb = _peak_mb(process)
        thread.join()
        viewer.read(ARRIVE_S)
    lost = PER_NODE * count - viewer.ranks
    steps, everything = viewer.step_bytes / seconds / 1e3, nbytes / took_s / 1e3
    shares = [f"{(b - a) / took_s:.1%}" for a, b in zip(before, after, strict=True)]
    return [*shares, f"{peak_mb:.0f}", f"{lost}", f"{steps:.2f}", f"{everything:.2f}", f"{steps * NODES / 1e3:.2f}"]


def _agent(stack: ExitStack) -> psutil.Process:
    """An agent that is connected to a root."""
    root_keys, keys = new_key_pair(), new_key_pair()
    root, agent = (CollectorProcess(run, 2 * PER_NODE, None, node) for run, node in ((RUN, ""), (AGENT, NODE)))
    for started in (root, agent):
        stack.callback(started.leave)
    root.order(Listen(root_keys))
    root.order(Admit(NODE, keys.public, list(range(PER_NODE, 2 * PER_NODE))))
    deadline_s = time.monotonic() + PATIENCE_S
    while not (root.is_ready() and agent.is_ready() and root.listening):
        if time.monotonic() > deadline_s:
            raise SystemExit("the root and its agent do not start")
        time.sleep(0.05)
    agent.order(Connect(root.listening.endpoint, root_keys.public, keys, NODE))
    processes = {info.run_id: psutil.Process(info.pid) for info in rundir.live_runs()}
    for process in processes.values():
        stack.callback(process.terminate)
    return processes[AGENT]


def cpu_s(process: psutil.Process) -> tuple[float, float]:
    """CPU time so far, and for how long the main thread has waited for a core."""
    spent = process.cpu_times()
    waited_ns = Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]
    return spent.user + spent.system, int(waited_ns) / 1e9


def _peak_mb(process: psutil.Process) -> float:
    """Its memory, at most."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6
