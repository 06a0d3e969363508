"""The Overview: its parts, put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from ddpwatch.tui.models.overview import Overview, lines_shown
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.devices import paint_device_panel
from ddpwatch.tui.paint.history import paint_history
from ddpwatch.tui.paint.lanes import paint_lanes, rows_used, rows_wanted
from ddpwatch.tui.paint.lost import lost_rows, paint_lost
from ddpwatch.tui.paint.page import Part, assemble
from ddpwatch.tui.paint.screen_layout import ScreenLayout, layout
from ddpwatch.tui.paint.split import paint_split, rows_for, split_room
from ddpwatch.tui.paint.table import paint_table


def overview_layout(model: Overview, width: int, height: int) -> ScreenLayout:
    """Returns where the parts lie for this model."""
    wanted = rows_wanted(model.lanes) if model.lanes else (6, 6)
    lanes = model.lanes
    return layout(
        width, height, len(model.ranks), wanted, rows_for(len(model.ranks)), lost_rows(model),
        int if lanes is None else partial(rows_used, lanes),
    )  # fmt: skip


def paint_overview(model: Overview, width: int, height: int, first: int | None = None) -> list[Row]:
    """Returns the body; lanes and table start with the ``first`` rank. None: with those worth a look."""
    return assemble(_parts(model, overview_layout(model, width, height), first), width, height)


def _parts(model: Overview, boxes: ScreenLayout, start: int | None) -> Iterable[Part]:
    first, found = start or 0, model.verdict
    named = found.ranks if start is None else ()
    if model.lanes is not None:
        box = boxes.lanes
        lanes = replace(model.lanes, before_hang=model.standstill_ns is not None)
        yield box, paint_lanes(lanes, box.width, box.height, first, named, found.peers)
        box = boxes.history
        incidents = model.diagnosed.incidents
        yield box, paint_history(model.history, box.width, box.height, model.lanes.step, incidents, model.now_ns)
    box = boxes.table
    shown = lines_shown(model, start, max(box.height - 1, 0))
    others = len(model.ranks) - len(shown)
    yield box, paint_table(shown, box.width, box.height, hosts=bool(model.hosts), others=others)
    box = boxes.devices
    yield box, paint_device_panel(model.devices, box.width, box.height)
    box = boxes.lost
    yield box, paint_lost(model, box.width, box.height)
    box = boxes.split
    yield box, paint_split(lines_shown(model, start, split_room(box.height)), box.width, box.height)
