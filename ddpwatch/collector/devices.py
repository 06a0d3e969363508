"""Samples the host (psutil, /proc), its GPUs (NVML) and the local ranks once a second.

What a machine does not offer stays None.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import zmq

from ddpwatch.collector.busy_processes import BusyProcesses, is_short_of_cores
from ddpwatch.collector.gpus import Gpus
from ddpwatch.collector.host_counters import HostCounters
from ddpwatch.collector.network import NetCounters
from ddpwatch.collector.rank_samples import RankSampler
from ddpwatch.run import clock
from ddpwatch.wire import transport
from ddpwatch.wire.messages import Device, Message, encode

SAMPLE_S = 1.0
_SAMPLES = "inproc://devices"


class DeviceThread(threading.Thread):
    """Samples devices and ranks on a thread of its own, since NVML can take its time.

    Args:
        context: Of the collector's sockets.
        pids: Returns the processes of the ranks that can be seen from here.

    Attributes:
        frames: A socket that receives each sample as an encoded `Device` or `RankSample`.
    """

    def __init__(self, context: transport.Context, pids: Callable[[], Mapping[int, int]]) -> None:
        super().__init__(name="ddpwatch-devices", daemon=True)
        self._context = context
        self._pids = pids
        self._stopping = threading.Event()
        self.frames = context.socket(zmq.PULL)
        self.frames.bind(_SAMPLES)

    def run(self) -> None:
        """Samples until `stop`."""
        devices, ranks, processes = DeviceSampler(), RankSampler(), BusyProcesses()
        with self._context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(_SAMPLES)
            while not self._stopping.wait(SAMPLE_S):
                with contextlib.suppress(zmq.Again, OSError, psutil.Error):  # no memory or files just now: one less
                    found, of_ranks = devices.sample(), ranks.sample(self._pids())
                    for host in found[:1]:  # its GPUs follow
                        host.busy = processes.sample(is_short_of_cores(host, of_ranks), host.at_ns)
                    samples: list[Message] = [*found, *of_ranks]
                    for sample in samples:
                        socket.send(encode(sample), zmq.DONTWAIT)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self.join(SAMPLE_S)


class DeviceSampler:
    """Samples the host and its GPUs.

    Args:
        nvml: The ``pynvml`` module or a stand-in; None looks for the real one.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._host, self._boot_id = socket.gethostname(), clock.boot_id()
        self._gpus = Gpus(nvml)
        self._counters = HostCounters()
        self._net = NetCounters()
        psutil.cpu_percent()  # the first call only sets the reference
        self._counters.figures(time.monotonic_ns())

    def sample(self) -> list[Device]:
        """Returns one sample of the host and of each GPU."""
        return [self._cpu(), *self._gpus.sample(self._host, self._boot_id)]

    def _cpu(self) -> Device:
        memory = psutil.virtual_memory()
        now_ns = time.monotonic_ns()
        return Device(
            host=self._host,
            boot_id=self._boot_id,
            kind="cpu",
            at_ns=now_ns,
            name=f"{psutil.cpu_count() or '?'} CPUs",
            utilization=psutil.cpu_percent(),
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            **self._counters.figures(now_ns),
            **self._net.figures(psutil.net_io_counters(pernic=True), now_ns),
        )
