"""Devices: the overview's panel, and the Devices view with a card and histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpwatch.common.text import UNKNOWN, counted, percent, size, three_digits, with_unit
from ddpwatch.tui.models.devices import WORST_FIRST, DeviceLine, History, StepShares, mean_history, worst_first
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.chart import paint_chart
from ddpwatch.tui.paint.device_limits import limit_fields
from ddpwatch.tui.paint.spark import sparkline
from ddpwatch.tui.text import Field, first_fit, fit, shorten, shorten_host, shorten_name
from ddpwatch.wire.messages import Device

_LEAST_PANEL_CHART = 5
_SIDE_BY_SIDE = 72
_LEAST_CHART = 6
_MOST_CHART = 14
_WIDE = 120
_CARD_ROWS = 4
_MUCH_EXPOSED = 0.1  # of a step


@dataclass(frozen=True, slots=True)
class DeviceCard:
    """A device in the Devices view: its figures, how many ranks run on it, and where their step goes, if known."""

    line: DeviceLine
    ranks: int
    shares: StepShares | None


# -- figures -------------------------------------------------------------------------------------------------


def device_fields(line: DeviceLine) -> list[Field]:
    """Returns the name, utilisation, memory, power and temperature, for one line."""
    name, device = _name(line), line.device
    return [Field(name, shorten(name, 24), 0, "strong"), _utilisation(device), *_figures(device)]


def _name(line: DeviceLine) -> str:
    return f"{_kind(line.device)} {shorten_name(line.device.name, 32)} {shorten_host(line.host, 24)}"


def _kind(device: Device) -> str:
    return f"GPU{device.index}" if device.kind == "cuda" else "CPU"


def _utilisation(device: Device) -> Field:
    text = with_unit(UNKNOWN if device.utilization is None else f"{device.utilization:.0f}", "%")
    return Field(text, text, 0, "strong")


def _figures(device: Device) -> list[Field]:
    memory = f"mem {size(device.memory_used)}"
    total = f" of {size(device.memory_total)}" if device.memory_total is not None else ""
    power = with_unit(three_digits(device.power_w), "W")
    limit = f" of {three_digits(device.power_limit_w)} W" if device.power_limit_w is not None else ""
    temperature = with_unit(three_digits(device.temperature_c), "°C")
    found = [Field(memory + total, memory, 1)]
    if device.kind == "cuda" or device.power_w is not None:
        found.append(
            Field(f"power {power.removesuffix(' W')}{limit}" if limit else f"power {power}", f"pwr {power}", 2)
        )
    if device.kind == "cuda" or device.temperature_c is not None:
        found.append(Field(f"temp {temperature}", temperature, 3))
    return found


def meter(percent: float | None, width: int) -> Row:
    """Returns a bar over that many percent of the width; a dotted line if it is not known."""
    if percent is None:
        return [("┄" * max(width, 0), "faint")]
    filled = min(max(round(percent * width / 100), 0), width)
    return [("━" * filled, "chart"), ("━" * (width - filled), "faint")]


# -- the overview's panel ------------------------------------------------------------------------------------


def paint_device_panel(devices: Sequence[DeviceLine], width: int, height: int) -> list[Row]:
    """Paints the heading, the devices, and the history of utilisation below or beside them."""
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    canvas.put(1, 0, "devices", "heading")
    if not devices:
        canvas.put(1, 1, f"{UNKNOWN} no sample yet", "dim")
    elif width >= _SIDE_BY_SIDE and height <= 3 * _LEAST_PANEL_CHART:
        half = min(width // 2, 44)
        _paint_list(canvas, devices, half - 2, height - 1)
        _paint_panel_chart(canvas, devices, (half, 1, width - half, height - 1))
    else:
        rows = _paint_list(canvas, devices, width - 2, max(height - 1 - 2 * _LEAST_PANEL_CHART, 3))
        _paint_panel_chart(canvas, devices, (0, 1 + rows, width, min(height - 1 - rows, _MOST_CHART)))
    return canvas.rows()


def _paint_list(canvas: Canvas, devices: Sequence[DeviceLine], width: int, height: int) -> int:
    """Paints the devices, the worst first if not all fit; returns the number of rows used."""
    tall = 3 if 3 * len(devices) <= height else 2 if 2 * len(devices) <= height else 1
    room = max(height // tall, 1)
    if room < len(devices):
        devices, hidden = worst_first(devices), len(devices) - room
        canvas.put(1, 0, shorten(f"devices, worst first: {hidden} more (press 5)", canvas.width - 2), "heading")
    y, several = 1, len({line.host for line in devices}) > 1
    for line in devices[:room]:
        for row in _panel_rows(line, width, tall, several):
            canvas.put_runs(1, y, row)
            y += 1
    return y - 1


def _panel_rows(line: DeviceLine, width: int, tall: int, several: bool) -> list[Row]:
    """Returns one to three rows; where there are ``several`` hosts, the host is always named."""
    device = line.device
    name, utilisation, figures = _name(line), _utilisation(device), _figures(device)
    if tall == 1:
        short = _kind(device) + (f" {shorten_host(line.host, 16)}" if several else "")
        return [fit([Field(short, short), utilisation, *figures], width)]
    heading = fit([Field(shorten_name(name, width - 8), shorten_name(name, max(width - 8, 4))), utilisation], width)
    bar = [meter(device.utilization, width)] if tall == 3 else []
    return [heading, *bar, fit(figures, width)]


def _paint_panel_chart(canvas: Canvas, devices: Sequence[DeviceLine], box: tuple[int, int, int, int]) -> None:
    x, y, width, height = box
    if height < _LEAST_PANEL_CHART or width < 16:
        return
    kind = devices[0].device.kind
    charted = [line for line in devices if line.device.kind == kind]
    mean = f", mean of {len(charted)}" if len(charted) > 1 else ""
    text = f"{'GPU' if kind == 'cuda' else 'CPU'} busy %{mean}"
    full = f"{text} over the last seconds"
    canvas.put(x + 1, y, full if len(full) < width else text, "dim")
    paint_chart(canvas, mean_history(charted), (x, y + 1, width - 1, height - 1))


# -- the Devices view ----------------------------------------------------------------------------------------


def cards_that_fit(width: int, height: int) -> int:
    """Returns how many cards of full height fit on a body of that size."""
    return max((height - 1 - (0 if width >= _WIDE else 2 * _LEAST_CHART)) // _CARD_ROWS, 1)


def card_rows(devices: int, width: int, height: int) -> tuple[int, int]:
    """Returns the rows of a card, and how many cards fit: if not all do at full height, each is one row."""
    fitting = cards_that_fit(width, height)
    if devices <= fitting:
        return _CARD_ROWS, fitting
    return 1, max(height - 1 - (0 if width >= _WIDE else _LEAST_CHART), 1)


def paint_devices(
    cards: Sequence[DeviceCard], size: tuple[int, int], selected: int, hidden: int = 0, tall: int = _CARD_ROWS
) -> list[Row]:
    """Paints cards on the left (or above), histories of the selected device beside (or below) them.

    Args:
        cards: The devices in view.
        size: Columns and rows.
        selected: The index of the card whose histories are shown.
        hidden: How many devices are not in view. If there are any, the cards have the order of `worst_first`.
        tall: The rows of a card (see `card_rows`).
    """
    width, height = size
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    title = "devices: how busy each is, and where the step of its ranks goes"
    if hidden:
        title = f"{len(cards)} of {len(cards) + hidden} devices, {hidden} not shown: {WORST_FIRST}"
    canvas.put(1, 0, shorten(title, width - 2), "heading")
    if not cards:
        canvas.put(1, 1, f"{UNKNOWN} no sample yet", "dim")
        return canvas.rows()
    wide = width >= _WIDE
    for index, card in enumerate(cards):
        paint = _paint_card if tall > 1 else _paint_line
        paint(canvas, card, 1 + index * tall, width // 2 - 2 if wide else width - 2, index == selected)
    below = 1 + len(cards) * tall
    box = (width // 2, 1, width - width // 2, height - 1) if wide else (0, below, width, height - below)
    _paint_histories(canvas, cards[selected].line, box)
    return canvas.rows()


def _paint_line(canvas: Canvas, card: DeviceCard, y: int, width: int, selected: bool) -> None:
    """Paints what matters most of a card: how busy the device is, how much of a step is exposed, and its limits."""
    canvas.put(0, y, "▶" if selected else " ", "warn")
    name, busy, *figures = device_fields(card.line)
    limits = [field for field in limit_fields(card.line.device) if field.style == "warn"]
    exposed = [] if card.shares is None else [_exposed_field(card.shares)]
    canvas.put_runs(1, y, fit([name, busy, *exposed, *limits, *figures], width))


def _exposed_field(shares: StepShares) -> Field:
    text = f"exposed {percent(shares.exposed):>4}"
    return Field(text, text, 0, "warn" if shares.exposed >= _MUCH_EXPOSED else "dim")


def _paint_card(canvas: Canvas, card: DeviceCard, y: int, width: int, selected: bool) -> None:
    canvas.put(0, y, "▶" if selected else " ", "warn")
    canvas.put_runs(1, y, fit(device_fields(card.line), width))
    busy = card.line.device.utilization
    spark = sparkline([value for _, value in card.line.history], max(width // 3, 8), 100.0)
    x = canvas.put(1, y + 1, f"busy {percent(None if busy is None else busy / 100):>6} ", "dim")
    x = canvas.put_runs(x, y + 1, meter(busy, max(width - len(spark) - (x - 1) - 2, 4)))
    canvas.put(x + 1, y + 1, spark, "chart")
    if card.ranks:
        _paint_shares(canvas, card, y + 2, width)
    canvas.put_runs(1, y + 3, fit(limit_fields(card.line.device), width))


def _paint_shares(canvas: Canvas, card: DeviceCard, y: int, width: int) -> None:
    """Paints exposed communication hatched, as everywhere: "100 % busy" may be just that."""
    shares = card.shares
    if shares is None:
        text = f"step {UNKNOWN}: completions are not measured, so exposed communication looks like compute"
        canvas.put(1, y, text[:width], "dim")
        return
    text = f"compute {percent(shares.compute)}, exposed {percent(shares.exposed)}, rest {percent(shares.rest)}"
    of_step = f" {text} of the step"
    ranks = f", {counted(card.ranks, 'rank')}"
    text = first_fit([of_step + ranks, of_step, f" {text}"], max(width - 8, 0))
    room = max(width - len(text) - 1, 0)
    compute = round(room * shares.compute)
    exposed = min(round(room * shares.exposed), room - compute)
    canvas.fill(1, 1 + compute, y, "▓", "backward")
    canvas.fill(1 + compute, 1 + compute + exposed, y, "╱", "exposed")
    canvas.fill(1 + compute + exposed, 1 + room, y, "·", "idle")
    canvas.put(1 + room, y, text, "warn" if shares.exposed >= _MUCH_EXPOSED else "dim")


def _paint_histories(canvas: Canvas, line: DeviceLine, box: tuple[int, int, int, int]) -> None:
    x, y, width, height = box
    histories = (("busy %", line.history), ("memory %", line.memory), ("power % of its limit", line.power))
    charts: list[tuple[str, History]] = [(name, points) for name, points in histories if points]
    charts = charts[: max(height // _LEAST_CHART, 1)]
    for index, (name, points) in enumerate(charts):
        tall = height // len(charts)
        top = y + index * tall
        if tall < _LEAST_CHART or width < 16:
            return
        canvas.put(x + 1, top, f"{name} over the last seconds", "dim")
        paint_chart(canvas, points, (x, top + 1, width - 1, min(tall - 1, _MOST_CHART)))
