"""Turns counters of network interfaces and InfiniBand ports into rates. What a machine does not count stays None."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from ddpwatch.collector.host_counters import PROC
from ddpwatch.run.regular import read_counters

CLASSES = Path("/sys/class")
_FIELDS = {  # of a `Device`, and what of an interface they add up
    "net_tx_bytes_s": "bytes_sent", "net_rx_bytes_s": "bytes_recv", "net_tx_errors_s": "errout",
    "net_rx_errors_s": "errin", "net_tx_drops_s": "dropout", "net_rx_drops_s": "dropin", "link_downs_s": "downs",
    "retransmits_s": "retransmits", "congestion_s": "congestion",
}  # fmt: skip
_FAULTS = ("errout", "errin", "dropout", "dropin", "downs")
# Of a port. Vendors count different things; what is missing is not known.
_PORT = {
    "bytes_sent": ("counters/port_xmit_data",),
    "bytes_recv": ("counters/port_rcv_data",),
    "errin": ("counters/port_rcv_errors", "counters/symbol_error", "counters/local_link_integrity_errors"),
    "dropout": ("counters/port_xmit_discards",),
    "downs": ("counters/link_downed",),
    "retransmits": ("hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err", "hw_counters/retrans_pkts"),
    "congestion": ("hw_counters/rp_cnp_handled",),
}
_DATA = ("bytes_sent", "bytes_recv")  # which a port counts by 4 bytes
Counts = Mapping[str, int]


class NetCounters:
    """Turns counters of interfaces into rates.

    Args:
        classes: Where the kernel shows devices by class.
        proc: Where it shows what TCP counts.
    """

    def __init__(self, classes: Path = CLASSES, proc: Path = PROC) -> None:
        self._proc = proc
        self._ports = {f"{path.parts[-3]}/{path.name}": path for path in sorted(classes.glob("infiniband/*/ports/*"))}
        physical = sorted(classes.glob("net/*/device"))
        self._carriers = {path.parts[-2]: path.parent for path in physical}
        self._at_ns = 0
        self._previous: Mapping[str, Counts] = {}

    def figures(self, counters: Mapping[str, Any], now_ns: int) -> dict[str, Any]:
        """Returns the fields of a `Device` since the last call; none the first time.

        Args:
            counters: By interface, as psutil returns them.
            now_ns: Monotonic.
        """
        now = dict(self._read(counters))
        previous, self._previous = self._previous, now
        seconds, self._at_ns = (now_ns - self._at_ns) / 1e9, now_ns
        new = {name: _since(counts, previous[name]) for name, counts in now.items() if name in previous}
        if not new or seconds <= 0:
            return {}
        known = {field: [each[part] for each in new.values() if part in each] for field, part in _FIELDS.items()}
        rates = {field: sum(counts) / seconds for field, counts in known.items() if counts}
        faults = {name: sum(each.get(part, 0) for part in _FAULTS) for name, each in new.items()}
        worst = max(sorted(faults), key=faults.__getitem__)
        return {**rates, "net_faulty": worst if faults[worst] else ""}

    def _read(self, counters: Mapping[str, Any]) -> Iterator[tuple[str, Counts]]:
        """Yields what each interface counts, each port, and TCP in all."""
        for name, counted in counters.items():
            counts = {part: getattr(counted, part) for part in _FIELDS.values() if hasattr(counted, part)}
            if not psutil.LINUX:
                del counts["dropout"]  # psutil says 0
            if name in self._carriers and (downs := _number(self._carriers[name] / "carrier_down_count")) is not None:
                counts["downs"] = downs
            yield name, counts
        for name, path in self._ports.items():
            read = {part: [_number(path / file) for file in files] for part, files in _PORT.items()}
            known = {part: [each for each in numbers if each is not None] for part, numbers in read.items()}
            counts = {part: sum(numbers) for part, numbers in known.items() if numbers}
            yield name, counts | {part: 4 * counts[part] for part in _DATA if part in counts}
        tcp = [line.split() for line in read_counters(str(self._proc / "net" / "snmp")).splitlines()]
        names, values = ([row for row in tcp if row[:1] == [b"Tcp:"]] + [[], []])[:2]
        segments = dict(zip(names, values, strict=False)).get(b"RetransSegs", b"")
        if segments.isdigit():
            yield "TCP", {"retransmits": int(segments)}


def _since(now: Counts, before: Counts) -> Counts:
    """Returns what was counted since; a counter that goes back belongs to a driver that was loaded again."""
    return {part: max(count - before[part], 0) for part, count in now.items() if part in before}


def _number(path: Path) -> int | None:
    text = read_counters(str(path)).strip()
    return int(text) if text.isdigit() else None
