"""The What if view: the measured step as a bar, below it those predicted, and the selected change in detail."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.common.text import percent, three_digits
from ddpwatch.tui.models.whatif import Answer, Scenario, WhatIfModel
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.glyphs import COMM, PHASES
from ddpwatch.tui.text import first_fit, shorten, shorten_name, wrap
from ddpwatch.whatif.answer import Prediction, most_to_save
from ddpwatch.whatif.wording import BOUND, nothing_sure, statement_of

_GUTTER, _WIDE_GUTTER = 28, 42
_STEP, _INTERVAL, _GAIN = 8, 16, 9
_VERDICT_ROWS, _DETAIL_ROWS = 5, 5
_LEAST_ROWS = 4  # of changes, before there is room for details
_WIDE, _ROOMY = 120, 80
_BEST = "◀"
_LEGENDS = ("▓ step, of it ╱ exposed   ┄ with the least gain", "▓ step  ╱ exposed  ┄ least gain", "▓ step  ╱ exposed")
_SHORTER = {
    "bucket cap": "cap", " as fast as the others": " like the others", " batches": "",
    f"caps, hooks, links at best {BOUND}": "bound of caps and hooks",
}  # fmt: skip


def paint_whatif(model: WhatIfModel, width: int, height: int, selected: str | None = None) -> list[Row]:
    """Returns the body: one line that says most, then a bar per change, and what the selected one rests on."""
    canvas = Canvas(width, height)
    canvas.fill(0, width, 0, " ", "heading")
    answer = model.answer
    title = "what if: how long a step would take with other settings"
    titles = [title] if answer is None else _titles(answer)
    canvas.put(1, 0, first_fit(titles, width - 2), "heading")
    y = _paint_verdict(canvas, model, 1)
    if answer is not None:
        details = _DETAIL_ROWS if height - y - 2 >= _LEAST_ROWS + _DETAIL_ROWS else 0
        y = _paint_changes(canvas, answer, y, height - y - details, answer.index_of(selected))
        _paint_detail(canvas, answer, y, answer.index_of(selected))
    return canvas.rows()


def _titles(answer: Answer) -> Sequence[str]:
    """Returns what it rests on, in full and in short."""
    text = f"what if: the {answer.steps} steps timed in full, replayed with other settings"
    return f"{text} (unchanged: {percent(abs(answer.error), 1)} off)", text


def _paint_verdict(canvas: Canvas, model: WhatIfModel, y: int) -> int:
    sign, style, text = _verdict(model)
    canvas.put(1, y, sign, style)
    lines = wrap(shorten_name(text, 600), canvas.width - 4, _VERDICT_ROWS)
    for row, line in enumerate(lines, start=y):
        canvas.put(3, row, line, style if style == "good" else "text")
    return y + len(lines)


def _verdict(model: WhatIfModel) -> tuple[str, str, str]:
    """Returns what can be gained, or why that is not known."""
    answer = model.answer
    if model.failure:
        return "·", "dim", model.failure
    if answer is None:
        return "·", "dim", "predicting …"
    missing = f"not predicted: {answer.refused}" if answer.refused else ""
    found = [scenario.prediction for scenario in answer.scenarios]
    most = most_to_save(answer.exposed_ms, answer.measured_ms, found)
    larger = "" if answer.larger is None else _gains(answer.larger.prediction)
    if answer.best is not None:
        return "✓", "good", "; ".join(filter(None, [larger, _gains(answer.best.prediction), most, missing]))
    if missing:
        return "·", "dim", "; ".join(filter(None, [larger, most, missing]))
    nothing = nothing_sure(scenario.prediction.more_steps for scenario in answer.of_code)
    return "·", "text", "; ".join(filter(None, [larger, nothing, most]))


def _gains(found: Prediction) -> str:
    interval = f"{three_digits(found.gain_low_ms)} to {three_digits(found.gain_high_ms)}"
    return f"{found.change} would gain {three_digits(found.gain_ms)} ms a step ({interval}; {percent(found.gain, 1)})"


def _paint_changes(canvas: Canvas, answer: Answer, y: int, height: int, selected: int) -> int:
    """Returns a heading, the measured step, and as many changes as fit around the selected one.

    Returns the row after them.
    """
    shown = max(min(height - 2, len(answer.scenarios)), 0)
    first = min(max(selected - shown + 1, 0), selected) if shown else 0
    bar = _paint_heading(canvas, answer, y, shown)
    canvas.put(2, y + 1, "measured", "strong")
    canvas.put(_gutter(canvas), y + 1, f"{three_digits(answer.measured_ms):>{_STEP}}", "strong")
    _paint_bar(canvas, y + 1, bar, answer.measured_ms, answer.exposed_ms)
    for row, scenario in enumerate(answer.scenarios[first : first + shown], start=y + 2):
        _paint_change(canvas, scenario, row, bar, scenario == answer.best)
        canvas.put(0, row, "▶" if row - y - 2 + first == selected else " ", "strong")
    return y + 2 + shown


def _gutter(canvas: Canvas) -> int:
    return _WIDE_GUTTER if canvas.width >= _WIDE else _GUTTER


def _paint_heading(canvas: Canvas, answer: Answer, y: int, shown: int) -> tuple[int, float]:
    """Paints the columns' names; returns where bars start, and how many cells a millisecond has."""
    canvas.fill(0, canvas.width, y, " ", "heading")
    left = len(answer.scenarios) - shown
    canvas.put(2, y, f"change (↓ {left} more)" if left else "change", "heading")
    x = _gutter(canvas)
    for head, column in (("step ms", _STEP), *_gain_columns(canvas)):
        canvas.put(x, y, f"{head:>{column}}", "heading")
        x += column
    if canvas.width >= _WIDE:
        canvas.put(x + 1, y, next((text for text in _LEGENDS if len(text) <= canvas.width - x - 2), ""), "heading")
    longest = max(answer.measured_ms, *(_longest_ms(scenario.prediction) for scenario in answer.scenarios), 1e-9)
    return x + 1, max(canvas.width - x - 2, 0) / longest


def _longest_ms(found: Prediction) -> float:
    """Returns how long the step may be, with the least gain of the interval."""
    return found.step_ms + found.gain_ms - found.gain_low_ms


def _gain_columns(canvas: Canvas) -> Sequence[tuple[str, int]]:
    """Returns the columns of the gain; its interval is that of the gain in each step, not of steps' lengths."""
    known = [("gain ms", _GAIN, _ROOMY), ("90 % interval", _INTERVAL, _ROOMY), ("gain", _GAIN, 0)]
    return [(head, column) for head, column, least in known if canvas.width >= least]


def _paint_change(canvas: Canvas, scenario: Scenario, y: int, bar: tuple[int, float], best: bool) -> None:
    found, gutter = scenario.prediction, _gutter(canvas)
    style = "good" if best else "dim" if scenario.kind in ("fault", "other", "bound") else "text"
    name = found.change if canvas.width >= _WIDE else _shorter(found.change)
    canvas.put(2, y, f"{shorten(name, gutter - 4)}{f' {_BEST}' if best else ''}", style)
    gains = {
        "gain ms": _signed(found.gain_ms),
        "90 % interval": f"{three_digits(found.gain_low_ms)} … {three_digits(found.gain_high_ms)}".replace("-", "−"),
        "gain": f"{_signed(100 * found.gain)} %",
    }
    cells = [(three_digits(found.step_ms), _STEP), *((gains[head], column) for head, column in _gain_columns(canvas))]
    x = gutter
    for text, column in cells:
        x = canvas.put(x, y, f"{text:>{column}}", style if scenario.prediction.sure else "dim")
    _paint_bar(canvas, y, bar, found.step_ms, found.exposed_ms, _longest_ms(found))


def _shorter(change: str) -> str:
    for long, short in _SHORTER.items():
        change = change.replace(long, short)
    return change


def _signed(value: float) -> str:
    text = f"{round(value, 1) + 0.0:+.1f}" if abs(value) < 99.95 else f"{value:+.0f}"  # no negative zero
    return text.replace("-", "−")


def _paint_bar(
    canvas: Canvas, y: int, bar: tuple[int, float], step_ms: float, exposed_ms: float, high_ms: float = 0.0
) -> None:
    """Paints the step, its exposed communication last; then as far as it may reach."""
    x, scale = bar
    computed, end, most = (x + round(ms * scale) for ms in (max(step_ms - exposed_ms, 0.0), step_ms, high_ms))
    canvas.fill(x, computed, y, PHASES["backward"], "backward")
    canvas.fill(computed, end, y, COMM["exposed"], "exposed")
    canvas.fill(end, most, y, "┄", "faint")


def _paint_detail(canvas: Canvas, answer: Answer, y: int, selected: int) -> None:
    """Paints why the selected change gains, what it assumes, and its code."""
    if not answer.scenarios or canvas.height - y < 2:
        return
    found = answer.scenarios[selected].prediction
    canvas.fill(0, canvas.width, y, " ", "heading")
    code = statement_of(found.code)
    texts = [f"{found.change}: {code or 'no line of code'}", *filter(None, [code])]
    canvas.put(1, y, first_fit(texts, canvas.width - 2), "heading-strong")
    texts = [found.why, *([f"assumes: {found.assumes}"] if found.assumes else [])]
    _paint_texts(canvas, texts, y + 1)


def _paint_texts(canvas: Canvas, texts: Sequence[str], y: int) -> None:
    for text in texts:
        for line in wrap(shorten_name(text, 400), canvas.width - 3, max(canvas.height - y, 0)):
            canvas.put(2, y, line, "text")
            y += 1
