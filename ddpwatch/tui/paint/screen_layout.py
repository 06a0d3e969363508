"""Divides the screen between the overview's parts. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WIDE = 110
_LEAST_LANES = 5
_PANEL = (34, 64)
_DEVICES = 9
_LEAST_DEVICES = 9
_LEAST_DEVICES_NARROW = 3


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

    header: Box
    verdict: Box
    lanes: Box
    history: Box
    table: Box
    devices: Box
    lost: Box
    split: Box
    footer: Box


def layout(
    width: int,
    height: int,
    ranks: int,
    lane_rows: tuple[int, int],
    split_rows: int = 0,
    verdict_rows: int = 1,
    lost_rows: int = 0,
    lanes_use: Callable[[int], int] = int,
) -> ScreenLayout:
    """Divides the screen between header, verdict and footer, then lanes and table, then devices and history.

    Args:
        width: Columns of the screen.
        height: Its rows.
        ranks: How many the table lists.
        lane_rows: Rows that the lanes need to be readable, and the most that they can use.
        split_rows: The most rows that the split of the step can use.
        verdict_rows: Rows that the verdict needs.
        lost_rows: The most rows that the lost time can use, on a wide screen.
        lanes_use: How many of so many rows the lanes use; the table gets the others if it needs them.
    """
    wide = width >= WIDE
    header = min(2, height)
    verdict = min(verdict_rows, max(height - header - 1, 0))
    footer = 1 if height - header - verdict >= 3 else 0
    body = max(height - header - verdict - footer, 0)
    table = _table_height(body, ranks)
    panel = min(max(width // 3, _PANEL[0]), _PANEL[1]) if wide else 0
    lanes, history, devices = _wide(body - table, lane_rows[1]) if wide else _narrow(body - table, *lane_rows)
    spare = min(lanes - lanes_use(lanes), max(max(ranks, 1) + 1 - table, 0)) if table else 0
    table, lanes, rest = table + spare, lanes - spare, body - table - spare
    lost = _spare(rest, lost_rows) if wide else 0
    split = _spare(rest - lost, split_rows) if wide else 0
    y = header + verdict
    left = width - panel
    return ScreenLayout(
        header=Box(0, 0, width, header),
        verdict=Box(0, header, width, verdict),
        lanes=Box(0, y, left, lanes),
        history=Box(0, y + lanes, left, history),
        devices=Box(left, y, panel, rest - lost - split)
        if wide
        else Box(0, y + lanes + history + table, width, devices),
        lost=Box(left, y + rest - split - lost, panel, lost) if wide else Box(0, y, 0, 0),
        split=Box(left, y + rest - split, panel, split),
        table=Box(0, y + lanes + history, width, table),
        footer=Box(0, height - footer, width, footer),
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
