"""The table of hosts: ranks, cost, CPU, memory, network, and what limits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpwatch.analysis.diagnosis.words.lost_time import seconds_text, share_text
from ddpwatch.common.text import UNKNOWN, size, spans
from ddpwatch.tui.models.hosts import HostLine
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.device_limits import limit_fields
from ddpwatch.tui.paint.grid import Column, paint_grid
from ddpwatch.tui.text import fit, shorten_host
from ddpwatch.wire.messages import Device

_LEAST_LIMITS = 20


def _of_machine(read: Callable[[Device], float | None], text: Callable[[float], str]) -> Callable[[HostLine], str]:
    """Returns the text of a figure of the host's newest sample."""

    def cell(line: HostLine) -> str:
        value = None if line.machine is None else read(line.machine)
        return UNKNOWN if value is None else text(value)

    return cell


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _rate(value: float) -> str:
    return f"{size(int(value))}/s"


def _memory(device: Device) -> float | None:
    used, total = device.memory_used, device.memory_total
    return 100 * used / total if used is not None and total else None


def _name_style(line: HostLine) -> str:
    return "warn" if line.unseen else "bad" if line.cost_ns else "strong"


def _cost_style(line: HostLine) -> str:
    return "bad" if line.cost_ns else "dim"


COLUMNS: tuple[Column[HostLine], ...] = (
    Column("host", 14, lambda line: shorten_host(line.host, 13), 0, style=_name_style),
    Column("ranks", 11, lambda line: spans(line.ranks, 2), 1),
    Column("cost s", 8, lambda line: seconds_text(line.cost_ns) if line.cost_ns else "", 3, style=_cost_style),
    Column("share", 7, lambda line: share_text(line.share) if line.cost_ns else "", 0, style=_cost_style),
    Column("CPU", 6, _of_machine(lambda device: device.utilization, _percent), 0),
    Column("net ↑", 12, _of_machine(lambda device: device.net_tx_bytes_s, _rate), 0),
    Column("net ↓", 12, _of_machine(lambda device: device.net_rx_bytes_s, _rate), 0),
    Column("GPUs busy", 10, lambda line: UNKNOWN if line.gpus_busy is None else _percent(line.gpus_busy), 2),
    Column("memory", 7, _of_machine(_memory, _percent), 4),
)  # fmt: skip


def paint_hosts(lines: Sequence[HostLine], size: tuple[int, int], first: int) -> list[Row]:
    """Returns the hosts from the ``first`` on, and how many are below.

    Where there is room, what limits each, or "unseen".
    """
    width, height = size
    canvas = Canvas(width, height)
    room = width if width < 2 * _LEAST_LIMITS else width - _LEAST_LIMITS // 2
    end = paint_grid(canvas, COLUMNS, lines, first, None, width=room) + 2
    if (below := len(lines) - first - height + 1) > 0:
        canvas.put(width - len(f"{below} more") - 1, 0, f"{below} more", "heading")
    for y, line in enumerate(lines[first : first + max(height - 1, 0)], start=1):
        if line.unseen:
            canvas.put(end, y, "unseen", "warn")
        elif line.machine is not None and width - end > _LEAST_LIMITS:
            canvas.put_runs(end, y, fit(limit_fields(line.machine, traffic=False), width - end - 1))
    return canvas.rows()
