"""The Ranks view: the heatmap, and one rank in detail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpwatch.analysis.diagnosis.words.lost_time import seconds_text, share_text
from ddpwatch.analysis.figures import RankMemory
from ddpwatch.analysis.step import StepFigures
from ddpwatch.common.text import UNKNOWN, ms, percent, size
from ddpwatch.tui.models.devices import DeviceLine
from ddpwatch.tui.models.overview import Overview, RankLine
from ddpwatch.tui.models.ranks import SHADES, HeatMap
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.devices import device_fields
from ddpwatch.tui.paint.incidents import paint_strip, strip_legend, strip_names
from ddpwatch.tui.paint.split import PHASE_STYLES
from ddpwatch.tui.text import Field, fit, shorten, shorten_host, shorten_name

GUTTER = 12
TOP_ROWS = 2  # title and strip
GLYPHS = " ·░▒▓█"
_RIGHT = 11  # the newest step's figure
_COST = 20
_GROUPS = 9
_HOST = 18
_SCALE = 30
_ROOMY = 70


def columns_for(width: int, overview: Overview) -> int:
    """Returns how many steps fit, one column each."""
    cost, groups = bool(overview.diagnosed.waited_for), bool(overview.groups)
    return max(width - _left(width, bool(overview.hosts)) - _right(width, cost, groups), 1)


def _left(width: int, hosts: bool) -> int:
    """Returns the columns of names at the left."""
    return GUTTER + (_HOST if hosts and width >= _ROOMY else 0)


def _right(width: int, cost: bool, groups: bool) -> int:
    """Returns the columns of figures at the right."""
    return _RIGHT + (_COST * cost + _GROUPS * groups if width >= _ROOMY else 0)


def _columns(heat: HeatMap, width: int) -> int:
    return max(width - _left(width, bool(heat.hosts)) - _right(width, bool(heat.costs), bool(heat.process_groups)), 1)


def figure(heat: HeatMap, value: float) -> str:
    """Formats a value with its unit."""
    if value != value:
        return UNKNOWN
    return percent(value) if heat.metric.unit == "%" else f"{ms(value)} ms"


def cell_size(heat: HeatMap, width: int, height: int) -> tuple[int, int]:
    """Returns screen columns per step and screen rows per row; more than one where a job is small."""
    wide = _columns(heat, width) // max(len(heat.steps), 1)
    return max(min(wide, 4), 1), max(min((height - TOP_ROWS - 1) // max(len(heat.groups), 1), 3), 1)


def paint_heat(
    heat: HeatMap, width: int, height: int, first: int, selected: int | None, slowest: int | None
) -> list[Row]:
    """Paints title with scale, incidents, a row per rank or group from the ``first`` on, and the steps below."""
    canvas = Canvas(width, height)
    is_explained = _paint_title(canvas, heat)
    cell = cell_size(heat, width, height)
    room = max((height - TOP_ROWS - 1) // cell[1], 0)
    end = _left(width, bool(heat.hosts)) + _columns(heat, width)
    paint_strip(canvas, heat.struck, end - cell[0] * len(heat.steps), 1, cell[0])
    canvas.put(1, 1, "incidents", "dim")
    for y, row in enumerate(range(first, min(first + room, len(heat.groups)))):
        _paint_row(canvas, heat, row, TOP_ROWS + y * cell[1], cell, selected, slowest)
    if (below := len(heat.groups) - first - room) > 0:
        canvas.put(1, height - 1, f"{below} more", "axis")
    if heat.steps:
        canvas.put(max(end - cell[0] * len(heat.steps), 0), height - 1, f"╵step {heat.steps[0]}", "axis")
        newest = f"{heat.steps[-1]}╵"
        if cell[0] * len(heat.steps) > len(newest) + 14:
            canvas.put(end - len(newest), height - 1, newest, "axis")
    if below < 0 and TOP_ROWS + cell[1] * len(heat.groups) < height - 2:
        high = "low" if heat.metric.inverted else "high"
        how = [] if is_explained else strip_names(heat.struck)
        how += [
            f"a row is a rank, a column a step; █ is {high}",
            "– unknown",
            "◀ the slowest rank",
            "m: another figure",
        ]
        canvas.put_runs(1, height - 2, fit([Field(text, text, at, "dim") for at, text in enumerate(how)], width - 2))
    return canvas.rows()


def _paint_title(canvas: Canvas, heat: HeatMap) -> bool:
    """Paints the title. Returns whether there was room for what the letters of incidents mean."""
    canvas.fill(0, canvas.width, 0, " ", "heading")
    grouped = max((len(group) for group in heat.groups), default=1)
    title = heat.metric.title + (" with waits for buffers" if heat.buffers else "")
    by = "" if heat.buffers else " by rank and step"
    what = title + (by if grouped == 1 else f", worst of {grouped} ranks a row")
    if heat.clock_error_ns is not None:
        what += f", clocks ±{ms(heat.clock_error_ns)} ms"
    x = canvas.put(1, 0, shorten(what, canvas.width - 2), "heading-strong") + 2
    low, high = (heat.high, heat.low) if heat.metric.inverted else (heat.low, heat.high)
    end = _left(canvas.width, bool(heat.hosts)) + _columns(heat, canvas.width)
    named = bool(len(heat.costs) or heat.process_groups) and canvas.width >= _ROOMY
    if x + _SCALE < (end + _RIGHT if named else canvas.width):
        x = canvas.put(x, 0, f"{figure(heat, low)} ", "heading")
        for level in range(SHADES):
            x = canvas.put(x, 0, GLYPHS[level] * 2, f"heat-{level}")
        x = canvas.put(x, 0, f" {figure(heat, high)}", "heading") + 3
    if x - 3 <= end:
        canvas.put(end + 1, 0, "newest", "heading")
    if len(heat.costs) and canvas.width >= _ROOMY:
        canvas.put(end + _RIGHT, 0, "     cost s   share", "heading")
    if heat.process_groups and canvas.width >= _ROOMY:
        canvas.put(canvas.width - _GROUPS, 0, "groups", "heading")
    legend = strip_legend(heat.struck, end - x)
    canvas.put_runs(x, 0, legend)
    return len(legend) == len(strip_names(heat.struck))


def _paint_row(
    canvas: Canvas, heat: HeatMap, row: int, y: int, cell: tuple[int, int], selected: int | None, slowest: int | None
) -> None:
    group = heat.groups[row]
    name = f"{group[0]}" if len(group) == 1 else f"{group[0]}–{group[-1]}"
    style = "selected" if selected in group else "bad" if slowest in group else "strong"
    left = _left(canvas.width, bool(heat.hosts))
    narrow = left == GUTTER and len(group) > 1
    if heat.hosts and (left > GUTTER or narrow):
        canvas.put(1, y, shorten_host(heat.hosts[row], GUTTER - 3 if narrow else _HOST - 1), style)
    if not heat.hosts or not narrow:
        canvas.put(1 + left - GUTTER, y, f"{name:>{GUTTER - 3}}{'◀' if slowest in group else ' '}", style)
    end = left + _columns(heat, canvas.width)
    start = end - cell[0] * len(heat.steps)
    for column in range(len(heat.steps)):
        level = heat.level(column, row)
        glyph, level_style = ("–", "faint") if level is None else (GLYPHS[level], f"heat-{level}")
        for line in range(y, y + cell[1]):
            canvas.fill(start + column * cell[0], start + (column + 1) * cell[0], line, glyph, level_style)
    if heat.unseen and heat.unseen[row]:
        count = "" if heat.unseen[row] == len(group) else f"{heat.unseen[row]} "
        canvas.put(end + 1, y, shorten(f"{count}unseen", _RIGHT - 1), "warn")
    elif heat.columns:
        canvas.put(end + 1, y, figure(heat, heat.columns[-1][row]), "text")
    if canvas.width >= _ROOMY:
        _paint_cost(canvas, heat, row, end + _RIGHT, y)


def _paint_cost(canvas: Canvas, heat: HeatMap, row: int, x: int, y: int) -> None:
    """Paints what others waited for the row's ranks, and their process groups."""
    cost = heat.costs[row] if len(heat.costs) else 0
    if cost and heat.total_ns:
        text = f"{seconds_text(cost)}  {share_text(cost / heat.total_ns):>6}"
        canvas.put(x, y, f"{text:>{_COST - 1}}", "bad" if cost == max(heat.costs) else "text")
    if heat.process_groups:
        canvas.put(canvas.width - _GROUPS, y, shorten(heat.process_groups[row], _GROUPS - 1), "dim")


def paint_rank(
    row: RankLine,
    history: Sequence[StepFigures],
    devices: Sequence[DeviceLine],
    marks: Sequence[str],
    width: int,
    height: int,
) -> list[Row]:
    """Paints one rank: figures, where each of its steps went, its devices and its marks."""
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    name = f"rank {row.rank} on {shorten_host(row.host, 32) or UNKNOWN}, pid {UNKNOWN if row.pid is None else row.pid}"
    canvas.put(1, 0, shorten(f"{name}: {shorten_name(row.status, 60)}   Escape: back", width - 2), "heading-strong")
    summary = row.summary
    figures = [
        f"step {ms(summary.step_ns)} ms", f"late {ms(summary.late_ns)} ms", f"wait {ms(summary.wait_ns)} ms",
        f"overlap {percent(summary.overlap)}", f"exposed {ms(summary.exposed_ns)} ms",
    ]  # fmt: skip
    if row.dropped:
        figures.append(f"lost messages {row.dropped}")
    if summary.clock_error_ns is not None:
        figures.append(f"clock ±{ms(summary.clock_error_ns)} ms")
    canvas.put_runs(1, 1, fit([Field(text, text, number) for number, text in enumerate(figures)], width - 2))
    memory = _memory_fields(row.memory)
    canvas.put_runs(1, 2, fit(memory, width - 2))
    top = _paint_phase_means(canvas, summary.phases_ns, 2 + bool(memory))
    below = min(len(devices) + 1 + min(len(marks), 4), max(height - top - 7, 0))
    chart = max(height - top - 1 - below, 0)
    _paint_phases(canvas, history, top, chart)
    y = top + chart + 1
    for device in devices[: max(below - 1, 0)]:
        canvas.put_runs(1, y, fit([*device_fields(device)], width - 2))
        y += 1
    for mark in marks[: max(height - y, 0)]:
        canvas.put(1, y, shorten(f"◆ {shorten_name(mark, 120)}", width - 2), "mark")
        y += 1
    return canvas.rows()


def _memory_fields(memory: RankMemory) -> list[Field]:
    """Returns what memory the rank uses, with the most that was seen; nothing of what is not measured."""
    used = {
        "host memory": (memory.host_bytes, memory.host_peak_bytes),
        "GPU memory reserved": (memory.gpu_bytes, memory.gpu_peak_bytes),
        "by tensors": (memory.gpu_allocated_bytes, memory.gpu_allocated_peak_bytes),
    }
    texts = {f"{name} {size(now)}": f" (peak {size(peak)})" for name, (now, peak) in used.items() if now is not None}
    return [Field(text + peak, text, number) for number, (text, peak) in enumerate(texts.items())]


def _paint_phase_means(canvas: Canvas, means: Mapping[str, float], y: int) -> int:
    """Paints the mean of each phase, from row ``y`` on; returns the row after them."""
    x = 1
    for phase, full, _, style, glyph in PHASE_STYLES:
        text = f" {full} {ms(means.get(phase))} ms  "
        if x > 1 and x + 2 + len(text.rstrip()) > canvas.width:
            x, y = 1, y + 1
        x = canvas.put(canvas.put(x, y, glyph * 2, style), y, text, "dim")
    return y + 1


def _paint_phases(canvas: Canvas, history: Sequence[StepFigures], y: int, height: int) -> None:
    """Paints a column per step, its phases stacked in their order."""
    shown = history[-(canvas.width - 12) :]
    longest = max((figures.step_ns for figures in shown), default=0) or 1
    canvas.put(1, y, f"{ms(longest):>6} ms", "dim")
    canvas.put(1, y + height - 1, f"{'0':>6} ms", "dim")
    wide = max(min((canvas.width - 12) // max(len(shown), 1), 4), 1)
    for index, figures in enumerate(shown):
        x = canvas.width - 1 - wide * (len(shown) - index)
        bottom = 0.0
        for phase, _, _, style, glyph in PHASE_STYLES:
            top = bottom + figures.phases_ns.get(phase, 0) * height / longest
            for cell in range(round(bottom), round(top)):
                canvas.fill(x, x + wide, y + height - 1 - cell, glyph, style)
            bottom = top
