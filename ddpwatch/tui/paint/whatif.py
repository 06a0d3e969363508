"""The What if view: the measured step as a bar, below it those predicted, and the selected change in detail."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.common.text import percent, three_digits
from ddpwatch.tui.models.whatif import WhatIfModel, selected_index
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.glyphs import COMM, PHASES
from ddpwatch.tui.text import first_fit, shorten, shorten_name, wrap
from ddpwatch.whatif.answer import Prediction, WhatIfAnswer
from ddpwatch.whatif.scenarios import SWEEP
from ddpwatch.whatif.summary import best, gain_text, interval_text, not_predicted, sentences
from ddpwatch.whatif.wording import AT_MOST, statement_of

_VERDICT_ROWS, _DETAIL_ROWS = 5, 5
_HEAD_ROWS = 2  # of the table: its heading, and the measured step
_LEAST_ROWS = 4  # of changes, before there is room for details
_WIDE, _ROOMY = 120, 80
_GAP, _LEAST_BAR = 2, 8  # cells
_BEST = " ◀"
_LEGENDS = (
    "▓ step, of it ╱ exposed   ┄ with the least gain", "▓ step  ╱ exposed  ┄ least gain", "▓ step  ╱ exposed",
    "╱ exposed",
)  # fmt: skip
_SHORTER = {"bucket cap": "cap", " as fast as the others": " like the others", " batches": "", AT_MOST: ""}
_MEASURED = "python -m ddpwatch.whatif.sweep measures that"


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
        chosen = selected_index(answer, selected)
        details = _DETAIL_ROWS if height - y - _HEAD_ROWS >= _LEAST_ROWS + _DETAIL_ROWS else 0
        y = _paint_changes(canvas, answer, y, height - y - details, chosen)
        _paint_detail(canvas, answer, y, chosen)
    return canvas.rows()


def _titles(answer: WhatIfAnswer) -> Sequence[str]:
    """Returns what it rests on, in full and in short."""
    text = f"what if: the newest {answer.steps} steps timed in full, replayed"
    off = percent(abs(answer.replayed.error), 1)
    return f"{text} (unchanged: {off} off); the header has the mean of all steps", text


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
    missing = [f"{changes}: {why.replace(SWEEP, _MEASURED)}" for changes, why in not_predicted(answer.refused)]
    text = "; ".join([*sentences(answer), *([f"not predicted: {'; '.join(missing)}"] if missing else [])])
    return ("·", "text", text) if best(answer.scenarios) is None else ("✓", "good", text)


def _paint_changes(canvas: Canvas, answer: WhatIfAnswer, y: int, height: int, selected: int) -> int:
    """Paints the table's heading, the measured step, and as many changes as fit, the selected one among them.

    Returns the row after them.
    """
    shown = max(min(height - _HEAD_ROWS, len(answer.scenarios)), 0)
    first = max(selected - shown + 1, 0) if shown else 0
    left = len(answer.scenarios) - shown
    table = _table(canvas.width, answer, f"change (↓ {left} more)" if left else "change")
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    widths[0] = min(widths[0], max(canvas.width - _LEAST_BAR - sum(widths[1:]) - _GAP * len(widths), 0))
    x = sum(widths) + _GAP * len(widths) + 1
    scale = max(canvas.width - x - 1, 0) / max(answer.replayed.measured_ms, *map(_longest_ms, answer.scenarios), 1e-9)
    canvas.fill(0, canvas.width, y, " ", "heading")
    canvas.put(x, y, next((text for text in _LEGENDS if len(text) < canvas.width - x), ""), "heading")
    _paint_cells(canvas, y, table[0], widths, "heading", "heading")
    _paint_cells(canvas, y + 1, table[1], widths, "strong", "strong")
    _paint_bar(canvas, y + 1, (x, scale), answer.replayed.measured_ms, answer.replayed.exposed_ms)
    for row, place in enumerate(range(first, first + shown), start=y + _HEAD_ROWS):
        found = answer.scenarios[place]
        style = _style(found, best(answer.scenarios))
        canvas.put(0, row, "▶" if place == selected else " ", "strong")
        _paint_cells(canvas, row, table[_HEAD_ROWS + place], widths, style, style if found.sure else "dim")
        _paint_bar(canvas, row, (x, scale), found.step_ms, found.exposed_ms, _longest_ms(found))
    return y + _HEAD_ROWS + shown


def _table(width: int, answer: WhatIfAnswer, change: str) -> Sequence[Sequence[str]]:
    """Returns the cells of the heading, the measured step and each change; fewer columns in a narrow terminal."""
    columns = [0, 1, 2, 3, 4] if width >= _ROOMY else [0, 1, 4]
    chosen = best(answer.scenarios)
    rows = [
        [change, "step ms", "gain ms", "90 % interval", "gain"],
        ["measured", three_digits(answer.replayed.measured_ms), "", "", ""],
        *([_name(found, width, found == chosen), *_figures(found)] for found in answer.scenarios),
    ]
    return [[row[column] for column in columns] for row in rows]


def _figures(found: Prediction) -> Sequence[str]:
    """Returns a change's step and gain; the interval is that of the gain in each step, not of steps' lengths."""
    least, most = ("≥", "≤") if found.kind == "bound" else ("", "")
    gain, share = gain_text(found.gain_ms), percent(round(found.gain, 3) + 0.0, 1)
    signed = [(most or "+" * (not text.startswith("-"))) + text for text in (gain, share)]
    cells = [least + three_digits(found.step_ms), signed[0], interval_text(found, " … "), signed[1]]
    return [cell.replace("-", "−") for cell in cells]


def _name(found: Prediction, width: int, is_best: bool) -> str:
    name = found.change
    for long, short in _SHORTER.items() if width < _WIDE else ():
        name = name.replace(long, short)
    return f"{name}{_BEST}" if is_best else name


def _paint_cells(
    canvas: Canvas, y: int, cells: Sequence[str], widths: Sequence[int], style: str, figure_style: str
) -> None:
    name, *figures = cells
    mark = _BEST if name.endswith(_BEST) else ""
    canvas.put(_GAP, y, shorten(name.removesuffix(_BEST), widths[0] - len(mark)) + mark, style)
    x = _GAP + widths[0]
    for text, width in zip(figures, widths[1:], strict=True):
        x = canvas.put(x, y, f"{text:>{_GAP + width}}", figure_style)


def _style(found: Prediction, chosen: Prediction | None) -> str:
    return "good" if found == chosen else "dim" if found.kind in ("fault", "other", "bound") else "text"


def _longest_ms(found: Prediction) -> float:
    """Returns how long the step may be, with the least gain of the interval."""
    return found.step_ms + found.gain_ms - found.gain_low_ms


def _paint_bar(
    canvas: Canvas, y: int, bar: tuple[int, float], step_ms: float, exposed_ms: float, high_ms: float = 0.0
) -> None:
    """Paints the step, its exposed communication last; then as far as it may reach."""
    x, scale = bar
    computed, end, most = (x + round(ms * scale) for ms in (max(step_ms - exposed_ms, 0.0), step_ms, high_ms))
    canvas.fill(x, computed, y, PHASES["backward"], "backward")
    canvas.fill(computed, end, y, COMM["exposed"], "exposed")
    canvas.fill(end, most, y, "┄", "faint")


def _paint_detail(canvas: Canvas, answer: WhatIfAnswer, y: int, selected: int) -> None:
    """Paints why the selected change gains, what it assumes, and its code."""
    if not answer.scenarios or canvas.height - y < 2:
        return
    found = answer.scenarios[selected]
    canvas.fill(0, canvas.width, y, " ", "heading")
    code = statement_of(found.code)
    rest = code or ("ddpwatch whatif prints its code" if found.code else "no line of code")
    texts = [f"{found.change}: {rest}", *filter(None, [code])]
    canvas.put(1, y, first_fit(texts, canvas.width - 2), "heading-strong")
    texts = [found.why, *([f"assumes: {found.assumes}"] if found.assumes else [])]
    _paint_texts(canvas, texts, y + 1)


def _paint_texts(canvas: Canvas, texts: Sequence[str], y: int) -> None:
    for text in texts:
        for line in wrap(shorten_name(text, 400), canvas.width - 3, max(canvas.height - y, 0)):
            canvas.put(2, y, line, "text")
            y += 1
