"""The overview: its parts, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ddpwatch.tui.models.overview import Overview
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.device_panel import paint_devices
from ddpwatch.tui.paint.header import Keys, Tab, paint_footer, paint_header, paint_verdict, verdict_lines
from ddpwatch.tui.paint.history import paint_history
from ddpwatch.tui.paint.lanes import paint_timeline, rows_wanted
from ddpwatch.tui.paint.screen_layout import Box, ScreenLayout, layout
from ddpwatch.tui.paint.split import paint_split, rows_for
from ddpwatch.tui.paint.table import paint_table
from ddpwatch.tui.paint.waiting import paint_waiting

ONE_LINE = 150  # columns in which most verdicts fit
SMALL = 16  # rows: on less, the verdict gets one
Part = tuple[Box, list[Row]]
Body = Callable[[int, int], list[Row]]


def overview_layout(model: Overview, width: int, height: int) -> ScreenLayout:
    """Where the parts lie for this model."""
    wanted = rows_wanted(model.timeline) if model.timeline else (6, 6)
    return layout(
        width, height, len(model.ranks), wanted, rows_for(len(model.ranks)), verdict_rows(model, width, height)
    )


def paint_overview(
    model: Overview, width: int, height: int, first: int = 0, tabs: Sequence[Tab] = (), keys: Keys = ()
) -> list[Row]:
    """The whole screen; timeline and table begin with the ``first`` rank."""
    boxes = overview_layout(model, width, height)
    parts: list[Part] = [
        (boxes.header, paint_header(model, boxes.header.width, boxes.header.height)),
        (boxes.footer, paint_footer(model, boxes.footer.width, boxes.footer.height, tabs, keys)),
    ]
    if _nothing_yet(model):
        parts.append(_waiting(model, width, height, boxes.header.height, boxes.footer.height))
    else:
        parts += _body(model, boxes, first)
    return assemble(parts, width, height)


def verdict_rows(model: Overview, width: int, height: int) -> int:
    """Rows for the verdict: as many as it needs, and on a narrow screen always two, so that the rest stays in place."""
    if height < SMALL:
        return 1 if height >= 6 else 0
    return max(len(verdict_lines(model, width)), 1 if width >= ONE_LINE else 2)


def framed(
    model: Overview, size: tuple[int, int], tabs: Sequence[Tab], keys: Keys, body: Body, early: bool = False
) -> list[Row]:
    """Header, verdict and footer around what ``body`` gives for its width and height.

    Args:
        model: What is known.
        size: Columns and rows of the screen.
        tabs: The views.
        keys: The view's own keys.
        body: What lies in between.
        early: Whether there is a body before the first frame of the run.
    """
    width, height = size
    header, verdict = min(2, height), verdict_rows(model, width, height)
    footer = 1 if height >= 4 else 0
    inner = Box(0, header + verdict, width, max(height - header - verdict - footer, 0))
    parts: list[Part] = [
        (Box(0, 0, width, header), paint_header(model, width, header)),
        (Box(0, height - footer, width, footer), paint_footer(model, width, footer, tabs, keys)),
    ]
    if _nothing_yet(model) and not early:
        parts.append(_waiting(model, width, height, header, footer))
    else:
        parts += [(Box(0, header, width, verdict), paint_verdict(model, width, verdict))]
        parts += [(inner, body(inner.width, inner.height))] if inner.height else []
    return assemble(parts, width, height)


def _nothing_yet(model: Overview) -> bool:
    return model.timeline is None and not model.ranks and not model.filter


def _waiting(model: Overview, width: int, height: int, header: int, footer: int) -> Part:
    middle = Box(0, header, width, max(height - header - footer, 0))
    return middle, paint_waiting(model.link, middle.width, middle.height)


def _body(model: Overview, boxes: ScreenLayout, first: int) -> Iterable[Part]:
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
