"""Divides the overview's body between its parts. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WIDE = 110
_LEAST_LANES = 5
_PANEL = (34, 64)
_DEVICES = 9
_LEAST_DEVICES = 9


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of cells. Nothing is drawn where width or height is 0."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ScreenLayout:
    """Where the parts of the overview lie."""

    lanes: Box
    history: Box
    table: Box
    devices: Box
    lost: Box
    split: Box


def layout(
    width: int,
    height: int,
    ranks: int,
    lane_rows: tuple[int, int],
    split_rows: int = 0,
    lost_rows: int = 0,
    lanes_use: Callable[[int], int] = int,
) -> ScreenLayout:
    """Divides the body between lanes and table, then devices and history.

    Args:
        width: Columns.
        height: Rows.
        ranks: How many the table lists.
        lane_rows: Rows that the lanes need to be readable, and the most that they can use.
        split_rows: The most rows that the split of the step can use.
        lost_rows: The most rows that the lost time can use, on a wide screen.
        lanes_use: How many of so many rows the lanes use; the table gets the others if it needs them.
    """
    wide = width >= WIDE
    table = _table_height(height, ranks)
    panel = min(max(width // 3, _PANEL[0]), _PANEL[1]) if wide else 0
    lanes, history, devices = _wide(height - table, lane_rows[1]) if wide else _narrow(height - table, *lane_rows)
    spare = min(lanes - lanes_use(lanes), max(max(ranks, 1) + 1 - table, 0)) if table else 0
    table, lanes, rest = table + spare, lanes - spare, height - table - spare
    lost = _spare(rest, lost_rows) if wide else 0
    split = _spare(rest - lost, split_rows) if wide else 0
    left = width - panel
    return ScreenLayout(
        lanes=Box(0, 0, left, lanes),
        history=Box(0, lanes, left, history),
        devices=Box(left, 0, panel, rest - lost - split) if wide else Box(0, lanes + history + table, width, devices),
        lost=Box(left, rest - split - lost, panel, lost) if wide else Box(0, 0, 0, 0),
        split=Box(left, rest - split, panel, split),
        table=Box(0, lanes + history, width, table),
    )


def _table_height(body: int, ranks: int) -> int:
    """Returns a row for every rank, as long as the lanes keep their least height and more than half of the body."""
    wanted = max(ranks, 1) + 1
    return max(min(wanted, body - _LEAST_LANES, max(body * 2 // 5, 3)), 0) if body >= _LEAST_LANES + 2 else 0


def _wide(rest: int, wanted: int) -> tuple[int, int, int]:
    history = rest - wanted if rest - wanted >= 5 else 0
    return rest - history, history, 0


def _spare(rest: int, wanted: int) -> int:
    """Returns the rows of the right column that the devices can spare for another panel."""
    spare = min(rest - _LEAST_DEVICES, wanted, rest // 2)
    return spare if spare >= 4 else 0


def _narrow(rest: int, enough: int, wanted: int) -> tuple[int, int, int]:
    """Gives enough to the lanes, then to devices, then the most that the lanes can use, then to history."""
    lanes = min(rest, max(enough, _LEAST_LANES))
    devices = min(rest - lanes, _DEVICES) if rest - lanes >= 3 else 0
    lanes = min(rest - devices, max(wanted, lanes))
    left = rest - devices - lanes
    return (lanes, left, devices) if left >= 5 else (lanes, 0, devices + left if devices else 0)
