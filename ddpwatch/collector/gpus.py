"""Samples GPUs through NVML. What a driver or a GPU does not offer stays None."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from ddpwatch.wire.messages import Device

_CLOCK_REASONS = (  # the newer name comes first: drivers before 535 know the older one only
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
)  # fmt: skip
_NVLINK_ERRORS = tuple(  # of all links of a GPU together
    f"NVML_FI_DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL" for kind in ("REPLAY", "RECOVERY", "CRC_DATA", "CRC_FLIT")
)
_ALL_LINKS = 0xFFFFFFFF  # as the scope of a throughput
_log = logging.getLogger("ddpwatch.devices")


class Gpus:
    """The GPUs of this host.

    Args:
        nvml: The ``pynvml`` module or a stand-in; None looks for the real one.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml, self._handles = _open_nvml(nvml)
        self._links = [list(self._known_links(handle)) for handle in self._handles]
        self._sent: dict[tuple[int, str], tuple[int, int]] = {}  # by GPU and direction: when, and KiB since the start
        self._events = self._watch_events()
        self._xids: dict[int, tuple[int | None, int]] = {}  # by GPU: the newest one's code, and how many there were

    def sample(self, host: str, boot_id: str) -> Iterator[Device]:
        """Yields one sample of each GPU of that host."""
        self._take_events()
        for index, handle in enumerate(self._handles):
            yield self._sample(index, handle, host, boot_id)

    def _sample(self, index: int, handle: Any, host: str, boot_id: str) -> Device:
        nvml, query = self._nvml, self._query
        utilization = query(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        xid, xids = self._xids.get(index, (None, 0))
        return Device(
            host=host,
            boot_id=boot_id,
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
            nvlink_tx_bytes_s=self._nvlink_rate(index, handle, "TX"),
            nvlink_rx_bytes_s=self._nvlink_rate(index, handle, "RX"),
            max_sm_clock_mhz=_scaled(query(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM), 1),
            throttle_reasons=self._throttle_reasons(handle),
            ecc_errors=_count(self._ecc_errors(handle)),
            pcie_width=_count(query(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)),
            pcie_max_width=_count(query(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)),
            pcie_generation=_count(query(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)),
            pcie_max_generation=_count(query(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)),
            link_errors=self._link_errors(handle),
            nvlinks_down=self._nvlinks_down(index, handle),
            xid=xid,
            xids=None if self._events is None else xids,
        )

    def _throttle_reasons(self, handle: Any) -> int | None:
        for call in (getattr(self._nvml, name, None) for name in _CLOCK_REASONS):
            reasons = None if call is None else self._query(call, handle)
            if reasons is not None:
                return int(reasons)
        return None

    def _ecc_errors(self, handle: Any) -> Any:
        nvml = self._nvml
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return self._query(nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds)

    # -- links -----------------------------------------------------------------------------------------------

    def _known_links(self, handle: Any) -> Iterator[int]:
        """Yields the NVLinks that the GPU has, up or down."""
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            if self._query(self._nvml.nvmlDeviceGetNvLinkState, handle, link) is None:
                return
            yield link

    def _nvlinks_down(self, index: int, handle: Any) -> int | None:
        states = [self._query(self._nvml.nvmlDeviceGetNvLinkState, handle, link) for link in self._links[index]]
        return sum(state == 0 for state in states) if states else None

    def _link_errors(self, handle: Any) -> int | None:
        counts = [_count(self._query(self._nvml.nvmlDeviceGetPcieReplayCounter, handle))]
        counts += [self._field(handle, name, 0) for name in _NVLINK_ERRORS]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _nvlink_rate(self, index: int, handle: Any, direction: str) -> float | None:
        """Returns the bytes per second of all links since the last sample."""
        sent = self._field(handle, f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{direction}", _ALL_LINKS)
        if sent is None:
            return None
        now_ns = time.monotonic_ns()
        then_ns, before = self._sent.get((index, direction), (now_ns, sent))
        self._sent[index, direction] = now_ns, sent
        return max(sent - before, 0) * 1024 * 1e9 / (now_ns - then_ns) if now_ns > then_ns else None

    def _field(self, handle: Any, name: str, scope: int) -> int | None:
        """Returns a counter that NVML knows by number; None if pynvml, the driver or the GPU does not know it."""
        number = getattr(self._nvml, name, None)
        values = None if number is None else self._query(self._nvml.nvmlDeviceGetFieldValues, handle, [(number, scope)])
        if not values or values[0].nvmlReturn:
            return None
        is_long = values[0].valueType != self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT
        return int(values[0].value.ullVal if is_long else values[0].value.uiVal)

    # -- XID events ------------------------------------------------------------------------------------------

    def _watch_events(self) -> Any:
        """Returns a set of events that critical XIDs of all GPUs come to; None if NVML cannot watch them."""
        nvml = self._nvml
        events = self._query(nvml.nvmlEventSetCreate) if self._handles else None
        if events is not None:
            for handle in self._handles:
                try:
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                except nvml.NVMLError:
                    return None
        return events

    def _take_events(self) -> None:
        """Takes what has come since the last sample, without waiting."""
        if self._events is None:
            return
        while (event := self._query(self._nvml.nvmlEventSetWait_v2, self._events, 0)) is not None:
            index = self._query(self._nvml.nvmlDeviceGetIndex, event.device)
            if index is not None:
                self._xids[index] = int(event.eventData), self._xids.get(index, (None, 0))[1] + 1

    def _query(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns one NVML query; None where this GPU or driver does not support it."""
        with contextlib.suppress(self._nvml.NVMLError):
            return call(*arguments)
        return None


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


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _text(value: bytes | str | None) -> str:
    return "" if value is None else value.decode(errors="replace") if isinstance(value, bytes) else value
