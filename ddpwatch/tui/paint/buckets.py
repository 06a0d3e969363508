"""The Buckets view: a table with a bar per bucket, and one bucket in detail."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.analysis.buckets import BucketStep, BucketSummary
from ddpwatch.analysis.step import BACKWARD_GATHER, USE_NAMES
from ddpwatch.common.text import UNKNOWN, ms, one_of, percent, size, three_digits
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.grid import Column, paint_grid
from ddpwatch.tui.paint.spark import paint_columns
from ddpwatch.tui.text import shorten, shorten_name

_LEAST_BAR = 16
_CHART_ROWS = 4


def _exposed_style(row: BucketSummary) -> str:
    return "warn" if row.exposed else "text"


def _numbered(row: BucketSummary) -> str:
    """Returns its index; of all modules but the first, the module's number as well."""
    return f"{row.module}:{row.index}" if row.module else str(row.index)


COLUMNS: tuple[Column[BucketSummary], ...] = (
    Column("bucket", 8, _numbered, 0, lambda r: r.index),
    Column("bytes", 11, lambda r: size(r.nbytes), 5, lambda r: r.nbytes),
    Column("ready ms", 10, lambda r: ms(r.ready), 6, lambda r: r.ready),
    Column("launch ms", 11, lambda r: ms(r.launch), 2, lambda r: r.launch),
    Column("done ms", 9, lambda r: ms(r.done), 4, lambda r: r.done),
    Column("wait ms", 9, lambda r: ms(r.wait), 1, lambda r: r.wait),
    Column("transfer ms", 13, lambda r: ms(r.transfer), 3, lambda r: r.transfer),
    Column("exposed ms", 12, lambda r: ms(r.exposed), 1, lambda r: r.exposed, _exposed_style),
    Column(
        "busbw GB/s", 12, lambda r: three_digits(None if r.busbw is None else r.busbw / 1e9), 7, lambda r: r.busbw
    ),
    Column("last rank", 11, lambda r: _last(r), 2, lambda r: r.last_share),
)  # fmt: skip


_USES = {"all_gather": "gather", BACKWARD_GATHER: "gather b", "reduce_scatter": "scatter", "all_reduce": "reduce"}
GROUP_COLUMN: Column[BucketSummary] = Column(
    "group", 13, lambda r: f"{r.index} {_USES.get(r.use, ''):<8}", 0, lambda r: r.index
)


def _columns(rows: Sequence[BucketSummary]) -> tuple[Column[BucketSummary], ...]:
    """Returns the columns; with FSDP2, a parameter group takes the place of a bucket."""
    return (GROUP_COLUMN, *COLUMNS[1:]) if any(row.use for row in rows) else COLUMNS


def _last(row: BucketSummary) -> str:
    """Says briefly "3 80%", "3 or 9 80%", "1 of 4 80%"."""
    if not row.last_ranks:
        return UNKNOWN
    named = " or ".join(map(str, row.last_ranks)) if len(row.last_ranks) < 3 else f"1 of {len(row.last_ranks)}"
    return f"{named} {percent(row.last_share)}".replace(" %", "%")


def _last_in_full(row: BucketSummary) -> str:
    if len(row.last_ranks) < 2:
        return f"last on rank {_last(row)}"
    return f"last on {one_of(row.last_ranks)} in {percent(row.last_share)}"


def paint_buckets(
    rows: Sequence[BucketSummary],
    layers: Sequence[str],
    size_: tuple[int, int],
    first: int,
    selected: int,
    sorted_by: str,
) -> list[Row]:
    """Paints the table, its bars (launch to done over the backward) and the selected bucket's largest parameter.

    Args:
        rows: The buckets, sorted.
        layers: The name of each row's largest parameter.
        size_: Columns and rows of the body.
        first: The index of the first row in view.
        selected: The index of the selected row.
        sorted_by: Heading of the column sorted by.
    """
    width, height = size_
    canvas = Canvas(width, height)
    if not rows:
        canvas.put(1, 1, f"{UNKNOWN} no bucket in the newest steps", "dim")
        return canvas.rows()
    table = Canvas(width, height - 1)
    room = width if width < 100 else int(width * 0.68)
    columns = _columns(rows)
    heading = columns[0].heading if sorted_by == COLUMNS[0].heading else sorted_by
    x = paint_grid(table, columns, rows, first, selected, heading, room)
    longest = max((row.done or row.launch or 0 for row in rows), default=0) or 1
    if width - x >= _LEAST_BAR:
        origin = "forward" if any(row.use for row in rows) else "backward"
        title = f"launch to done, {ms(longest)} ms from the {origin}'s start"
        table.put(x + 1, 0, shorten(title, width - x - 2), "heading")
        for y, row in enumerate(rows[first : first + height - 2], start=1):
            _paint_bar(table, row, x + 1, width - x - 2, longest, y)
    _copy(table, canvas)
    layer = layers[selected] if selected < len(layers) else ""
    row = rows[selected]
    note = f"{_named(row)}: {shorten_name(layer, 80) or 'its layout is not known'}, {row.steps} steps"
    canvas.put(1, height - 1, shorten(note + "   Enter: its history and parameters", width - 2), "dim")
    return canvas.rows()


def _named(row: BucketSummary) -> str:
    return f"group {row.index}, {USE_NAMES[row.use]}" if row.use else f"bucket {_numbered(row)}"


def _copy(source: Canvas, target: Canvas) -> None:
    for y, row in enumerate(source.rows()):
        target.put_runs(0, y, row)


def _paint_bar(canvas: Canvas, row: BucketSummary, x: int, width: int, longest: float, y: int) -> None:
    start = max(row.launch or 0.0, 0.0)
    if row.done is None:
        canvas.put(x + round(start * width / longest), y, "▸", "launch")
        return
    first, last = (
        round(start * width / longest),
        max(round(row.done * width / longest), round(start * width / longest) + 1),
    )
    hatched = min(round((row.exposed or 0.0) * width / longest), last - first)
    canvas.fill(x + first, x + last - hatched, y, "█", "comm-a" if row.index % 2 == 0 else "comm-b")
    canvas.fill(x + last - hatched, x + last, y, "╱", "exposed")


def paint_bucket(
    row: BucketSummary,
    history: Sequence[tuple[int, BucketStep]],
    params: Sequence[str],
    fired: Sequence[tuple[str, float]],
    size_: tuple[int, int],
    first: int = 0,
) -> list[Row]:
    """Paints one bucket: wait, transfer and exposed step by step, and its parameters by their hook fires.

    ``fired`` is (parameter, ns from the backward's start) in that order, on the lowest rank. FSDP2's are not seen.
    """
    width, height = size_
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    carried = f"{len(params)} parameter{'' if len(params) == 1 else 's'}"
    title = f"{_named(row)}: {size(row.nbytes)}, {carried}, launched at {ms(row.launch)} ms"
    canvas.put(1, 0, shorten(f"{title}, {_last_in_full(row)}   Escape: back", width - 2), "heading-strong")
    y = 1
    tall = _CHART_ROWS if height >= 24 else 2
    for name, style, values in (
        ("wait", "chart", [step.wait for _, step in history]),
        ("transfer", "history", [step.transfer for _, step in history]),
        ("exposed", "history-exposed", [step.exposed for _, step in history]),
    ):
        top = max((value for value in values if value is not None), default=None)
        canvas.put(1, y, f"{name:<9}", "dim")
        canvas.put(1, y + 1, f"≤ {ms(top)} ms" if top is not None else UNKNOWN, "dim")
        paint_columns(canvas, values, (14, y, width - 15, tall), style)
        y += tall
    if row.use:
        _paint_members(canvas, params, y, first)
    else:
        _paint_params(canvas, params, fired, y, first)
    return canvas.rows()


def _paint_members(canvas: Canvas, params: Sequence[str], y: int, first: int) -> None:
    canvas.fill(0, canvas.width, y, " ", "heading")
    canvas.put(1, y, "in group  parameter", "heading")
    for offset, name in enumerate(params[first : first + max(canvas.height - y - 1, 0)]):
        canvas.put(1, y + 1 + offset, f"{first + offset:>8}  {shorten_name(name, canvas.width - 12)}", "text")


def _paint_params(
    canvas: Canvas, params: Sequence[str], fired: Sequence[tuple[str, float]], y: int, first: int
) -> None:
    canvas.fill(0, canvas.width, y, " ", "heading")
    canvas.put(
        1, y, shorten("fired   at ms  in bucket  parameter, in the order of hook fires", canvas.width - 2), "heading"
    )
    in_bucket = {name: index for index, name in enumerate(params)}
    rest = [(name, None) for name in params if name not in {name for name, _ in fired}]
    lines = [*fired, *rest]
    for offset, (name, at) in enumerate(lines[first : first + max(canvas.height - y - 1, 0)]):
        order = first + offset
        moved = at is not None and in_bucket.get(name) != order
        line = f"{order if at is not None else UNKNOWN:>5} {ms(at):>7} {in_bucket.get(name, UNKNOWN):>10}  "
        x = canvas.put(1, y + 1 + offset, line, "warn" if moved else "text")
        canvas.put(x, y + 1 + offset, shorten_name(name, canvas.width - x - 1), "text")
