"""The device panel: a line or two per GPU and host, and the history of utilisation."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.messages import Device
from ddpwatch.tui.models.overview import DeviceLine
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.chart import Points, paint_chart
from ddpwatch.tui.text import UNKNOWN, Field, clean, fit, number, shorten, size, with_unit

_LEAST_CHART = 5
_SIDE_BY_SIDE = 72


def paint_devices(devices: Sequence[DeviceLine], width: int, height: int) -> list[Row]:
    """Heading, devices, and below or beside them the history chart."""
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    canvas.put(1, 0, "devices", "heading")
    if not devices:
        canvas.put(1, 1, f"{UNKNOWN} no sample yet", "dim")
        return canvas.rows()
    if width >= _SIDE_BY_SIDE and height <= 3 * _LEAST_CHART:
        half = min(width // 2, 44)
        _paint_list(canvas, devices, 1, half - 2, height - 1)
        _paint_chart(canvas, devices, half, 1, width - half, height - 1)
        return canvas.rows()
    lines = _paint_list(canvas, devices, 1, width - 2, max(height - 1 - 2 * _LEAST_CHART, 3))
    _paint_chart(canvas, devices, 0, 1 + lines, width, min(height - 1 - lines, 14))
    return canvas.rows()


def _paint_list(canvas: Canvas, devices: Sequence[DeviceLine], x: int, width: int, height: int) -> int:
    """Returns the number of lines used."""
    tall = 3 if 3 * len(devices) <= height else 2 if 2 * len(devices) <= height else 1
    y = 1
    for row in devices[: max(height // tall, 1)]:
        for line in _lines(row.device, width, tall):
            canvas.put_runs(x, y, line)
            y += 1
    return y - 1


def _lines(device: Device, width: int, tall: int) -> list[Row]:
    name, util = device_name(device), Field(*_utilisation(device), 0, "strong")
    if tall == 1:
        short = name.split(" ")[0]
        return [fit([Field(short, short, 0, "text"), util, *_figures(device)], width)]
    heading = fit([Field(clean(name, width - 8), clean(name, max(width - 8, 4)), 0, "text"), util], width)
    if tall == 2:
        return [heading, fit(_figures(device), width)]
    return [heading, meter(device.utilization, width), fit(_figures(device), width)]


def device_name(device: Device) -> str:
    """GPU with its index, or CPU; then the model, then the host."""
    kind = f"GPU{device.index}" if device.kind == "cuda" else "CPU"
    return clean(f"{kind} {clean(device.name, 32)} {clean(device.host, 24)}", 80)


def device_fields(device: Device) -> list[Field]:
    """Name, utilisation and figures for one line."""
    name = device_name(device)
    return [Field(name, shorten(name, 24), 0, "strong"), Field(*_utilisation(device), 0, "strong"), *_figures(device)]


def _utilisation(device: Device) -> tuple[str, str]:
    text = with_unit(UNKNOWN if device.utilization is None else f"{device.utilization:.0f}", "%")
    return text, text


def meter(percent: float | None, width: int) -> Row:
    """A bar of that many percent of the width; a dotted line where it is not known."""
    if percent is None:
        return [("┄" * max(width, 0), "faint")]
    filled = min(max(round(percent * width / 100), 0), width)
    return [("━" * filled, "chart"), ("━" * (width - filled), "faint")]


def _figures(device: Device) -> list[Field]:
    memory = f"mem {size(device.memory_used)}"
    short = memory
    if device.memory_total is not None:
        memory += f" of {size(device.memory_total)}"
    power = with_unit(number(device.power_w), "W")
    limit = f" of {number(device.power_limit_w)}" if device.power_limit_w is not None else ""
    temperature = with_unit(number(device.temperature_c), "°C")
    return [
        Field(memory, short, 1),
        Field(f"power {power.removesuffix(' W')}{limit} W" if limit else f"power {power}", f"pwr {power}", 2),
        Field(f"temp {temperature}", f"{temperature}", 3),
    ]


def _paint_chart(canvas: Canvas, devices: Sequence[DeviceLine], x: int, y: int, width: int, height: int) -> None:
    if height < _LEAST_CHART or width < 16:
        return
    kind = devices[0].device.kind
    charted = [row for row in devices if row.device.kind == kind]
    canvas.put(x + 1, y, chart_title(charted), "dim")
    points = mean_history(charted)
    paint_chart(canvas, points, (x, y + 1, width - 1, height - 1))


def chart_title(devices: Sequence[DeviceLine]) -> str:
    """What the chart shows, with its unit."""
    kind = "GPU" if devices[0].device.kind == "cuda" else "CPU"
    mean = f", mean of {len(devices)}" if len(devices) > 1 else ""
    return f"{kind} busy %{mean} over the last seconds"


def mean_history(devices: Sequence[DeviceLine]) -> Points:
    """The mean utilisation of several devices by age, oldest first, as (-age s, %)."""
    by_age: dict[int, list[float]] = {}
    for row in devices:
        for age, utilisation in row.history:
            by_age.setdefault(age, []).append(utilisation)
    return tuple((-age, sum(values) / len(values)) for age, values in sorted(by_age.items(), reverse=True))
