"""What limits a device, in one line: its clocks and memory errors, or what its host lacks. Bad figures stand out."""

from __future__ import annotations

from collections.abc import Iterator

from ddpwatch.analysis.diagnosis.causes.device_signals import throttled_by
from ddpwatch.analysis.diagnosis.thresholds import (
    DENIED_SHARE,
    NET_DROPS_S,
    NET_ERRORS_S,
    PRESSURE_SHARE,
    RETRANSMITS_S,
    SWAP_BYTES_S,
)
from ddpwatch.common.text import size
from ddpwatch.tui.text import Field, shorten_name
from ddpwatch.wire.messages import Device


def limit_fields(device: Device, traffic: bool = True) -> list[Field]:
    """Returns the figures that are known.

    None if the machine offers none. Without ``traffic``, no host's network rates.
    """
    return _gpu(device) if device.kind == "cuda" else _host(device, traffic)


def _gpu(device: Device) -> list[Field]:
    fields = []
    if device.sm_clock_mhz is not None and device.max_sm_clock_mhz is not None:
        clock = f"{device.sm_clock_mhz:.0f} of {device.max_sm_clock_mhz:.0f} MHz"
        fields.append(Field(f"SM clock {clock}", clock, 1, "dim"))
    if device.throttle_reasons is not None:
        reason = throttled_by(device.throttle_reasons)
        text = f"throttled by {reason}" if reason else "not throttled"
        fields.append(Field(text, text, 0, "warn" if reason else "dim"))
    if device.xid is not None:
        fields.append(Field(f"XID {device.xid}", f"XID {device.xid}", 0, "warn"))
    fields += _links(device)
    if device.ecc_errors is not None:
        text = f"ECC errors {device.ecc_errors}"
        fields.append(Field(text, text, 2, "warn" if device.ecc_errors else "dim"))
    return fields


def _links(device: Device) -> Iterator[Field]:
    """Yields its PCIe link, and the NVLinks that are down, if there are any."""
    if device.pcie_width is not None and device.pcie_max_width is not None:
        generation = "" if device.pcie_generation is None else f" gen {device.pcie_generation}"
        narrow = device.pcie_width < device.pcie_max_width
        width = f"x{device.pcie_width}" + (f" of x{device.pcie_max_width}" if narrow else "")
        yield Field(f"PCIe {width}{generation}", f"PCIe {width}", 0 if narrow else 3, "warn" if narrow else "dim")
    if device.nvlinks_down:
        yield Field(f"NVLinks down: {device.nvlinks_down}", f"NVLinks down: {device.nvlinks_down}", 1, "dim")


def _host(device: Device, traffic: bool) -> list[Field]:
    shares = [
        _share("stolen", device.steal, DENIED_SHARE),
        _share("quota used up", device.cgroup_throttled, DENIED_SHARE),
        _share("CPU pressure", device.cpu_pressure, PRESSURE_SHARE),
        _share("memory pressure", device.memory_pressure, PRESSURE_SHARE),
        _share("disk pressure", device.io_pressure, PRESSURE_SHARE),
        _share("disk wait", device.iowait),
    ]
    found = [*shares[:2], _swap(device), *_net(device), _traffic(device) if traffic else None, *shares[2:]]
    return [field for field in found if field is not None]


def _traffic(device: Device) -> Field | None:
    if device.net_tx_bytes_s is None or device.net_rx_bytes_s is None:
        return None
    text = f"net ↑ {size(int(device.net_tx_bytes_s))}/s ↓ {size(int(device.net_rx_bytes_s))}/s"
    return Field(text, text, 1, "dim")


def _share(name: str, percentage: float | None, bad: float = 1.1) -> Field | None:
    if percentage is None:
        return None
    high = percentage >= 100 * bad
    text = f"{name} {percentage:.0f} %"
    return Field(text, text, 0 if high else 2, "warn" if high else "dim")


def _swap(device: Device) -> Field | None:
    if device.swap_in_bytes_s is None or device.swap_out_bytes_s is None:
        return None
    rate = device.swap_in_bytes_s + device.swap_out_bytes_s
    text = f"swap {size(int(rate))}/s"
    return Field(text, text, 0 if rate >= SWAP_BYTES_S else 1, "warn" if rate >= SWAP_BYTES_S else "dim")


def _net(device: Device) -> list[Field]:
    """Returns errors, drops and retransmits of the network; only if there are any."""
    errors = (device.net_rx_errors_s or 0) + (device.net_tx_errors_s or 0)
    drops = (device.net_rx_drops_s or 0) + (device.net_tx_drops_s or 0)
    name = shorten_name(device.net_faulty, 16)
    found = ((errors, "errors", NET_ERRORS_S), (drops, "drops", NET_DROPS_S))
    texts = [(f"{name} {rate:.0f} {noun}/s".strip(), rate >= bad) for rate, noun, bad in found if rate >= 1]
    if device.retransmits_s and device.retransmits_s >= 1:
        texts.append((f"{device.retransmits_s:.0f} packets/s sent again", device.retransmits_s >= RETRANSMITS_S))
    return [Field(text, text, 0 if high else 2, "warn" if high else "dim") for text, high in texts]
