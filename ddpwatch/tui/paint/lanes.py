"""One step's lanes on an axis: hook fires, compute and communication of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpwatch.common.text import spans
from ddpwatch.sampling.levels import is_watched
from ddpwatch.tui.models.lanes import Lane, StepLanes, picked
from ddpwatch.tui.paint.axis import Axis, paint_axis
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.comm import centred, paint_comm, paint_halves
from ddpwatch.tui.paint.glyphs import HOOK_BOTH, HOOK_LEFT, HOOK_RIGHT, IDLE, MARK, MARK_LINE, PHASES
from ddpwatch.tui.paint.legend import legend
from ddpwatch.tui.text import shorten, shorten_name

LEAST_GUTTER = 4
_LABELS = {
    "data": ((" waits for data ", " data "), "data-label"),
    "forward": ((" forward ",), "forward-label"),
    "backward": ((" backward ",), "backward-label"),
    "optimizer": ((" optimizer ",), "optimizer-label"),
}


@dataclass(frozen=True, slots=True)
class LaneRows:
    """A rank's rows: hooks, compute, comm (times ``thick``), gap. Without comm rows, one row shows both."""

    hooks: int
    compute: int
    comm: int
    gap: int
    thick: int = 1

    @property
    def height(self) -> int:
        """Rows in all."""
        return self.hooks + self.compute + self.comm * self.thick + self.gap


def choices(comm: int, by_role: bool = False) -> list[LaneRows]:
    """Lists choices from roomy to tight, for ranks whose buckets need ``comm`` rows.

    Rows by the role of groups stay longer than those of hooks.
    """
    roomy = [LaneRows(1, 3, comm, 1, thick=2), LaneRows(1, 2, comm, 1), LaneRows(1, 1, comm, 1)]
    tight = [LaneRows(1, 1, fewer, 0) for fewer in range(comm, 0, -1)]
    if by_role:
        tight[1:] = [LaneRows(0, 1, comm, 0)]
    return [*roomy, *tight, LaneRows(0, 1, 1, 0), LaneRows(0, 1, 0, 0)]


def lane_rows(lanes: StepLanes, height: int) -> LaneRows:
    """Returns the roomiest rows with which every rank fits; the tightest if none does."""
    options = choices(lanes.comm_rows, lanes.by_role)
    return next((rows for rows in options if rows.height * len(lanes.lanes) <= height + rows.gap), options[-1])


def rows_wanted(lanes: StepLanes) -> tuple[int, int]:
    """Returns rows for all lanes: as many as they need to be readable, and the most that they can use."""
    tight = LaneRows(1, 1, min(lanes.comm_rows, 2), 0)
    roomy = choices(lanes.comm_rows)[0]
    count = len(lanes.lanes)
    return 2 + tight.height * count, 2 + roomy.height * count - roomy.gap


def rows_used(lanes: StepLanes, height: int) -> int:
    """Returns how many rows of that height title, lanes and axis use."""
    rows = lane_rows(lanes, height - 2)
    return min(max(2 + rows.height * len(lanes.lanes) - rows.gap, 2), height)


def capacity(lanes: StepLanes, height: int) -> int:
    """Returns how many ranks fit at once into that height."""
    rows = lane_rows(lanes, height - 2)
    return max((height - 2 + rows.gap) // rows.height, 1)


def paint_lanes(
    lanes: StepLanes, width: int, height: int, first: int = 0, named: Sequence[int] = (), peers: Sequence[int] = ()
) -> list[Row]:
    """Paints title with legend, lanes from the ``first`` rank on, axis. If not all fit: of the ``named``."""
    canvas = Canvas(width, height)
    rows = lane_rows(lanes, height - 2)
    room = capacity(lanes, height)
    first = min(max(first, 0), max(len(lanes.lanes) - room, 0))
    chosen = picked(lanes.lanes.ranks, named, peers, room) if room < len(lanes.lanes) else []
    shown = [lanes.lanes.of(rank) for rank in chosen] or lanes.lanes[first : first + room]
    gutter = _gutter(lanes, rows, width)
    axis = Axis(gutter, max(width - gutter - 1, 1), lanes.length_ns)
    y = 1
    for lane in shown:
        if y + max(rows.height - rows.gap, 1) > height - 1:
            break
        paint_lane(canvas, lane, axis, rows, y)
        y += rows.height
    if shown:
        paint_axis(canvas, axis, max(min(y - rows.gap, height - 1), 1))
    else:
        canvas.put(1, 1, "no rank matches; / asks for others", "dim")
    x = canvas.put(
        0, 0, f" {_title(lanes, [lane.rank for lane in shown], len(set(chosen).intersection(named)))}  ", "strong"
    )
    canvas.put_runs(x, 0, legend(canvas, shown, axis, width - x))
    return canvas.rows()


def _gutter(lanes: StepLanes, rows: LaneRows, width: int) -> int:
    digits = len(str(lanes.lanes.ranks[-1])) if lanes.lanes else 1
    if (rows.hooks or lanes.by_role) and width >= 40:
        return max(9, digits + 6)
    return max(LEAST_GUTTER, digits + 2) if width >= 20 else 0


def _title(lanes: StepLanes, shown: Sequence[int], named: int) -> str:
    """Returns the first so many of the ranks shown are those that the verdict names."""
    text = f"step {lanes.step}"
    if lanes.status:
        text += f" ({lanes.status})"
    text += lanes.notes
    count = len(lanes.lanes)
    if named:
        noun = "rank" if named == 1 else "ranks"
        text += f", {noun} {spans(shown[:named])} and {len(shown) - named} of {count - named} others"
    elif len(shown) < count:
        text += f", ranks {shown[0]}–{shown[-1]} of {count}"
    if lanes.missing:
        text += f", {len(lanes.missing)} missing"
    return text


# -- one rank ------------------------------------------------------------------------------------------------


def paint_lane(canvas: Canvas, lane: Lane, axis: Axis, rows: LaneRows, y: int) -> None:
    """Paints one rank's step, with its label in the gutter."""
    _label(canvas, lane, axis, rows, y)
    if rows.hooks:
        _paint_hooks(canvas, lane, axis, y)
        _paint_marks(canvas, lane, axis, y)
    if not rows.comm:
        paint_halves(canvas, lane, axis, y)
        return
    for row in range(rows.compute):
        _paint_compute(canvas, lane, axis, y + rows.hooks + row, labelled=row == (rows.compute - 1) // 2)
    paint_comm(canvas, lane, axis, y + rows.hooks + rows.compute, rows.comm, rows.thick)


def _on(axis: Axis, lane: Lane, start: int, end: int) -> bool:
    """Returns whether any part of a stretch of the lane's step is on the axis."""
    return axis.sees(lane.offset_ns + start, lane.offset_ns + end)


def _label(canvas: Canvas, lane: Lane, axis: Axis, rows: LaneRows, y: int) -> None:
    if not axis.left:
        return
    if not rows.hooks and not (lane.roles and rows.comm):
        canvas.put(0, y, f"{lane.rank:>{axis.left - 2}}", "strong")
        return
    canvas.put(0, y, f" rank {lane.rank}", "strong")
    if rows.hooks:
        canvas.put(0, y + 1 + (rows.compute - 1) // 2, " compute", "dim")
    named = [str(role) for role in lane.roles] if rows.comm > 1 else []
    if len(named) > rows.comm > 1:
        named[rows.comm - 1 :] = ["others"]
    for number, name in enumerate(named or ["comm"] * min(rows.comm, 1)):
        canvas.put(0, y + rows.hooks + rows.compute + number * rows.thick, shorten(f" {name}", axis.left), "dim")


def _paint_hooks(canvas: Canvas, lane: Lane, axis: Axis, y: int) -> None:
    fired = (lane.offset_ns + ns for ns in lane.step.hook_ns)
    halves = {axis.half_cell(ns) for ns in fired if axis.sees(ns, ns)}
    for cell in sorted({half // 2 for half in halves}):
        left, right = 2 * cell in halves, 2 * cell + 1 in halves
        glyph = HOOK_BOTH if left and right else HOOK_LEFT if left else HOOK_RIGHT
        canvas.put(axis.left + cell, y, glyph, "hook")


def _paint_marks(canvas: Canvas, lane: Lane, axis: Axis, y: int) -> None:
    """Paints each mark as a diamond, with its name where that covers no other, and a line as long as it took."""
    free = 0
    for mark in sorted(lane.marks, key=lambda mark: mark.start_ns):
        start = lane.on_axis(mark.start_ns)
        end = start if mark.end_ns is None else lane.on_axis(mark.end_ns)
        if not axis.sees(start, end):
            continue
        first, last = axis.span(start, end)
        canvas.fill(first, last, y, MARK_LINE, "mark")
        label = f"{MARK}{shorten_name('gc' if mark.kind == 'gc' else mark.name, 16)}"
        if first >= free:
            free = canvas.put(first, y, label if first + len(label) < canvas.width else MARK, "mark") + 1


def _paint_compute(canvas: Canvas, lane: Lane, axis: Axis, y: int, labelled: bool) -> None:
    if not axis.sees(lane.offset_ns, lane.offset_ns + lane.step.duration_ns):
        return
    start, end = axis.span(lane.offset_ns, lane.offset_ns + lane.step.duration_ns)
    if not is_watched(lane.step.status):
        if labelled:
            x, text = centred(start, end, ("not watched", "?"))
            canvas.put(x, y, text, "dim")
        return
    canvas.fill(start, end, y, IDLE, "idle")
    for phase, first_ns, last_ns in lane.stretches():
        if last_ns <= first_ns or not _on(axis, lane, first_ns, last_ns):
            continue
        first, last = axis.span(lane.offset_ns + first_ns, lane.offset_ns + last_ns)
        if phase in PHASES:
            canvas.fill(first, last, y, PHASES[phase], phase)
        if labelled:
            texts, style = _LABELS.get(phase) or ((f" {lane.waits_for(phase)} ", " waits "), "dim")
            x, text = centred(first, last, texts)
            canvas.put(x, y, text, style)
