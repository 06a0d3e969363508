"""The Timeline view: title with legend, lanes, axis with cursor, and the exact values at it."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.common.text import ms
from ddpwatch.tui.models.timeline import Cursor, Inspection, Timeline, Window
from ddpwatch.tui.paint.axis import Axis, paint_axis
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.lanes import LaneRows, choices, paint_lane
from ddpwatch.tui.paint.legend import legend
from ddpwatch.tui.text import fit, shorten, shorten_name, wrap

INSPECTION_ROWS = 4
_LEAST_HEIGHT = 12  # a lower body shows no exact values
_DENSITIES = 3


def timeline_axis(timeline: Timeline, window: Window, width: int) -> Axis:
    """Returns the axis on a screen of that width."""
    digits = len(str(timeline.ranks[-1])) if timeline.ranks else 1
    gutter = max(10, digits + 7) if width >= 40 else 0
    return Axis(gutter, max(width - gutter - 1, 1), window.length_ns, window.start_ns)


def lanes_height(height: int) -> int:
    """Returns rows left for lanes in a body of that height."""
    return max(height - 2 - (INSPECTION_ROWS if height >= _LEAST_HEIGHT else 0), 1)


def timeline_rows(timeline: Timeline, height: int, density: int = 0) -> LaneRows:
    """Returns the roomiest rows with which every rank fits, but at least three.

    ``density`` 1 and 2 choose tighter ones.
    """
    options = choices(timeline.comm_rows, timeline.by_role)
    room = lanes_height(height)
    least = next(
        i for i, rows in enumerate(options)
        if rows.gap == 0 and (not rows.hooks if timeline.by_role else rows.comm == 1 and rows.hooks)
    )  # fmt: skip
    fitting = (i for i, rows in enumerate(options) if rows.height * len(timeline.ranks) <= room + rows.gap)
    chosen = min(next(fitting, least), least)
    return options[min(chosen + density, len(options) - 1) if density < _DENSITIES - 1 else -1]


def ranks_in_view(timeline: Timeline, height: int, density: int = 0) -> int:
    """Returns how many ranks fit."""
    rows = timeline_rows(timeline, height, density)
    return max((lanes_height(height) + rows.gap) // rows.height, 1)


def paint_timeline(
    timeline: Timeline,
    window: Window,
    cursor: Cursor,
    found: Inspection,
    size: tuple[int, int],
    first: int,
    density: int = 0,
) -> list[Row]:
    """Returns the body, from the ``first`` rank on."""
    width, height = size
    canvas = Canvas(width, height)
    rows, axis = timeline_rows(timeline, height, density), timeline_axis(timeline, window, width)
    shown = timeline.ranks[first : first + ranks_in_view(timeline, height, density)]
    y = 1
    for rank in shown:
        for lane in timeline.lanes_of(rank):
            paint_lane(canvas, lane, axis, rows, y)
        if rank == cursor.rank and axis.left:
            canvas.put(0, y, "▶", "warn")
        y += rows.height
    bottom = min(y - rows.gap, 1 + lanes_height(height))
    paint_axis(canvas, axis, bottom)
    _paint_title(canvas, timeline, window, shown, axis)
    for at, sign in ((cursor.mark_ns, "△"), (cursor.at_ns, "▲")):
        if at is not None and axis.sees(at, at):
            _paint_cursor(canvas, axis, at, bottom, sign)
    if height >= _LEAST_HEIGHT:
        _paint_values(canvas, found, bottom + 1)
    return canvas.rows()


def _paint_title(canvas: Canvas, timeline: Timeline, window: Window, shown: Sequence[int], axis: Axis) -> None:
    title = f" {timeline.title}"
    if len(shown) < len(timeline.ranks):
        title += f", ranks {shown[0]}–{shown[-1]} of {len(timeline.ranks)}"
    if window.zoomed:
        title += f", {ms(window.start_ns)}–{ms(window.start_ns + window.length_ns)} ms"
    x = canvas.put(0, 0, shorten(title, canvas.width), "strong") + 2
    lanes = [lane for rank in shown for lane in timeline.lanes_of(rank)]
    canvas.put_runs(x, 0, legend(canvas, lanes, axis, canvas.width - x))


def _paint_cursor(canvas: Canvas, axis: Axis, at_ns: int, bottom: int, sign: str) -> None:
    """Colours the cursor's column without changing its glyphs; writes a sign and the time below."""
    x = axis.span(at_ns, at_ns)[0]
    for y in range(1, bottom):
        char = canvas.char_at(x, y)
        canvas.put(x, y, "│" if char in " ·" else char, "cursor")
    label = f"{sign}{ms(at_ns)} ms"
    x = min(x, canvas.width - len(label))
    _clear_cut_number(canvas, x - 1, bottom, -1)
    _clear_cut_number(canvas, x + len(label), bottom, 1)
    canvas.put(x, bottom, label, "cursor")


def _clear_cut_number(canvas: Canvas, x: int, y: int, by: int) -> None:
    """Removes what is left of the axis's number that a label covers: without all of its digits it is another one."""
    while canvas.char_at(x, y) not in ("", "─", " "):
        at_its_start = canvas.char_at(x, y) == "╵"
        if at_its_start and by > 0:
            return
        canvas.put(x, y, "─", "faint")
        if at_its_start:
            return
        x += by


def _paint_values(canvas: Canvas, found: Inspection, y: int) -> None:
    width = canvas.width - 2
    canvas.put_runs(1, y, fit(found.position, width))
    canvas.put_runs(1, y + 1, fit(found.bucket, width))
    for line in wrap(shorten_name(found.params, 1000), width, 1):
        canvas.put(1, y + 2, line, "dim")
    canvas.put(1, y + 3, shorten(found.measured, width), "warn")
