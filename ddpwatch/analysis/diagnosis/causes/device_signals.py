"""The figures of devices, hosts and ranks that can be a cause: from where on, and in which words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ddpwatch.analysis.diagnosis.thresholds import (
    ANY_S,
    CONGESTION_S,
    DENIED_SHARE,
    LINK_ERRORS_S,
    NET_DROPS_S,
    NET_ERRORS_S,
    PRESSURE_SHARE,
    RETRANSMITS_S,
    SWAP_BYTES_S,
)
from ddpwatch.common.text import percent, size
from ddpwatch.wire.messages import Device, RankSample

Row = Mapping[str, float | None]
Columns = list[float | None]

# What limits a GPU's clocks, by NVML's bits. An idle GPU's (0x1) and a display's (0x100) are not limited.
THROTTLE_REASONS: Final = (
    (0x40 | 0x20, "heat"), (0x80, "an external power brake"), (0x08, "the hardware"), (0x04, "power"),
    (0x10, "sync boost"), (0x02, "a setting"),
)  # fmt: skip
_REASONS: Final = tuple(name for _, name in THROTTLE_REASONS)

WORKERS_BUSY: Final = 0.8  # of the time: what limits them is how fast they run
WORKERS_STARVED: Final = 0.2  # of the time that they wanted to run
WORKERS_IDLE: Final = 0.5  # of the time: what limits them is what they wait for
READY: Final = "ready"  # of a wait for data: workers had made it
MOSTLY: Final = 0.5  # of the waits: workers limit nothing

RANK_FIELDS: Final = (
    "wait", "run", "preempted_s", "swapped_bytes", "workers", "workers_run", "workers_wait", "workers_read_s",
)  # fmt: skip
GPU_COUNTERS: Final = {"new_ecc_errors": "ecc_errors", "new_link_errors": "link_errors", "new_xids": "xids"}
_LINK: Final = ("pcie_width", "pcie_max_width", "pcie_generation", "pcie_max_generation", "nvlinks_down")
GPU_FIELDS: Final = ("lost_clock", "clock_mhz", "max_clock_mhz", "lost_pcie", *_LINK, *GPU_COUNTERS, *_REASONS)
HOST_SHARES: Final = ("steal", "cgroup_throttled", "cpu_pressure", "memory_pressure", "io_pressure")
DENIED: Final = {  # shares of the time in which a job could not run, of a rank or host, and why
    "wait": "CPU starved: waited for a core",
    "steal": "CPU time was stolen",
    "cgroup_throttled": "cgroup CPU limit",
    "memory_pressure": "short of memory",
}
_HOST_RATES: Final = (
    "swap_in_bytes_s", "swap_out_bytes_s", "net_rx_errors_s", "net_tx_errors_s", "net_rx_drops_s", "net_tx_drops_s",
    "link_downs_s", "retransmits_s", "congestion_s", "oom_kills_s",
)  # fmt: skip
HOST_FIELDS: Final = (*HOST_SHARES, *_HOST_RATES)


def throttled_by(reasons: int) -> str:
    """Returns what limits a GPU's clocks, by NVML's bits, most specific first; "" if nothing does."""
    return next((name for bits, name in THROTTLE_REASONS if reasons & bits), "")


# -- from samples --------------------------------------------------------------------------------------------


def rank_columns(sample: RankSample) -> Columns:
    """Returns the `RANK_FIELDS`: waiting and running as shares of the time."""
    preempted = None if sample.preempted is None else 1e9 * sample.preempted
    shares = [None if each is None else each / sample.span_ns for each in (sample.wait_ns, sample.run_ns, preempted)]
    return [*shares, sample.swapped_bytes, *_workers(sample)]


def _workers(sample: RankSample) -> Columns:
    """Returns how many workers a rank has, and how long one of them ran and waited on average, and read."""
    run_ns, wait_ns, read = sample.workers_run_ns, sample.workers_wait_ns, sample.workers_read_bytes
    if not sample.workers or run_ns is None or wait_ns is None:
        return [None, None, None, None]
    span_ns = sample.workers * sample.span_ns
    return [sample.workers, run_ns / span_ns, wait_ns / span_ns, None if read is None else 1e9 * read / sample.span_ns]


def gpu_columns(device: Device, before: Device | None) -> Columns:
    """Returns the `GPU_FIELDS`, given its sample before.

    The lost shares are of its highest clock, and of its PCIe link's rate; for each reason, whether it limits the clock.
    """
    reasons, clock, highest = device.throttle_reasons, device.sm_clock_mhz, device.max_sm_clock_mhz
    lost = None
    if reasons is not None and clock is not None and highest:
        lost = max(1 - clock / highest, 0.0) if throttled_by(reasons) else 0.0
    active = [None if reasons is None else float(bool(reasons & bits)) for bits, _ in THROTTLE_REASONS]
    link = [getattr(device, name) for name in _LINK]
    return [lost, clock, highest, _lost_pcie(device), *link, *_new(device, before), *active]


def _lost_pcie(device: Device) -> float | None:
    """Returns the share of its PCIe link's rate that is lost: each generation has twice the rate.

    An idle GPU lowers its generation to save power.
    """
    if not device.pcie_width or not device.pcie_max_width:
        return None
    rate = device.pcie_width / device.pcie_max_width
    if device.utilization and device.pcie_generation and device.pcie_max_generation:
        rate *= 2.0 ** (device.pcie_generation - device.pcie_max_generation)
    return max(1 - rate, 0.0)


def _new(device: Device, before: Device | None) -> Columns:
    """Returns what its counters have counted since then."""
    found: Columns = []
    for name in GPU_COUNTERS.values():
        now, then = getattr(device, name), getattr(before, name, None)
        found.append(None if now is None or then is None else max(now - then, 0))
    return found


def host_columns(device: Device) -> Columns:
    """Returns the `HOST_FIELDS`: percentages as shares."""
    percentages = [getattr(device, name) for name in HOST_SHARES]
    shares = [None if each is None else each / 100 for each in percentages]
    return [*shares, *(getattr(device, name) for name in _HOST_RATES)]


# -- signals -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signal:
    """A figure that can be a cause.

    Attributes:
        least: From where on it costs enough time.
        text: The fragment of a sentence that names it.
        value: The figure, from the means over a time; None if it was not measured.
        compared: What is compared with the peers and with the time before, if it is not the value.
    """

    name: str
    least: float
    text: Callable[[Row], str]
    value: Callable[[Row], float | None]
    compared: Callable[[Row], float | None]


def _signal(
    name: str, least: float, text: str | Callable[[Row], str], compared: Callable[[Row], float | None] | None = None
) -> Signal:
    """Returns a signal that is a column; its text may have a place for it."""

    def value(row: Row) -> float | None:
        return row[name]

    def filled(row: Row) -> str:
        return text(row) if callable(text) else text.format(row[name] or 0.0).replace("%", " %")

    return Signal(name, least, filled, value, compared or value)


def _denied(row: Row) -> float | None:
    """Returns the share of the time in which a thread wanted a core and did not get one, however long it slept."""
    wait, run = row["wait"], row["run"]
    if wait is None or run is None:
        return None
    return wait / (wait + run) if wait + run else 0.0


def _throttled(row: Row) -> str:
    reason = max(_REASONS, key=lambda name: row[name] or 0.0)
    how = "limited" if reason == "a setting" else "throttled"
    return f"clocks {how} by {reason} ({row['clock_mhz'] or 0:,.0f} of {row['max_clock_mhz'] or 0:,.0f} MHz)"


def _swapped(row: Row) -> float | None:
    known = [value for name in ("swap_in_bytes_s", "swap_out_bytes_s") if (value := row[name]) is not None]
    return sum(known) if known else None


def _swaps(row: Row) -> str:
    return f"host swaps ({(_swapped(row) or 0) / 1e6:,.0f} MB/s)"


def _pcie(row: Row) -> str:
    known = [
        f"{letter}{row[name]:.0f} of {row[highest]:.0f}"
        for letter, name, highest in (("x", *_LINK[:2]), ("generation ", *_LINK[2:4]))
        if row[name] and row[highest] and round(row[name] or 0) < round(row[highest] or 0)
    ]
    return f"PCIe link: {', '.join(known)}"


def workers_limit(row: Row, ready: float | None) -> tuple[str, str, float] | None:
    """Returns what limits a DataLoader's workers that somebody waits for: its name, a sentence's fragment, the figure.

    Unlike a signal, it is no more than before or with peers: it says why waits for data last, not why they began.

    Args:
        row: What the workers did.
        ready: Of the longer waits, the share for what they had made; None without any.
    """
    if ready is not None and ready > MOSTLY:
        return (
            "workers_ready",
            f"batches were ready in {percent(ready)} of the waits: receiving them takes that long",
            ready,
        )
    run, wait = row["workers_run"], row["workers_wait"]
    if run is None or wait is None:
        return None
    wanted, workers = run + wait, "the DataLoader's workers"
    if wanted > WORKERS_IDLE and wait > WORKERS_STARVED * wanted:
        share = wait / wanted
        return "workers_wait", f"{workers} are CPU starved: wait {percent(share)} of the time for a core", share
    if run >= WORKERS_BUSY:
        return "workers_run", f"{workers} are busy: they run {percent(run)} of the time", run
    if wanted < WORKERS_IDLE:
        read = f", and read {size(int(row['workers_read_s']))}/s from disks" if row["workers_read_s"] else ""
        return "workers_read", f"{workers} wait for what they read: they run {percent(run)} of the time{read}", run
    return None


RANK_SIGNALS: Final = (_signal("wait", DENIED_SHARE, "CPU starved: waited {:.0%} of the time for a core", _denied),)
GPU_SIGNALS: Final = (
    _signal("lost_clock", DENIED_SHARE, _throttled),
    _signal("lost_pcie", DENIED_SHARE, _pcie),
    _signal("new_ecc_errors", ANY_S, "uncorrected errors in the GPU's memory (ECC)"),
    _signal("new_link_errors", LINK_ERRORS_S, "{:,.0f} errors/s on its PCIe or NVLink"),
    _signal("nvlinks_down", 1.0, "NVLinks are down: {:.0f}"),
    _signal("new_xids", ANY_S, "the driver reports an error: XID"),
)
HOST_SIGNALS: Final = (
    _signal("steal", DENIED_SHARE, "{:.0%} of CPU time stolen"),
    _signal("cgroup_throttled", DENIED_SHARE, "cgroup CPU limit: throttled in {:.0%} of its periods"),
    _signal("memory_pressure", PRESSURE_SHARE, "short of memory: some thread waited for it for {:.0%} of the time"),
    _signal("io_pressure", PRESSURE_SHARE, "short of disk: some thread waited for it for {:.0%} of the time"),
    _signal("oom_kills_s", ANY_S, "the kernel killed a process for want of memory (OOM)"),
    Signal("swap_bytes_s", SWAP_BYTES_S, _swaps, _swapped, _swapped),
    _signal("net_rx_errors_s", NET_ERRORS_S, "{:,.0f} receive errors/s"),
    _signal("net_tx_errors_s", NET_ERRORS_S, "{:,.0f} transmit errors/s"),
    _signal("net_rx_drops_s", NET_DROPS_S, "{:,.0f} incoming packets dropped per second"),
    _signal("net_tx_drops_s", NET_DROPS_S, "{:,.0f} outgoing packets dropped per second"),
    _signal("link_downs_s", ANY_S, "a network link went down"),
    _signal("retransmits_s", RETRANSMITS_S, "{:,.0f} packets/s are lost and sent again"),
    _signal("congestion_s", CONGESTION_S, "{:,.0f} congestion notifications/s slow RDMA down"),
)
CPU_PRESSURE: Final = _signal(  # for all ranks, and where a rank's own waits are not known
    "cpu_pressure", PRESSURE_SHARE, "CPU starved: some thread waited for a core for {:.0%} of the time"
)
HOST_WIDE: Final = (*HOST_SIGNALS, CPU_PRESSURE)
STARVED: Final = ("wait", CPU_PRESSURE.name)  # what is said where cores are short
SHORTAGES: Final = (*DENIED, CPU_PRESSURE.name)  # others had the cores, the CPU time or the memory
