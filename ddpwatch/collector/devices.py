"""Samples the host (psutil, /proc), its GPUs (NVML) and the local ranks once a second.

What a machine does not offer stays None.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import zmq

from ddpwatch.collector.host_counters import HostCounters
from ddpwatch.collector.rank_samples import RankSampler
from ddpwatch.run import clock
from ddpwatch.wire import transport
from ddpwatch.wire.messages import Device, Message, encode

SAMPLE_S = 1.0
_SAMPLES = "inproc://devices"
_CLOCK_REASONS = (  # the newer name comes first: drivers before 535 know the older one only
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
)  # fmt: skip
_log = logging.getLogger("ddpwatch.devices")


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
        devices, ranks = DeviceSampler(), RankSampler()
        with self._context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(_SAMPLES)
            while not self._stopping.wait(SAMPLE_S):
                with contextlib.suppress(zmq.Again, OSError, psutil.Error):  # no memory or files just now: one less
                    samples: list[Message] = [*devices.sample(), *ranks.sample(self._pids())]
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
        self._nvml, self._handles = _open_nvml(nvml)
        self._counters = HostCounters()
        self._net = NetCounters()
        psutil.cpu_percent()  # the first call only sets the reference
        self._counters.figures(time.monotonic_ns())

    def sample(self) -> list[Device]:
        """Returns one sample of the host and of each GPU."""
        return [self._cpu(), *(self._gpu(index, handle) for index, handle in enumerate(self._handles))]

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

    def _gpu(self, index: int, handle: Any) -> Device:
        nvml, query = self._nvml, self._query
        utilization = query(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        return Device(
            host=self._host,
            boot_id=self._boot_id,
            kind="cuda",
            at_ns=time.monotonic_ns(),
            index=index,
            uuid=_text(query(nvml.nvmlDeviceGetUUID, handle)),
            name=_text(query(nvml.nvmlDeviceGetName, handle)),
            utilization=None if utilization is None else float(utilization.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power_w=_scaled(query(nvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
            power_limit_w=_scaled(query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle), 1e-3),
            temperature_c=_scaled(query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU), 1),
            sm_clock_mhz=_scaled(query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM), 1),
            memory_clock_mhz=_scaled(query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM), 1),
            pcie_tx_bytes_s=_scaled(
                query(nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_TX_BYTES), 1024
            ),
            pcie_rx_bytes_s=_scaled(
                query(nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_RX_BYTES), 1024
            ),
            max_sm_clock_mhz=_scaled(query(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM), 1),
            throttle_reasons=self._throttle_reasons(handle),
            ecc_errors=self._ecc_errors(handle),
        )

    def _throttle_reasons(self, handle: Any) -> int | None:
        for call in (getattr(self._nvml, name, None) for name in _CLOCK_REASONS):
            reasons = None if call is None else self._query(call, handle)
            if reasons is not None:
                return int(reasons)
        return None

    def _ecc_errors(self, handle: Any) -> int | None:
        nvml = self._nvml
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = self._query(nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds)
        return None if errors is None else int(errors)

    def _query(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns one NVML query; None where this GPU does not support it."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None


class NetCounters:
    """Turns the counters of network interfaces into rates."""

    def __init__(self) -> None:
        self._at_ns = 0
        self._previous: Mapping[str, Any] = {}

    def figures(self, counters: Mapping[str, Any], now_ns: int) -> dict[str, Any]:
        """Returns the fields of a `Device` since the last call; none the first time.

        Args:
            counters: By interface, as psutil returns them.
            now_ns: Monotonic.
        """
        previous, self._previous = self._previous, counters
        seconds, self._at_ns = (now_ns - self._at_ns) / 1e9, now_ns
        both = counters.keys() & previous.keys()
        if not both or seconds <= 0:
            return {}
        new = {
            name: {part: max(getattr(counters[name], part) - getattr(previous[name], part), 0) for part in _NET_FIELDS}
            for name in both
        }
        rates = {field: sum(each[part] for each in new.values()) / seconds for part, field in _NET_FIELDS.items()}
        if not psutil.LINUX:
            rates.pop("net_tx_drops_s")  # psutil says 0
        faults = {name: sum(each[part] for part in _NET_FAULTS) for name, each in new.items()}
        worst = max(sorted(faults), key=faults.__getitem__)
        return {**rates, "net_faulty": worst if faults[worst] else ""}


_NET_FIELDS = {
    "bytes_sent": "net_tx_bytes_s", "bytes_recv": "net_rx_bytes_s", "errout": "net_tx_errors_s",
    "errin": "net_rx_errors_s", "dropout": "net_tx_drops_s", "dropin": "net_rx_drops_s",
}  # fmt: skip
_NET_FAULTS = ("errout", "errin", "dropout", "dropin")


def _open_nvml(nvml: Any) -> tuple[Any, list[Any]]:
    """Returns the NVML module and a handle per GPU; no handles where there is no driver."""
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
        return nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        _log.info("no GPU figures: %s", error)
        return nvml, []


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _text(value: bytes | str | None) -> str:
    return "" if value is None else value.decode(errors="replace") if isinstance(value, bytes) else value
