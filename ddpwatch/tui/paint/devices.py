"""The Devices view: every device with what its busy time consists of, and the histories of the selected one."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.tui.models.overview import DeviceLine, RankLine
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.chart import Points, paint_chart
from ddpwatch.tui.paint.device_panel import device_fields, meter
from ddpwatch.tui.paint.spark import sparkline
from ddpwatch.tui.text import UNKNOWN, fit, percent, shorten

_LEAST_CHART = 6
CARD_ROWS = 4


def split_of(ranks: Sequence[RankLine]) -> dict[str, float] | None:
    """Shares of the step (means over the device's ranks): computing, waiting in a collective, and the rest.

    None where completions are not measured, so that nobody can tell computing from waiting.
    """
    known = [row.summary for row in ranks if row.summary.step_ns and row.summary.exposed_ns is not None]
    if not known:
        return None
    shares = {"compute": 0.0, "waiting": 0.0, "rest": 0.0}
    for summary in known:
        phases, step = summary.phases_ns, summary.step_ns or 1.0
        compute = sum(phases.get(phase, 0.0) for phase in ("forward", "backward", "optimizer")) / step
        waiting = phases.get("exposed_comm", 0.0) / step
        shares["compute"] += compute / len(known)
        shares["waiting"] += waiting / len(known)
        shares["rest"] += max(1 - compute - waiting, 0.0) / len(known)
    return shares


def paint_machines(
    devices: Sequence[DeviceLine], ranks: Sequence[Sequence[RankLine]], size: tuple[int, int], selected: int, first: int
) -> list[Row]:
    """Cards on the left (or above), histories of the selected device beside (or below) them.

    Args:
        devices: GPUs before hosts.
        ranks: The ranks on each.
        size: Columns and rows.
        selected: Whose histories are shown.
        first: First card shown.
    """
    width, height = size
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    canvas.put(
        1, 0, shorten("devices: busy as the driver counts it, and what that time is spent on", width - 2), "heading"
    )
    if not devices:
        canvas.put(1, 1, f"{UNKNOWN} no sample yet", "dim")
        return canvas.rows()
    wide = width >= 120
    cards = max((height - 1) // CARD_ROWS, 1) if wide else max((height - 1 - 2 * _LEAST_CHART) // CARD_ROWS, 1)
    card_width = width // 2 - 2 if wide else width - 2
    y = 1
    for place in range(first, min(first + cards, len(devices))):
        _paint_card(canvas, devices[place], ranks[place], y, card_width, place == selected)
        y += CARD_ROWS
    if wide:
        _paint_histories(canvas, devices[selected], (width // 2, 1, width - width // 2, height - 1))
    else:
        _paint_histories(canvas, devices[selected], (0, y, width, height - y))
    return canvas.rows()


def _paint_card(canvas: Canvas, row: DeviceLine, ranks: Sequence[RankLine], y: int, width: int, here: bool) -> None:
    canvas.put(0, y, "▶" if here else " ", "warn")
    canvas.put_runs(1, y, fit(device_fields(row.device), width))
    busy = row.device.utilization
    spark = sparkline([value for _, value in row.history], max(width // 3, 8), 100.0)
    x = canvas.put(1, y + 1, f"busy {percent(None if busy is None else busy / 100):>6} ", "dim")
    x = canvas.put_runs(x, y + 1, meter(busy, max(width - len(spark) - (x - 1) - 2, 4)))
    canvas.put(x + 1, y + 1, spark, "chart")
    _paint_spent(canvas, split_of(ranks), len(ranks), y + 2, width)


def _paint_spent(canvas: Canvas, shares: dict[str, float] | None, ranks: int, y: int, width: int) -> None:
    """Waiting is hatched as exposed communication is everywhere: "100 % busy" may be just that."""
    if not ranks:
        return
    if shares is None:
        canvas.put(
            1, y, f"step {UNKNOWN}: completions are not measured, waiting cannot be told from computing"[:width], "dim"
        )
        return
    text = (
        f"compute {percent(shares['compute'])}, waiting {percent(shares['waiting'])}, other {percent(shares['rest'])}"
    )
    text = shorten(f" {text} of the step, {ranks} rank{'s' if ranks > 1 else ''}", max(width - 8, 0))
    room = max(width - len(text) - 1, 0)
    compute = round(room * shares["compute"])
    waiting = min(round(room * shares["waiting"]), room - compute)
    canvas.fill(1, 1 + compute, y, "▓", "backward")
    canvas.fill(1 + compute, 1 + compute + waiting, y, "╱", "exposed")
    canvas.fill(1 + compute + waiting, 1 + room, y, "·", "idle")
    canvas.put(1 + room, y, text, "warn" if shares["waiting"] >= 0.1 else "dim")


def _paint_histories(canvas: Canvas, row: DeviceLine, box: tuple[int, int, int, int]) -> None:
    x, y, width, height = box
    histories = [("busy %", row.history), ("memory %", row.memory), ("power % of its limit", row.power)]
    charts: list[tuple[str, Points]] = [
        (name, tuple((-age, value) for age, value in points)) for name, points in histories if points
    ]
    charts = charts[: max(height // _LEAST_CHART, 1)]
    for number, (name, points) in enumerate(charts):
        tall = height // len(charts)
        top = y + number * tall
        if tall < _LEAST_CHART or width < 16:
            return
        canvas.put(x + 1, top, f"{name} over the last seconds", "dim")
        paint_chart(canvas, points, (x, top + 1, width - 1, min(tall - 1, 14)))
