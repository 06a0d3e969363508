"""The overview: its parts, put together."""

from __future__ import annotations

from collections.abc import Iterable

from ddpwatch.tui.canvas import Row
from ddpwatch.tui.layout import Box, Layout, layout
from ddpwatch.tui.model import Overview
from ddpwatch.tui.paint.devices import paint_devices
from ddpwatch.tui.paint.header import paint_footer, paint_header, paint_verdict
from ddpwatch.tui.paint.history import paint_history
from ddpwatch.tui.paint.split import paint_split, rows_for
from ddpwatch.tui.paint.table import paint_table
from ddpwatch.tui.paint.timeline import paint_timeline, rows_wanted
from ddpwatch.tui.paint.waiting import paint_waiting

Part = tuple[Box, list[Row]]


def overview_layout(model: Overview, width: int, height: int) -> Layout:
    """Where the parts lie for this model."""
    wanted = rows_wanted(model.timeline) if model.timeline else (6, 6)
    return layout(width, height, len(model.ranks), wanted, rows_for(len(model.ranks)))


def paint_overview(model: Overview, width: int, height: int, first: int = 0) -> list[Row]:
    """The whole screen; timeline and table begin with the ``first`` rank."""
    boxes = overview_layout(model, width, height)
    parts: list[Part] = [
        (boxes.header, paint_header(model, boxes.header.width, boxes.header.height)),
        (boxes.footer, paint_footer(model, boxes.footer.width, boxes.footer.height)),
    ]
    if model.timeline is None and not model.ranks:
        middle = Box(0, boxes.header.height, width, max(height - boxes.header.height - boxes.footer.height, 0))
        parts.append((middle, paint_waiting(model.link, middle.width, middle.height)))
    else:
        parts += _body(model, boxes, first)
    return assemble(parts, width, height)


def _body(model: Overview, boxes: Layout, first: int) -> Iterable[Part]:
    box = boxes.verdict
    yield box, paint_verdict(model, box.width, box.height)
    if model.timeline is not None:
        box = boxes.timeline
        yield box, paint_timeline(model.timeline, box.width, box.height, first)
        box = boxes.history
        yield box, paint_history(model.history, box.width, box.height, model.timeline.step)
    box = boxes.table
    yield box, paint_table(model.ranks, box.width, box.height, first)
    box = boxes.devices
    yield box, paint_devices(model.devices, box.width, box.height)
    box = boxes.split
    yield box, paint_split(model.ranks, box.width, box.height, first)


def assemble(parts: Iterable[Part], width: int, height: int) -> list[Row]:
    """Puts painted boxes on one screen. Boxes do not overlap; what none covers is blank."""
    lines: list[list[tuple[int, int, Row]]] = [[] for _ in range(height)]
    for box, rows in parts:
        for y, row in enumerate(rows[: box.height], start=box.y):
            if 0 <= y < height and box.width > 0:
                lines[y].append((box.x, box.width, row))
    return [_line(sorted(line, key=lambda piece: piece[0]), width) for line in lines]


def _line(pieces: list[tuple[int, int, Row]], width: int) -> Row:
    line: Row = []
    x = 0
    for start, size, row in pieces:
        if start > x:
            line.append((" " * (start - x), "text"))
        line += row
        x = start + size
    if x < width:
        line.append((" " * (width - x), "text"))
    return line
