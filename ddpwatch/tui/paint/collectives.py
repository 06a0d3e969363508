"""The Collectives view: a table with a bar per row, and one row in detail: a bucket, a parameter group, or a place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ddpwatch.analysis.buckets import BucketStep, BucketSummary
from ddpwatch.analysis.step import BACKWARD_GATHER, USE_NAMES
from ddpwatch.common.text import UNKNOWN, ms, one_of, percent, size, three_digits
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.glyphs import COMM
from ddpwatch.tui.paint.grid import Column, paint_grid
from ddpwatch.tui.paint.spark import paint_columns
from ddpwatch.tui.text import Field, first_fit, fit, shorten, shorten_name
from ddpwatch.wire.messages import LayoutKind

_LEAST_BAR = 16
_WIDTHS = {"wait ms": 8, "exposed ms": 11, "last rank": 11}  # of columns that are narrower beside a place's name
_DROPPED = {"transfer ms": 4, "bytes": 3, "busbw GB/s": 7}  # and when they give way
_CHART_ROWS = 4
_MEDIANS = "medians, which do not add up; wait: from the first rank's launch to the last"


def _exposed_style(row: BucketSummary) -> str:
    return "warn" if row.exposed else "text"


def _numbered(row: BucketSummary) -> str:
    """Returns its index; of all modules but the first, the module's number as well."""
    return f"{row.module}:{row.index}" if row.module else str(row.index)


_USES = {
    **USE_NAMES, "all_gather": "gather", BACKWARD_GATHER: "gather b", "reduce_scatter": "scatter",
    "all_reduce": "reduce",
}  # fmt: skip
_BUCKET: Column[BucketSummary] = Column("bucket", 8, _numbered, 0, lambda r: r.index)
_GROUP: Column[BucketSummary] = Column("group", 13, lambda r: f"{r.index} {_USES[r.use]:<8}", 0, lambda r: r.index)
_PLACED: tuple[Column[BucketSummary], ...] = (  # in the step: of what each step has once
    Column("bytes", 11, lambda r: size(r.nbytes), 5, lambda r: r.nbytes),
    Column("ready ms", 10, lambda r: ms(r.ready), 6, lambda r: r.ready),
    Column("launch ms", 11, lambda r: ms(r.launch), 2, lambda r: r.launch),
    Column("done ms", 9, lambda r: ms(r.done), 4, lambda r: r.done),
    Column("wait ms", 9, lambda r: ms(r.wait), 1, lambda r: r.wait),
    Column("transfer ms", 13, lambda r: ms(r.transfer), 3, lambda r: r.transfer),
    Column("exposed ms", 12, lambda r: ms(r.exposed), 1, lambda r: r.exposed, _exposed_style),
    Column("busbw GB/s", 12, lambda r: three_digits(None if r.busbw is None else r.busbw / 1e9), 7, lambda r: r.busbw),
    Column("last rank", 11, lambda r: _last(r), 2, lambda r: r.last_share),
)
COLUMNS: Mapping[LayoutKind, tuple[Column[BucketSummary], ...]] = {
    "bucket": (_BUCKET, *_PLACED),
    "group": (_GROUP, *_PLACED),
    "call": (
        Column("place", 20, lambda r: _place(r), 0, lambda r: r.exposed, align="<"),
        Column("operation", 15, lambda r: _operation(r), 1, align="<"),
        Column("group", 9, lambda r: shorten(str(r.role), 8) or UNKNOWN, 1, lambda r: r.role.size, align="<"),
        Column("n", 4, lambda r: f"{r.per_step or 0:g}", 2, lambda r: r.per_step),
        *(replace(column, width=_WIDTHS.get(column.heading, column.width), priority=_DROPPED.get(column.heading, 0))
          for column in _PLACED if column.heading not in ("ready ms", "launch ms", "done ms")),
    ),
}  # fmt: skip


def kind_of(rows: Sequence[BucketSummary]) -> LayoutKind:
    """Returns whose columns a table has: those for places if there is any, as these fit all else."""
    return max((row.kind for row in rows), key=("bucket", "group", "call").index, default="bucket")


def _place(row: BucketSummary) -> str:
    return row.name if row.kind == "call" and row.name else _named(row)


def _operation(row: BucketSummary) -> str:
    return "all-gather bwd" if row.use == BACKWARD_GATHER else USE_NAMES[row.use or "all_reduce"]


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


def paint_collectives(
    rows: Sequence[BucketSummary],
    size_: tuple[int, int],
    first: int,
    selected: int,
    sorted_by: str,
    unseen: str = "",
) -> list[Row]:
    """Paints the table, its bars and what the selected row is of.

    Bars show launch to done over the backward; of a place, how long its collectives wait and travel in a step.

    Args:
        rows: The rows, sorted.
        size_: Columns and rows of the body.
        first: The index of the first row in view.
        selected: The index of the selected row.
        sorted_by: Heading of the column sorted by.
        unseen: Why none is seen, if that is so.
    """
    width, height = size_
    canvas = Canvas(width, height)
    if not rows:
        canvas.put(1, 1, shorten(f"{UNKNOWN} {unseen or 'no collective in the newest steps'}", width - 2), "dim")
        return canvas.rows()
    table = Canvas(width, height - 1)
    kind = kind_of(rows)
    room = width if width < 100 else int(width * 0.68)
    x = paint_grid(table, COLUMNS[kind], rows, first, selected, sorted_by, room)
    if width - x >= _LEAST_BAR:
        longest, titles, paint = _BARS[kind](rows)
        table.put(x + 1, 0, first_fit(titles, width - x - 2), "heading")
        for y, row in enumerate(rows[first : first + height - 2], start=1):
            paint(table, row, x + 1, width - x - 2, longest, y)
    _copy(table, canvas)
    row = rows[selected]
    if len(rows) < height - 3:
        canvas.put(1, height - 2, shorten(_MEDIANS, width - 2), "dim")
    canvas.put_runs(1, height - 1, fit(_note_fields(row), width - 2))
    return canvas.rows()


def _note(row: BucketSummary) -> str:
    if row.kind == "call":
        return f"{_named(row)}, {_operation(row)} in {str(row.role) or UNKNOWN}, {row.per_step or 0:g} a step"
    return f"{_named(row)}: {shorten_name(row.name, 80) or 'its parameters are not known'}"


def _note_fields(row: BucketSummary) -> list[Field]:
    """Returns what the row is, what its transfers reach, also where the columns of that have given way, and the key."""
    note, steps = _note(row), f"{row.steps} steps"
    rate = "" if row.busbw is None else f"{size(row.nbytes)} at {three_digits(row.busbw / 1e9)} GB/s"
    enter = Field(f"Enter: {_more(row)}", "Enter: details", 2, "dim")
    return [Field(note, note, 0, "dim"), Field(steps, steps, 3, "dim"), Field(rate, rate, 1, "dim"), enter]


def _more(row: BucketSummary) -> str:
    return "its history" if row.kind == "call" else "its history and parameters"


def _named(row: BucketSummary) -> str:
    if row.kind == "call":
        return shorten_name(row.name, 80) or f"place {row.index}"
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


def _paint_cost(canvas: Canvas, row: BucketSummary, x: int, width: int, longest: float, y: int) -> None:
    waits = round((row.wait or 0.0) * width / longest)
    canvas.fill(x, x + waits, y, COMM["waits"], "waits")
    travels = round(((row.wait or 0.0) + (row.transfer or 0.0)) * width / longest)
    canvas.fill(x + waits, x + travels, y, COMM["comm-a"], "comm-a")


# The longest, titles, and what paints
_Bars = tuple[float, Sequence[str], Callable[[Canvas, BucketSummary, int, int, float, int], None]]


def _placed_bars(rows: Sequence[BucketSummary]) -> _Bars:
    longest = max((row.done or row.launch or 0 for row in rows), default=0) or 1
    origin = "forward" if any(row.use for row in rows) else "backward"
    title = f"launch to done, {ms(longest)} ms"
    return longest, (f"{title} from the {origin}'s start", title), _paint_bar


def _cost_bars(rows: Sequence[BucketSummary]) -> _Bars:
    longest = max(((row.wait or 0) + (row.transfer or 0) for row in rows), default=0) or 1
    title = "wait, then transfer"
    return longest, (f"{title}, in a step ({ms(longest)} ms)", f"{title} ({ms(longest)} ms)", title), _paint_cost


_BARS: Mapping[LayoutKind, Callable[[Sequence[BucketSummary]], _Bars]] = {
    "bucket": _placed_bars, "group": _placed_bars, "call": _cost_bars
}  # fmt: skip


def paint_bucket(
    row: BucketSummary,
    history: Sequence[tuple[int, BucketStep]],
    params: Sequence[str],
    fired: Sequence[tuple[str, float]],
    size_: tuple[int, int],
    first: int = 0,
    alone: bool = True,
) -> list[Row]:
    """Paints one bucket: wait, transfer and exposed step by step, and its parameters by their hook fires.

    ``fired`` is (parameter, ns from the backward's start) in that order, on the lowest rank. FSDP2's are not seen.
    ``alone`` says that no table is above it.
    """
    width, height = size_
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    carried = f"{len(params)} parameter{'' if len(params) == 1 else 's'}"
    title = f"{_named(row)}: {size(row.nbytes)}"
    titles = [f"{title}, {carried}, launched at {ms(row.launch)} ms", f"{title}, {carried}", title]
    if row.kind == "call":
        titles = [f"{_note(row)}: {size(row.nbytes)}", title]
    last, back = _last_in_full(row), "   Escape: back" if alone else ""
    canvas.put(1, 0, first_fit([f"{text}, {last}{back}" for text in titles], width - 2), "heading-strong")
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
    if row.kind == "group":
        _paint_members(canvas, params, y, first)
    elif row.kind == "bucket":
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
        1, y, shorten("order   at ms  in bucket  parameter, as their gradients were ready", canvas.width - 2), "heading"
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
