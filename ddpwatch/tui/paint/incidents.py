"""The list of incidents with the details of one, and the strip of steps that they struck."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.evidence_sentences import evidence_sentences
from ddpwatch.analysis.diagnosis.words.incident_news import cost_text, message_text, steps_text
from ddpwatch.analysis.diagnosis.words.lost_time import seconds_text, share_text
from ddpwatch.analysis.diagnosis.words.next_steps import on_screen
from ddpwatch.analysis.diagnosis.words.sentences import ordinal
from ddpwatch.analysis.diagnosis.words.wording import stack_lines, without
from ddpwatch.common.text import UNKNOWN, percent, spans
from ddpwatch.tui.models.incidents import Diagnosed, ListedIncident
from ddpwatch.tui.models.log import style_of
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.split import PHASE_NAMES
from ddpwatch.tui.text import Field, fit, flow, shorten, shorten_name, wrap

_BADGES = {"bad": "badge-bad", "warn": "badge-wait", "dim": "badge-ended"}
_WHEN = {"now": ("●", "bad"), "to the end": ("○", "bad"), "over": ("✓", "good"), "later": ("·", "faint")}
_LEAST_ROWS = 4  # of the list, before its details get any
_ROOMY, _WIDE = 110, 160


def letter(incident: Incident) -> tuple[str, str]:
    """Returns the cell of an incident in a strip: a letter that sets the kinds apart without colour, and its style."""
    return KINDS[incident.kind].letter, _BADGES[style_of(incident)]


# -- the list ------------------------------------------------------------------------------------------------


def list_height(rows: int, height: int) -> int:
    """Returns how many incidents are in view; the rest of the height is for the details of one."""
    return max(min(rows, height // 2 - 1), min(rows, _LEAST_ROWS), 0)


def paint_incidents(
    rows: Sequence[ListedIncident],
    found: Diagnosed,
    size: tuple[int, int],
    first: int,
    selected: int,
    ended: bool = False,
) -> list[Row]:
    """Returns the list from the ``first`` row on, and the details of the selected one.

    Args:
        rows: All incidents, worst first.
        found: What they are part of.
        size: Columns and rows.
        first: The index of the first in view.
        selected: The index of the selected one.
        ended: The run is over.
    """
    width, height = size
    canvas = Canvas(width, height)
    if not rows:
        text = (
            "no incident so far" if found.progress is None else f"diagnosing the recording: {percent(found.progress)}"
        )
        canvas.put(1, 1, text, "dim")
        return canvas.rows()
    _put_cells(canvas, 0, _HEADINGS, ["heading"] * len(_HEADINGS), "heading")
    room = list_height(len(rows), height)
    for y, row in enumerate(rows[first : first + room], start=1):
        _paint_row(canvas, row, y, first + y - 1 == selected, ended)
    _paint_details(canvas, rows[selected], room + 1, found.unit, ended)
    return canvas.rows()


_WIDTHS = (17, 8, 22, 12, 7, 9, 7)
_HEADINGS = ("incident", "ranks", "where", "steps", "every", "cost s", "share")
_FIRST_NUMBER = 4  # from there on, columns are right-aligned
_DROPPED_WHEN_NARROW = 5  # "cost s": the share says as much, and the details have it
_PLACE, _MORE_PLACE = 2, 22  # "where" is wider where there is room


def _put_cells(canvas: Canvas, y: int, cells: Sequence[str], styles: Sequence[str], fill: str = "text") -> int:
    canvas.fill(0, canvas.width, y, " ", fill)
    x = 4
    for index, (cell, least, style) in enumerate(zip(cells, _WIDTHS, styles, strict=True)):
        width = least + _MORE_PLACE * (index == _PLACE and canvas.width >= _ROOMY)
        if index == _DROPPED_WHEN_NARROW and canvas.width < _ROOMY:
            continue
        text = shorten(cell, width - 1)
        canvas.put(x if index < _FIRST_NUMBER else x + width - 1 - len(text), y, text, style)
        x += width
    return x


def _paint_row(canvas: Canvas, row: ListedIncident, y: int, selected: bool, ended: bool) -> None:
    incident = row.incident
    style = "faint" if row.when == "later" else style_of(incident)
    plain = "faint" if row.when == "later" else "text"
    cells = (
        KINDS[incident.kind].name, _ranks(incident.ranks),
        f"{_phases(incident)} {shorten_name(row.layer, 40)}".strip() or UNKNOWN,
        steps_text(incident), "" if incident.period is None else ordinal(incident.period),
        seconds_text(incident.cost_ns), share_text(incident.share),
    )  # fmt: skip
    x = _put_cells(canvas, y, cells, [style, "strong" if plain == "text" else plain, *[plain] * 5])
    canvas.put(0, y, "▶" if selected else " ", "warn")
    sign, colour = (
        ("✗", style)
        if incident.kind == "death" and row.when == "over"
        else _WHEN["to the end" if row.when == "now" and ended else row.when]
    )
    canvas.put(2, y, sign, style if row.when == "now" else colour)
    if canvas.width >= _WIDE:  # else the details have it
        for line in wrap(shorten_name(message_text(incident), 400), canvas.width - x - 3, 1):
            canvas.put(x + 2, y, line, plain)


def _phases(incident: Incident) -> str:
    """Names the phase, or those that only together explain why a rank is late."""
    phases = [incident.phase] if incident.phase else [*(incident.evidence.parts_ms or {})][:2]
    return " + ".join(PHASE_NAMES.get(phase, phase) for phase in phases)


def _ranks(ranks: Sequence[int]) -> str:
    return spans(sorted(ranks)) if ranks else "all"


def _paint_details(canvas: Canvas, row: ListedIncident, y: int, unit: str, ended: bool) -> None:
    """Paints everything known of one incident."""
    incident, width = row.incident, canvas.width
    canvas.fill(0, width, y, " ", "heading")
    title = f"{KINDS[incident.kind].name}, {_when(row, ended)}"
    cost = f": cost {cost_text(incident, unit)}"
    brief = f": cost {share_text(incident.share)} of all ranks' time"
    end = next((text for text in (cost, brief) if len(title + text) <= width - 2), "")
    canvas.put(1, y, shorten(title + end, width - 2), "heading-strong")
    lines = [(line, style_of(incident)) for line in wrap(shorten_name(incident.message, 400), width - 2, 3)]
    if incident.gain:
        would = "a step would be" if incident.open and not ended else "its steps would have been"
        lines.append((f"{without(incident)}, {would} {share_text(incident.gain)} shorter", "text"))
    cause = shorten_name(incident.device and f"cause: {incident.device}", 400)
    lines += [(line, "warn") for line in wrap(cause, width - 2, 2)]
    step = on_screen(incident.next_step, in_log=True)
    then = shorten_name(step and f"next: {step}", 400)
    lines += [(line, "strong") for line in wrap(then, width - 2, 3)]
    lines += [(_end_of(line, width - 2), "text") for line in stack_lines(incident.ranks, incident.evidence)]
    lines += [(line, "dim") for line in flow(_evidence(incident), width - 2, 4)]
    shown = [(text, style) for text, style in lines if text]
    for at, (text, style) in enumerate(shown[: max(canvas.height - y - 1, 0)], start=y + 1):
        canvas.put(1, at, text, style)


def _when(row: ListedIncident, ended: bool) -> str:
    """Returns whether it is ongoing, and in which steps it was."""
    since = row.incident.since_step
    if row.when == "later":
        return "later than the position"
    if row.incident.kind == "death" and since is not None:
        return f"at step {since}"
    if row.when == "now" and ended:
        return "ongoing at the end" if since is None else f"from step {since} to the end"
    if row.when == "now":
        return "ongoing" if since is None else f"ongoing since step {since}"
    steps = steps_text(row.incident)
    return "over" if since is None else f"over, {'steps' if '–' in steps else 'step'} {steps}"


def _evidence(incident: Incident) -> list[str]:
    found = evidence_sentences(incident.evidence, incident.steps, incident.occurrences)
    return [shorten_name(text, 200) for text in found]


def _end_of(line: str, width: int) -> str:
    """Returns a call with the end of its path, which says more than the start."""
    name = shorten_name(line.lstrip(), 400)
    lead = " " * (len(line) - len(line.lstrip()))
    return lead + (name if len(lead + name) <= width else f"…{name[len(lead + name) - width + 1 :]}")


# -- the strip -----------------------------------------------------------------------------------------------


def paint_strip(canvas: Canvas, cells: Sequence[Incident | None], x: int, y: int, wide: int = 1) -> None:
    """Paints a cell per step: the letter of the worst incident there."""
    for column, incident in enumerate(cells):
        if incident is not None:
            glyph, style = letter(incident)
            canvas.fill(x + wide * column, x + wide * (column + 1), y, glyph, style)


def strip_legend(cells: Iterable[Incident | None], width: int) -> Row:
    """Returns what the letters in a strip mean: as many kinds as fit, none without its name."""
    texts = strip_names(cells)
    return [(text, "heading") for text, _ in fit([Field(text, text, 1) for text in texts if len(text) <= width], width)]


def strip_names(cells: Iterable[Incident | None]) -> list[str]:
    """Returns each letter of a strip with its kind's name."""
    kinds = {incident.kind: incident for incident in cells if incident is not None}
    return [f"{letter(found)[0]} {KINDS[kind].name}" for kind, found in kinds.items()]
