"""One step's lanes on an axis: hook fires, compute, communication, and the exposed part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddpwatch.analysis.intervals import Interval
from ddpwatch.sampling.levels import is_watched
from ddpwatch.tui.models.lanes import Bar, Lane, StepLanes
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.text import Field, clean, fit, size

LEAST_GUTTER = 4
PHASES = {"data": "≈", "forward": "▒", "backward": "▓", "optimizer": "░"}
COMM = "█"
EXPOSED = "╱"
LAUNCH = "▸"
MARK, MARK_LINE = "◆", "╌"
HOOK_LEFT, HOOK_RIGHT, HOOK_BOTH = "⡇", "⢸", "⣿"
_LABELS = {
    "data": ((" waits for data ", " data "), "data-label"),
    "forward": ((" forward ", "F"), "forward-label"),
    "backward": ((" backward ", "B"), "backward-label"),
    "optimizer": ((" optimizer ", "O"), "optimizer-label"),
    "sync": ((" waits for its buckets ", " waits "), "dim"),
}


@dataclass(frozen=True, slots=True)
class Axis:
    """Time to cells: [start_ns, start_ns + length_ns) on the cells [left, left + width)."""

    left: int
    width: int
    length_ns: int
    start_ns: int = 0

    def cell(self, ns: float) -> int:
        """The cell boundary nearest to a time."""
        return self.left + round((ns - self.start_ns) * self.width / self.length_ns)

    def time(self, cell: int) -> int:
        """The time in the middle of a cell."""
        return self.start_ns + int((cell - self.left + 0.5) * self.length_ns / self.width)

    def sees(self, start: float, end: float) -> bool:
        """Whether any part of [start, end] lies on the axis."""
        return start < self.start_ns + self.length_ns and end >= self.start_ns

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The cells of [start, end): at least one, none beyond the axis."""
        scale, right = self.width / self.length_ns, self.left + self.width
        first = self.left + round((start - self.start_ns) * scale)
        first = self.left if first < self.left else right - 1 if first >= right else first
        last = self.left + round((end - self.start_ns) * scale)
        return first, right if last > right else first + 1 if last <= first else last

    def cells(self, offset_ns: int, moments: Sequence[int]) -> list[int]:
        """The cells that hold any of the moments (each plus ``offset_ns``), each once."""
        scale, start, last = self.width / self.length_ns, offset_ns - self.start_ns, self.left + self.width - 1
        found = {self.left + round((start + at) * scale) for at in moments if 0 <= start + at < self.length_ns}
        return sorted(min(cell, last) for cell in found)

    def half_cell(self, ns: int) -> int:
        """The half cell that holds a time, counted from the left."""
        return min(max(int(2 * (ns - self.start_ns) * self.width / self.length_ns), 0), 2 * self.width - 1)


@dataclass(frozen=True, slots=True)
class LaneRows:
    """A rank's rows: hooks, compute, comm (times ``thick``), gap. Without comm rows, the compute row shows both."""

    hooks: int
    compute: int
    comm: int
    gap: int
    thick: int = 1

    @property
    def height(self) -> int:
        """Rows in all."""
        return self.hooks + self.compute + self.comm * self.thick + self.gap


def choices(comm: int) -> list[LaneRows]:
    """From roomy to tight, for ranks whose buckets need ``comm`` rows."""
    roomy = [LaneRows(1, 3, comm, 1, thick=2), LaneRows(1, 2, comm, 1), LaneRows(1, 1, comm, 1)]
    tight = [LaneRows(1, 1, fewer, 0) for fewer in range(comm, 0, -1)]
    return [*roomy, *tight, LaneRows(0, 1, 1, 0), LaneRows(0, 1, 0, 0)]


def lane_rows(lanes: StepLanes, height: int) -> LaneRows:
    """The roomiest rows with which every rank fits; the tightest if none does."""
    options = choices(lanes.comm_rows)
    return next((rows for rows in options if rows.height * len(lanes.lanes) <= height + rows.gap), options[-1])


def rows_wanted(lanes: StepLanes) -> tuple[int, int]:
    """Rows for all lanes: as many as they need to be readable, and the most that they can use."""
    tight = LaneRows(1, 1, min(lanes.comm_rows, 2), 0)
    roomy = choices(lanes.comm_rows)[0]
    count = len(lanes.lanes)
    return 2 + tight.height * count, 2 + roomy.height * count - roomy.gap


def capacity(lanes: StepLanes, height: int) -> int:
    """How many ranks fit at once into that height."""
    rows = lane_rows(lanes, height - 2)
    return max((height - 2 + rows.gap) // rows.height, 1)


def paint_lanes(lanes: StepLanes, width: int, height: int, first: int = 0) -> list[Row]:
    """Title with legend, lanes from the ``first`` rank on, axis."""
    canvas = Canvas(width, height)
    rows = lane_rows(lanes, height - 2)
    room = capacity(lanes, height)
    first = min(max(first, 0), max(len(lanes.lanes) - room, 0))
    shown = lanes.lanes[first : first + room]
    gutter = _gutter(lanes, rows, width)
    axis = Axis(gutter, max(width - gutter - 1, 1), lanes.length_ns)
    canvas.put_runs(0, 0, _title(lanes, first, len(shown), width))
    y = 1
    for lane in shown:
        if y + max(rows.height - rows.gap, 1) > height - 1:
            break
        paint_lane(canvas, lane, axis, rows, y)
        y += rows.height
    paint_axis(canvas, axis, min(y - rows.gap, height - 1) if shown else height - 1)
    return canvas.rows()


def _gutter(lanes: StepLanes, rows: LaneRows, width: int) -> int:
    digits = len(str(lanes.lanes.ranks[-1])) if lanes.lanes else 1
    if rows.hooks and width >= 40:
        return max(9, digits + 6)
    return max(LEAST_GUTTER, digits + 2) if width >= 20 else 0


# -- title, legend, axis -------------------------------------------------------------------------------------


def _title(lanes: StepLanes, first: int, shown: int, width: int) -> Row:
    title: Row = [(f" {_title_text(lanes, first, shown)}  ", "strong")]
    left = width - len(title[0][0])
    return [*title, *legend(left)]


def _title_text(lanes: StepLanes, first: int, shown: int) -> str:
    text = f"step {lanes.step}"
    if lanes.status:
        text += f" ({lanes.status})"
    text += lanes.clocks
    if shown < len(lanes.lanes):
        text += f", ranks {lanes.lanes.ranks[first]}–{lanes.lanes.ranks[first + shown - 1]} of {len(lanes.lanes)}"
    if lanes.missing:
        text += f", {len(lanes.missing)} missing"
    return text


def legend(width: int) -> Row:
    """The meaning of the glyphs, as far as there is room."""
    entries = (
        ("╱╱", "exposed", "exposed", 0), (PHASES["forward"] * 2, "forward", "forward", 2),
        (PHASES["backward"] * 2, "backward", "backward", 2), (PHASES["optimizer"] * 2, "optimizer", "optimizer", 3),
        (COMM * 2, "comm-a", "communication", 1), (HOOK_LEFT, "hook", "hook fire", 4),
        (PHASES["data"] * 2, "data", "data", 5),
    )  # fmt: skip
    kept = fit(
        [Field(f"{glyph} {name}", f"{glyph} {name}", priority, style) for glyph, style, name, priority in entries],
        width,
    )
    return [run for text, style in kept for run in _entry(text, style)]


def _entry(text: str, style: str) -> Row:
    glyph, _, name = text.partition(" ")
    return [(glyph, style), (f" {name}", "dim")] if glyph and name else [(text, "text")]


def paint_axis(canvas: Canvas, axis: Axis, y: int) -> None:
    """Paints a line with round numbers of milliseconds."""
    canvas.fill(axis.left, axis.left + axis.width, y, "─", "faint")
    step = nice_step(axis.length_ns / 1e6, max(axis.width // 10, 1))
    first = math.ceil(axis.start_ns / 1e6 / step)
    for index in range(first, int((axis.start_ns + axis.length_ns) / 1e6 / step) + 1):
        value = index * step
        label = f"╵{round(value, 6):g}" + (" ms" if index == first else "")
        x = axis.cell(value * 1e6)
        if x + len(label) <= axis.left + axis.width:
            canvas.put(x, y, label, "axis")


def nice_step(length: float, ticks: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that gives at most that many ticks."""
    size = 10.0**-6
    while True:
        for factor in (1, 2, 5):
            if length / (factor * size) <= ticks:
                return factor * size
        size *= 10


# -- one rank ------------------------------------------------------------------------------------------------


def paint_lane(canvas: Canvas, lane: Lane, axis: Axis, rows: LaneRows, y: int) -> None:
    """Paints one rank's step, with its label in the gutter."""
    _label(canvas, lane, axis, rows, y)
    if rows.hooks:
        _paint_hooks(canvas, lane, axis, y)
        _paint_marks(canvas, lane, axis, y)
    for row in range(rows.compute):
        labelled = bool(rows.comm) and row == (rows.compute - 1) // 2
        _paint_compute(canvas, lane, axis, y + rows.hooks + row, labelled)
    below = y + rows.hooks + rows.compute
    if rows.comm:
        _paint_comm(canvas, lane, axis, below, rows)
    else:
        _paint_comm_merged(canvas, lane, axis, y)


def _on(axis: Axis, lane: Lane, start: int, end: int) -> bool:
    """Whether any part of a stretch of the lane's step is on the axis."""
    return axis.sees(lane.offset_ns + start, lane.offset_ns + end)


def _label(canvas: Canvas, lane: Lane, axis: Axis, rows: LaneRows, y: int) -> None:
    if not axis.left:
        return
    if not rows.hooks:
        canvas.put(0, y, f"{lane.rank:>{axis.left - 2}}", "strong")
        return
    canvas.put(0, y, f" rank {lane.rank}", "strong")
    canvas.put(0, y + 1 + (rows.compute - 1) // 2, " compute", "dim")
    if rows.comm:
        canvas.put(0, y + 1 + rows.compute, " comm", "dim")


def _paint_hooks(canvas: Canvas, lane: Lane, axis: Axis, y: int) -> None:
    fired = (lane.offset_ns + ns for ns in lane.step.hook_ns)
    halves = {axis.half_cell(ns) for ns in fired if axis.sees(ns, ns)}
    for cell in sorted({half // 2 for half in halves}):
        left, right = 2 * cell in halves, 2 * cell + 1 in halves
        glyph = HOOK_BOTH if left and right else HOOK_LEFT if left else HOOK_RIGHT
        canvas.put(axis.left + cell, y, glyph, "hook")


def _paint_marks(canvas: Canvas, lane: Lane, axis: Axis, y: int) -> None:
    """Each mark is a diamond, with its name where that covers no other, and a line as long as it took."""
    free = 0
    for mark in sorted(lane.marks, key=lambda mark: mark.start_ns):
        start = lane.on_axis(mark.start_ns)
        end = start if mark.end_ns is None else lane.on_axis(mark.end_ns)
        if not axis.sees(start, end):
            continue
        first, last = axis.span(start, end)
        canvas.fill(first, last, y, MARK_LINE, "mark")
        label = f"{MARK}{clean('gc' if mark.kind == 'gc' else mark.name, 16)}"
        if first >= free:
            free = canvas.put(first, y, label if first + len(label) < canvas.width else MARK, "mark") + 1


def _paint_compute(canvas: Canvas, lane: Lane, axis: Axis, y: int, labelled: bool) -> None:
    if not axis.sees(lane.offset_ns, lane.offset_ns + lane.step.duration_ns):
        return
    start, end = axis.span(lane.offset_ns, lane.offset_ns + lane.step.duration_ns)
    if not is_watched(lane.step.status):
        if labelled:
            _centred(canvas, start, end, y, ("not watched", "?"), "dim")
        return
    canvas.fill(start, end, y, "·", "idle")
    for phase, first_ns, last_ns in lane.stretches():
        if last_ns <= first_ns or not _on(axis, lane, first_ns, last_ns):
            continue
        first, last = axis.span(lane.offset_ns + first_ns, lane.offset_ns + last_ns)
        if phase in PHASES:
            canvas.fill(first, last, y, PHASES[phase], phase)
        if labelled:
            _centred(canvas, first, last, y, *_LABELS[phase])


def _centred(canvas: Canvas, first: int, last: int, y: int, texts: Sequence[str], style: str) -> None:
    """Writes the first of the texts that leaves a cell of bar on both sides."""
    for text in texts:
        if len(text) + 2 <= last - first:
            canvas.put(first + (last - first - len(text)) // 2, y, text, style)
            return


def _paint_comm(canvas: Canvas, lane: Lane, axis: Axis, y: int, rows: LaneRows) -> None:
    for number, stacked in enumerate(lane.stacked()):
        top = y + min(number, rows.comm - 1) * rows.thick
        for bar in stacked:
            if not axis.sees(bar.start, bar.start if bar.end is None else bar.end):
                continue
            for row in range(1, rows.thick):
                _paint_bar(canvas, bar, axis, top + row, labelled=False)
            _paint_bar(canvas, bar, axis, top, labelled=True)
    for exposed in lane.figures.exposed:
        if not _on(axis, lane, *exposed):
            continue
        _paint_exposed(canvas, lane, axis, exposed, y, rows.comm * rows.thick)


def _paint_bar(canvas: Canvas, bar: Bar, axis: Axis, y: int, labelled: bool) -> None:
    style = "comm-a" if bar.position % 2 == 0 else "comm-b"
    if bar.end is None:
        if labelled:
            canvas.put(axis.span(bar.start, bar.start)[0], y, f"{LAUNCH}{bar.index}", "launch")
        return
    first, last = axis.span(bar.start, bar.end)
    canvas.fill(first, last, y, COMM, style)
    if not labelled:
        return
    name = str(bar.index)
    if len(name) <= last - first <= len(name) + 1:
        canvas.put(first, y, name, f"{style}-label")
    _centred(canvas, first, last, y, (f" {name} · {size(bar.nbytes)} ", f" {name} ", name), f"{style}-label")


def _paint_exposed(canvas: Canvas, lane: Lane, axis: Axis, exposed: Interval, y: int, height: int) -> None:
    """Hatches the comm cells inside an exposed stretch; labels stay readable."""
    first, last = axis.span(lane.offset_ns + exposed[0], lane.offset_ns + exposed[1])
    for row in range(y, y + height):
        for x in range(first, last):
            style = canvas.style_at(x, row)
            if style.startswith("comm"):
                label = style.endswith("-label") and last - first > 2
                glyph = canvas.char_at(x, row) if label else EXPOSED
                canvas.put(x, row, glyph, "exposed-label" if label else "exposed")


def _paint_comm_merged(canvas: Canvas, lane: Lane, axis: Axis, y: int) -> None:
    """One row per rank: launches as signs in the compute bar, exposed communication hatched where compute is idle."""
    for x in axis.cells(lane.offset_ns, lane.step.comm_launch):
        style = canvas.style_at(x, y)
        canvas.put(x, y, "▾", f"{style}-label" if style in PHASES else "launch")
    for exposed in lane.figures.exposed:
        if not _on(axis, lane, *exposed):
            continue
        first, last = axis.span(lane.offset_ns + exposed[0], lane.offset_ns + exposed[1])
        canvas.fill(first, last, y, EXPOSED, "exposed")
