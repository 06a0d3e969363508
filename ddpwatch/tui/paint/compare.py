"""The Compare view: the verdict, figures side by side, where a step goes in both, and what both ran on."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.analysis.block_means import FEWEST_STEPS
from ddpwatch.analysis.compare import FigureChange
from ddpwatch.analysis.estimate import Estimate
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.text import UNKNOWN, percent, three_digits
from ddpwatch.common.units import to_ms
from ddpwatch.tui.models.compare import THIS_RUN, CompareModel, Comparison
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.spark import paint_columns
from ddpwatch.tui.paint.split import PHASE_NAMES, PHASE_STYLES
from ddpwatch.tui.text import shorten, shorten_name, wrap

_SIGNS = {"slower": ("✗", "bad"), "faster": ("✓", "good"), "same": ("✓", "text")}
_GUTTER = 16
_COLUMN = 14
_INTERVAL = 20
_LEAST_CHART_ROWS, _MOST_CHART_ROWS = 3, 6
_MARK_UP, _MARK_DOWN = "▲", "▼"


def paint_compare(model: CompareModel, width: int, height: int) -> list[Row]:
    """Returns the body: as many of the parts as fit."""
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    canvas.put(1, 0, shorten(_title(model), width - 2), "heading-strong")
    y = _paint_verdict(canvas, model, 1)
    if model.result is not None:
        y = _paint_figures(canvas, model.result, model.name, y + 1)
        y = _paint_bars(canvas, model.result, model.name, y + 1)
        y = _paint_setups(canvas, model.setups, model.name, y + 1)
        _paint_steps(canvas, model.result, model.name, y + 1)
    elif not model.name:
        _paint_offered(canvas, model.directory, model.offered, y + 1)
    return canvas.rows()


def _paint_offered(canvas: Canvas, directory: str, names: Sequence[str], y: int) -> None:
    """Paints what could be compared with, or where nothing was found."""
    text = "recordings here, newest first; b takes one of them, or the path of another"
    if not names:
        text = f"no other recording (*.mcap) in {shorten_name(directory, 1000)}: b takes a path elsewhere, too"
    lines = wrap(text, canvas.width - 4, 3)
    for row, line in enumerate(lines, start=y):
        canvas.put(3, row, line, "dim")
    y += len(lines) - 1
    for row, name in enumerate(names[: max(canvas.height - y - 1, 0)], start=y + 1):
        canvas.put(5, row, shorten_name(name, canvas.width - 6), "text")


def _title(model: CompareModel) -> str:
    return f"compared with {model.name}   b: another recording" if model.name else "compare with a recording"


def _paint_verdict(canvas: Canvas, model: CompareModel, y: int) -> int:
    """Paints the verdict, or what is missing for one; returns the row after it."""
    sign, style, text = _verdict(model)
    canvas.put(1, y, sign, style)
    lines = wrap(shorten_name(text, 1000), canvas.width - 4, 3)
    for row, line in enumerate(lines, start=y):
        canvas.put(3, row, line, style if style in ("bad", "good") else "text")
    return y + len(lines)


def _verdict(model: CompareModel) -> tuple[str, str, str]:
    if model.failure:
        return "✗", "bad", f"{model.failure}; b takes another file"
    if not model.name:
        return "·", "dim", "b asks for a recording to compare this run with; or start with --baseline FILE"
    if model.reading is not None:
        return "·", "dim", f"reading {model.name}: {model.reading} steps so far"
    if model.result is None:
        return "·", "dim", f"{THIS_RUN} has {model.steps} steps to compare so far"
    found = model.result.difference
    text = found.text
    if found.verdict == "unknown" and model.steps < FEWEST_STEPS:
        text = f"{THIS_RUN} has {model.steps} of the {FEWEST_STEPS} steps that a verdict needs"
    return *_SIGNS.get(found.verdict, ("·", "dim")), text


def _paint_figures(canvas: Canvas, result: Comparison, name: str, y: int) -> int:
    """Paints means side by side, and their change with its interval. A sign marks a change beyond chance."""
    canvas.fill(0, canvas.width, y, " ", "heading")
    heads = (f"{name} ({result.baseline.steps})", f"{THIS_RUN} ({result.run.steps})", "change", "99 % interval")
    x = canvas.put(1, y, f"{'mean (steps)':<{_GUTTER - 1}}", "heading")
    widths = (_COLUMN, _COLUMN, _COLUMN, _INTERVAL)
    wide = min(max((canvas.width - _GUTTER - sum(widths)) // 2, 0), 20)
    widths = (_COLUMN + wide, _COLUMN + wide, _COLUMN, _INTERVAL)
    for head, column in zip(heads, widths, strict=True):
        canvas.put(x, y, f"{shorten(head, column - 1):>{column}}", "heading")
        x += column
    for row, (label, key) in enumerate(_FIGURES, start=y + 1):
        _paint_figure(canvas, result, (label, key), widths, row)
    return y + 1 + len(_FIGURES)


_FIGURES = (("step ms", "step"), *((f"  {PHASE_NAMES[phase]}", phase) for phase in PHASES), ("overlap", "overlap"))


def _paint_figure(
    canvas: Canvas, result: Comparison, figure: tuple[str, str], widths: tuple[int, int, int, int], y: int
) -> None:
    label, key = figure
    change = result.changes[key]
    style = _style(key, change)
    x = canvas.put(1, y, f"{label:<{_GUTTER - 1}}", "strong" if key in ("step", "overlap") else "text")
    mark = " " if change is None or not change.certain else _MARK_UP if change.by > 0 else _MARK_DOWN
    cells = (
        (_value(result.baseline, key), "text"),
        (_value(result.run, key), "strong" if style in ("bad", "good") else "text"),
        (f"{_signed(key, None if change is None else change.by)} {mark}", style),
        (UNKNOWN if change is None else f"{_signed(key, change.low)} … {_signed(key, change.high)}", "dim"),
    )
    for (text, cell_style), column in zip(cells, widths, strict=True):
        canvas.put(x, y, f"{text:>{column}}", cell_style)
        x += column


def _style(key: str, change: FigureChange | None) -> str:
    if change is None or not change.certain:
        return "dim"
    return "good" if (change.by > 0) == (key == "overlap") else "bad"


def _value(known: Estimate, key: str) -> str:
    if key == "overlap":
        return percent(known.overlap)
    return three_digits(to_ms(known.step_ns if key == "step" else known.phases_ns.get(key)))


def _signed(key: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    small = f"{value:+.1f}" if abs(value) < 100 else f"{value:+.0f}"
    text = f"{100 * value:+.0f} pts" if key == "overlap" else small
    return text.replace("-", "−")


def _paint_bars(canvas: Canvas, result: Comparison, name: str, y: int) -> int:
    """Paints where a step goes, both to the same scale."""
    rows = [(name, result.baseline.phases_ns), (THIS_RUN, result.run.phases_ns)]
    longest = max(sum(phases.values()) for _, phases in rows)
    if y + len(rows) > canvas.height or not longest:
        return y - 1
    room = max(canvas.width - _GUTTER - 2, 0)
    for row, (label, phases) in enumerate(rows, start=y):
        canvas.put(1, row, shorten(label, _GUTTER - 2), "strong")
        x = 0.0
        for phase, full, short, style, glyph in PHASE_STYLES:
            end = x + phases.get(phase, 0.0) * room / longest
            first, last = _GUTTER + round(x), _GUTTER + round(end)
            canvas.fill(first, last, row, glyph, style)
            text = next((text for text in (f" {full} ", short) if len(text) + 2 <= last - first), "")
            if text and f"{style}-label" in _LABELLED:
                canvas.put(first + (last - first - len(text)) // 2, row, text, f"{style}-label")
            x = end
    return y + len(rows)


_LABELLED = ("data-label", "forward-label", "backward-label", "optimizer-label", "exposed-label")


def _paint_setups(canvas: Canvas, setups: Sequence[tuple[str, str, str]], name: str, y: int) -> int:
    """Returns what both ran on; a difference there may explain everything."""
    if y + 1 >= canvas.height:
        return y
    canvas.fill(0, canvas.width, y, " ", "heading")
    column = min(max((canvas.width - _GUTTER - 2) // 2, 8), 44)
    for x, head in ((1, "set-up"), (_GUTTER, name), (_GUTTER + column, THIS_RUN)):
        canvas.put(x, y, shorten(head, column - 1), "heading")
    differing = sorted(setups, key=lambda row: row[1] == row[2])
    for row, (what, before, now) in enumerate(differing[: canvas.height - y - 1], start=y + 1):
        style = "text" if before == now else "warn"
        for x, text in ((1, what), (_GUTTER, before), (_GUTTER + column, now)):
            canvas.put(x, row, shorten(text, (_GUTTER - 1 if x == 1 else column) - 1), style)
    return y + 1 + len(differing)


def _paint_steps(canvas: Canvas, result: Comparison, name: str, y: int) -> None:
    """Paints the newest steps of both, one column each, to the same scale."""
    tall = min((canvas.height - y - 2) // 2, _MOST_CHART_ROWS)  # with a row between them
    room = canvas.width - _GUTTER - 1
    if tall < _LEAST_CHART_ROWS or room < 1:
        return
    canvas.fill(0, canvas.width, y, " ", "heading")
    top = max(*result.steps[0][-room:], *result.steps[1][-room:])
    canvas.put(1, y, shorten(f"newest steps, step ms, up to {three_digits(top)}", canvas.width - 2), "heading")
    for label, values, row in ((name, result.steps[0], y + 1), (THIS_RUN, result.steps[1], y + 2 + tall)):
        canvas.put(1, row, shorten(label, _GUTTER - 2), "strong")
        paint_columns(canvas, values, (_GUTTER, row, room, tall), "history", top)
