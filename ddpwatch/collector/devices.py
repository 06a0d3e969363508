"""Samples the host (psutil) and its GPUs (NVML) once a second. What a machine does not offer stays None."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import zmq

from ddpwatch import transport
from ddpwatch.messages import Device, encode

SAMPLE_S = 1.0
_SAMPLES = "inproc://devices"
_log = logging.getLogger("ddpwatch.devices")


class DeviceThread(threading.Thread):
    """Samples devices on a thread of its own, since NVML can take its time.

    Attributes:
        frames: A socket that receives each sample as an encoded `Device`.
    """

    def __init__(self, context: transport.Context) -> None:
        super().__init__(name="ddpwatch-devices", daemon=True)
        self._context = context
        self._stopping = threading.Event()
        self.frames = context.socket(zmq.PULL)
        self.frames.bind(_SAMPLES)

    def run(self) -> None:
        """Samples until `stop`."""
        sampler = DeviceSampler()
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(_SAMPLES)
        while not self._stopping.wait(SAMPLE_S):
            with contextlib.suppress(zmq.Again):
                for device in sampler.sample():
                    socket.send(encode(device), zmq.DONTWAIT)
        socket.close()

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
        self._host = socket.gethostname()
        self._nvml, self._handles = _open_nvml(nvml)
        self._net: tuple[float, int, int] | None = None
        psutil.cpu_percent()  # the first call only sets the reference

    def sample(self) -> list[Device]:
        """One sample of the host and of each GPU."""
        return [self._cpu(), *(self._gpu(index, handle) for index, handle in enumerate(self._handles))]

    def _cpu(self) -> Device:
        memory = psutil.virtual_memory()
        sent, received = self._net_rates()
        return Device(
            host=self._host,
            kind="cpu",
            at_ns=time.monotonic_ns(),
            name=f"{psutil.cpu_count() or '?'} CPUs",
            utilization=psutil.cpu_percent(),
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            net_tx_bytes_s=sent,
            net_rx_bytes_s=received,
        )

    def _net_rates(self) -> tuple[float | None, float | None]:
        """Bytes per second over all interfaces since the last sample."""
        counters = psutil.net_io_counters()
        if counters is None:
            return None, None
        now = time.monotonic()
        previous, self._net = self._net, (now, counters.bytes_sent, counters.bytes_recv)
        if previous is None or now <= previous[0]:
            return None, None
        seconds = now - previous[0]
        return (counters.bytes_sent - previous[1]) / seconds, (counters.bytes_recv - previous[2]) / seconds

    def _gpu(self, index: int, handle: Any) -> Device:
        nvml, query = self._nvml, self._query
        utilization = query(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        return Device(
            host=self._host,
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
        )

    def _query(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """One NVML query; None where this GPU does not support it."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None


def _open_nvml(nvml: Any) -> tuple[Any, list[Any]]:
    """The NVML module and a handle per GPU; no handles where there is no driver."""
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
