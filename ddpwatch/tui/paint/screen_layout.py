"""Who gets which part of the screen: arithmetic, no widgets."""

from __future__ import annotations

from dataclasses import dataclass

WIDE = 110
_LEAST_TIMELINE = 5
_PANEL = (34, 64)
_DEVICES = 9
_LEAST_DEVICES = 9


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of cells; nothing is drawn where width or height is 0."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ScreenLayout:
    """Where the parts of the overview lie."""

    header: Box
    verdict: Box
    timeline: Box
    history: Box
    table: Box
    devices: Box
    split: Box
    footer: Box


def layout(
    width: int, height: int, ranks: int, lanes: tuple[int, int], split_rows: int = 0, verdict_rows: int = 1
) -> ScreenLayout:
    """Divides the screen between header, verdict and footer, then timeline and table, then devices and history.

    Args:
        width: Columns of the screen.
        height: Its rows.
        ranks: How many the table lists.
        lanes: Rows with which the timeline is well readable, and those it can make use of.
        split_rows: Rows that the split of the step can make use of.
        verdict_rows: Rows that the verdict needs.
    """
    wide = width >= WIDE
    header = min(2, height)
    verdict = min(verdict_rows, max(height - header - 1, 0))
    footer = 1 if height - header - verdict >= 3 else 0
    body = max(height - header - verdict - footer, 0)
    table = _table_height(body, ranks)
    panel = min(max(width // 3, _PANEL[0]), _PANEL[1]) if wide else 0
    rest = body - table
    timeline, history, devices = _wide(rest, lanes[1]) if wide else _narrow(rest, *lanes)
    split = _split_height(rest, split_rows) if wide else 0
    y = header + verdict
    left = width - panel
    return ScreenLayout(
        header=Box(0, 0, width, header),
        verdict=Box(0, header, width, verdict),
        timeline=Box(0, y, left, timeline),
        history=Box(0, y + timeline, left, history),
        devices=Box(left, y, panel, rest - split) if wide else Box(0, y + timeline + history + table, width, devices),
        split=Box(left, y + rest - split, panel, split),
        table=Box(0, y + timeline + history, width, table),
        footer=Box(0, height - footer, width, footer),
    )


def _table_height(body: int, ranks: int) -> int:
    """All ranks if that leaves the timeline its least and more than half of the body; else what does."""
    wanted = max(ranks, 1) + 1
    return max(min(wanted, body - _LEAST_TIMELINE, max(body * 2 // 5, 3)), 0) if body >= _LEAST_TIMELINE + 2 else 0


def _wide(rest: int, wanted: int) -> tuple[int, int, int]:
    history = rest - wanted if rest - wanted >= 5 else 0
    return rest - history, history, 0


def _split_height(rest: int, wanted: int) -> int:
    """What the devices can spare of the right column."""
    spare = min(rest - _LEAST_DEVICES, wanted, rest // 2)
    return spare if spare >= 4 else 0


def _narrow(rest: int, enough: int, wanted: int) -> tuple[int, int, int]:
    """Enough for the timeline, then devices, then what the timeline can use, then history."""
    timeline = min(rest, max(enough, _LEAST_TIMELINE))
    devices = min(rest - timeline, _DEVICES) if rest - timeline >= 3 else 0
    timeline = min(rest - devices, max(wanted, timeline))
    left = rest - devices - timeline
    return (timeline, left, devices) if left >= 5 else (timeline, 0, devices + left if devices else 0)
