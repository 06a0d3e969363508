"""The header's two lines, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.account_names import timed_by
from ddpwatch.analysis.diagnosis.words.incident_news import cost_text, share_with_stuck
from ddpwatch.analysis.diagnosis.words.lost_time import LEAST_SHARE, share_text
from ddpwatch.analysis.diagnosis.words.next_steps import on_screen
from ddpwatch.analysis.diagnosis.words.verdict import MOST_OTHERS
from ddpwatch.analysis.throughput import throughput_text
from ddpwatch.common.text import UNKNOWN, counted, ms, percent, plus_minus, size, three_digits, with_unit
from ddpwatch.recording.seek import duration_text
from ddpwatch.sampling.cost import NO_COST
from ddpwatch.tui.models.history import NEW_STEPS, SPARK_STEPS
from ddpwatch.tui.models.incidents import covers
from ddpwatch.tui.models.overview import Link, LinkState, Overview
from ddpwatch.tui.models.verdict_facts import VerdictFacts
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.lost import lost_line
from ddpwatch.tui.paint.screen_layout import WIDE
from ddpwatch.tui.paint.spark import sparkline
from ddpwatch.tui.text import Field, fit, fits, shorten, shorten_host, shorten_name, wrap
from ddpwatch.version import untested

SIGNS: dict[str, tuple[str, str]] = {
    "none": ("·", "dim"),
    "ok": ("✓", "good"),
    "info": ("·", "text"),
    "warn": ("!", "warn"),
    "bad": ("✗", "bad"),
}
_ROOMY = 100
_SPACIOUS = 150
MOST_VERDICT_ROWS = 5
MOST_NEXT_ROWS = 2
SPARK_CELLS = (SPARK_STEPS, 12, 8, 5)


def paint_header(model: Overview, width: int, height: int = 2) -> list[Row]:
    """Returns the run's identity and state on the first line, the figures that matter most on the second."""
    canvas = Canvas(width, height)
    for y in range(canvas.height):
        canvas.fill(0, width, y, " ", "heading")
    badge, style = badge_of(model)
    x = canvas.put(0, 0, shorten(f" {badge} ", width), style) + 1
    step = step_text(model) if width >= _ROOMY else _crowded(model, width)
    canvas.put_runs(x, 0, _headed(fit(_identity(model), max(width - x - len(step) - 3, 0))))
    if width - len(step) - 1 > x:
        canvas.put(width - len(step) - 1, 0, step, "heading-strong")
    canvas.put_runs(1, 1, _headed(_figures_line(model, width)))
    return canvas.rows()


def _headed(runs: Row) -> Row:
    """Returns the same texts on the header's background."""
    return [(text, "heading" if style == "text" else f"heading-{style}") for text, style in runs]


def badge_of(model: Overview) -> tuple[str, str]:
    """Returns the state of the feed in a word or two, and its style."""
    link = model.link
    if link.link is Link.REPLAY:
        speed = f"{link.speed:g}×"
        return (f"REPLAY {speed} PAUSED", "badge-paused") if link.paused else (f"REPLAY {speed}", "badge-replay")
    if link.link is Link.ENDED:
        return _ended_badge(model)
    if link.link is Link.SEEKING:
        return "REPLAY SEEKING", "badge-wait"
    if link.paused:
        return "PAUSED", "badge-paused"
    return {
        Link.WAITING: ("WAITING", "badge-wait"),
        Link.ATTACHING: ("ATTACHING", "badge-wait"),
        Link.LIVE: ("LIVE", "badge-live"),
        Link.GONE: ("NOT CONNECTED" if link.trouble else "COLLECTOR GONE", "badge-bad"),
    }[link.link]


def _ended_badge(model: Overview) -> tuple[str, str]:
    if model.link.ended_min is not None:
        return _last_run_badge(model, model.link.ended_min)
    what = "REPLAY ENDED" if model.link.replay else "ENDED"
    if model.end is None:
        return what, "badge-ended"
    bad = model.end.reason != "finished"
    return f"{what}: {model.end.reason}", "badge-bad" if bad else "badge-ended"


def _last_run_badge(model: Overview, minutes: int) -> tuple[str, str]:
    """Returns a run that had ended before the dashboard started."""
    how = "ended" if model.end is None or model.end.reason == "finished" else model.end.reason
    when = "just now" if minutes < 1 else f"{minutes} min ago" if minutes < 120 else f"{minutes // 60} h ago"
    return f"LAST RUN, {how} {when}", "badge-bad" if how != "ended" else "badge-ended"


def step_text(model: Overview) -> str:
    """Returns the newest step, in a hang that in which ranks stand still; during a pause the step shown, too."""
    newest, incident = model.newest_step, model.verdict.incident
    if newest is None:
        return ""
    if model.standstill_ns is not None and incident is not None and incident.kind == "hang":
        newest = max(newest, incident.since_step or 0)
    if not model.link.paused:
        return f"step {newest}"
    shown = model.lanes.step if model.lanes else newest
    return f"step {shown} of {max(shown, newest)} (paused)"


def _crowded(model: Overview, width: int) -> str:
    """Returns the first line's right end on a screen whose second line has no room for all figures."""
    room = min(width - len(step_text(model)) - 48, 24)  # 24: in short
    extra = fit([field for field in _health(model) if len(field.short) <= room], room)
    return "".join(text for text, _ in extra) + "  " + step_text(model)


def _identity(model: Overview) -> list[Field]:
    hello, world = model.hello, model.world_size
    fields = [_name(shorten_name(model.run_id, 40))]
    if model.link.trouble:
        fields.append(Field(shorten_name(model.link.trouble, 160), shorten_name(model.link.trouble, 40), 1, "warn"))
    if model.link.replay:
        fields.append(_position(model.link))
    if model.filter:
        fields.append(_filtered(model))
    if model.unseen:
        count = len(model.unseen)
        fields.append(Field(f"{counted(count, 'rank')} unseen", f"{count} unseen", 0, "warn"))
    if model.off:
        fields.append(Field(shorten_name(model.off, 80), shorten_name(model.off, 24), 1, "warn"))
    if model.following:
        fields.append(Field("follows the slowest rank", "follows slowest", 1, "warn"))
    if model.status is not None and model.status.whole:
        fields.append(Field(f"this host only: {shorten_name(model.status.whole, 80)}", "this host only", 1, "warn"))
    if hello is None:
        return fields
    ranks = counted(world, "rank")
    source = shorten_name(timed_by(hello.timing_source), 12)
    parallel = shorten_name(model.parallelism, 32)
    fields += [_plain(shorten_name(hello.script, 32), 3)]
    fields += [Field(f"{ranks}: {parallel}", parallel, 1) if parallel else _plain(ranks, 1)]
    fields += [_plain(shorten_name(hello.backend, 12), 2)]
    fields += [
        _sampling(model),
        Field(f"timed by {source}", source, 4),
        Field(f"{shorten_name(hello.module, 24)}, {three_digits(hello.parameters / 1e6)} M parameters", "", 6),
        _torch(shorten_name(hello.torch, 16)),
        _recording(model),
        _restarts(model),
    ]
    return fields


def _torch(torch: str) -> Field:
    """Returns its version. One that is not tested stays as long as there is room for any warning."""
    if beyond := untested(torch):
        return Field(f"torch {torch}, {beyond}", "torch untested", 3, "warn")
    return Field(f"torch {torch}" if torch else "", "", 7)


def _restarts(model: Overview) -> Field:
    """Returns how often the collector was started again, and what that cost."""
    restarts = 0 if model.status is None else model.status.restarts
    if not restarts:
        return Field("", "", 5)
    missing = UNKNOWN if model.missing_steps is None else str(model.missing_steps)
    return Field(f"collector restarts: {restarts}, {missing} steps missing", f"{missing} steps missing", 2, "warn")


def _position(link: LinkState) -> Field:
    """Returns a replay's position and length."""
    text = f"{duration_text(link.position_s)}/{duration_text(link.length_s)}{' loop' if link.loop else ''}"
    return Field(text, text, 0)


def _filtered(model: Overview) -> Field:
    shown = f"{len(model.ranks)} shown"
    full, short = shorten_name(model.filter, 24), shorten_name(model.filter, 8)
    return Field(f"filter {full}: {shown}", f"/{short}: {shown}", 0, "warn")


def _recording(model: Overview) -> Field:
    """Returns the recording's size while it grows, or its error."""
    status = model.status
    if status is None or not status.recording:
        return Field("", "", 5)
    if status.recording_error:
        return Field(f"recording: {shorten_name(status.recording_error, 60)}", "recording incomplete", 0, "bad")
    if model.ended or model.link.replay:  # it has grown since
        return Field("recorded", "rec", 5)
    return Field(f"recording {size(status.recording_bytes)}" if status.recording_bytes is not None else "", "rec", 5)


def _name(text: str) -> Field:
    return Field(text, shorten(text, 24), 0, "strong")


def _plain(text: str, priority: int) -> Field:
    return Field(text, text, priority)


def _figures_line(model: Overview, width: int) -> Row:
    """Returns the figures, with sparklines as long as there is room for; the overhead gives way to them."""
    room = max(width - 2, 0)
    for cells in SPARK_CELLS:
        fields = _figures(model, width, cells)
        if fits(fields, room):
            explained = [*fields[:-1], _cost(model, f" ({NO_COST})")] if width >= _ROOMY else fields
            return fit(explained if fits(explained, room) else fields, room)
    fields = _figures(model, width, SPARK_CELLS[-1])
    kept = fields[:-1] if width >= _ROOMY else fields
    return fit(fields if fits(kept, room, short=True) else _figures(model, width, 0), room)


def _figures(model: Overview, width: int, cells: int) -> list[Field]:
    summary = model.summary
    newest = [point for point in model.history[-NEW_STEPS:] if point.complete]
    share = summary.exposed_ns / summary.step_ns if summary.exposed_ns is not None and summary.step_ns else None
    step, rate = with_unit(ms(summary.step_ns), "ms"), with_unit(three_digits(summary.rate), "it/s")
    known = summary.estimate
    overlap, exposed = f"overlap {percent(known.overlap)}", f"exposed {with_unit(ms(known.exposed_ns), 'ms')}"
    surely = f"exposed {with_unit(plus_minus(ms(known.exposed_ns), ms(known.exposed_reach_ns)), 'ms')}"
    if known.too_few:
        surely = f"{exposed} (too few steps)"
    # The slowest rank waits for nobody, so that the mean is less than what the others wait.
    whose = ", mean of ranks" if model.slowest is not None and width >= _SPACIOUS else ""
    in_full, in_short = (f" ({percent(share)} of step{whose})", f" {percent(share)}") if share is not None else ("", "")
    of_steps, of_timed = (("faint" if is_old else "strong") for is_old in model.stale)
    style = "faint" if model.stale.timed else "text" if share is None or share < 0.1 else "warn"
    return [
        Field(f"step {step}", f"step {step}", 0, of_steps, _spark([point.step_ns for point in newest], cells)),
        Field(rate, rate, 3, of_steps) if model.standstill_ns is None else _standstill(model.standstill_ns),
        *_throughput(model, of_steps),
        Field(overlap, overlap, 1, of_timed, _spark([point.overlap for point in newest], cells, 1.0)),
        Field(surely + in_full, exposed + in_short, 1, style, _spark([point.exposed_ns for point in newest], cells)),
        _slowest(model, _spark([point.late_ns for point in newest], cells)),
        *(_health(model) if width >= _ROOMY else ()),
    ]


def _throughput(model: Overview, style: str) -> list[Field]:
    """Returns what the job gets done, if that is known and it goes on."""
    text = throughput_text(model.throughput) if model.standstill_ns is None else ""
    return [Field(text, text.partition(",")[0], 2, style)] if text else []


def _standstill(ns: int) -> Field:
    """Says for how long no step came, instead of a rate that no longer holds."""
    text = f"no step for {ns / 1e9:.0f} s"
    return Field(text, text, 0, "bad")


def _health(model: Overview) -> list[Field]:
    """Returns how many messages are lost, if any, and the overhead."""
    lost = counted(model.dropped, "lost message")
    return [*([Field(lost, f"lost {model.dropped}", 4, "bad")] if model.dropped else []), _cost(model)]


def _sampling(model: Overview) -> Field:
    """Returns how many of the newest steps are timed in full."""
    full, steps = model.summary.estimate.full, model.summary.estimate.steps
    if not steps:
        return Field("", "", 2)
    return Field(f"{full} of the newest {steps} steps timed in full", f"{full} of {steps} steps in full", 2)


def _cost(model: Overview, why: str = "") -> Field:
    """Returns the overhead, with half of its interval; if it is not known, why."""
    cost = model.cost
    if cost is None:
        return Field(f"overhead {UNKNOWN}{why}", f"overhead {UNKNOWN}", 5)
    interval = f"±{50 * (cost.high - cost.low):.2f}"
    return Field(f"overhead {100 * cost.ratio:.2f} {interval} %", f"overhead {percent(cost.ratio, 1)}", 5)


def _spark(values: Sequence[float | None], cells: int, top: float | None = None) -> str:
    """Returns the newest known values, one cell each; a median value is three quarters high."""
    known = [value for value in values if value is not None][-cells:] if cells else []
    return sparkline(known, cells, top or median(known) * 4 / 3).lstrip() if known else ""


def _slowest(model: Overview, spark: str) -> Field:
    slowest = model.slowest
    if slowest is None:
        return Field(f"slowest rank {UNKNOWN}", f"slowest {UNKNOWN}", 2, spark=spark)
    rank, late = slowest.ranks[0], f"+{three_digits(slowest.evidence.late_ms)} ms"
    return Field(f"slowest rank {rank} {late}", f"rank {rank} {late}", 2, "bad", spark)


def paint_verdict(model: Overview, width: int, height: int) -> list[Row]:
    """Returns the verdict, wrapped to the height, and below it what there is room for: `line_below`, `next_lines`."""
    canvas = Canvas(width, height)
    sign, style = SIGNS[model.verdict.severity]
    canvas.put(1, 0, sign, style)
    lines = verdict_lines(model, width, min(height, MOST_VERDICT_ROWS))
    for y, line in enumerate(lines):
        canvas.put(3, y, line, style if model.verdict.severity in ("warn", "bad") else "text")
    below = line_below(model, width)
    canvas.put_runs(3, len(lines), below)
    for y, line in enumerate(next_lines(model, width), start=len(lines) + bool(below)):
        canvas.put(3, y, line, "strong")
    return canvas.rows()


def verdict_lines(model: Overview, width: int, most: int = MOST_VERDICT_ROWS) -> list[str]:
    """Returns the verdict, wrapped to the width, with as many of the other incidents as a second row has room for."""
    found, kind = model.verdict, "hang: " if model.verdict.kind == "hang" else ""
    lines = wrap(shorten_name(kind + found.text, 400), width - 4, most)
    for others in range(min(len(found.others), MOST_OTHERS), 0, -1):
        longer = wrap(shorten_name(kind + found.with_others(others), 600), width - 4, most + 1)
        if len(longer) <= min(max(len(lines), 2), most):
            return longer
    return lines


def next_lines(model: Overview, width: int) -> list[str]:
    """Returns what to do next, wrapped to the width."""
    text = shorten_name(on_screen(model.verdict.next_step, model.in_log), 400)
    clauses = text.split("; ") if text else []
    for count in range(len(clauses), 1, -1):
        lines = wrap(f"next: {'; '.join(clauses[:count])}", width - 4, MOST_NEXT_ROWS + 1)
        if len(lines) <= MOST_NEXT_ROWS:
            return lines
    return wrap(f"next: {clauses[0]}", width - 4, MOST_NEXT_ROWS) if clauses else []


def line_below(model: Overview, width: int) -> Row:
    """Returns more on the verdict's incident; without one, the lost time, unless a panel or the verdict says it."""
    if model.facts is not None:
        return fit(_facts(model, model.facts), width - 4)
    said = width >= WIDE or model.verdict.kind == "lost"
    text = "" if said else lost_line(model, width - 4)
    return [(text, "dim")] if text else []


def _lasted(ns: int) -> str:
    seconds = ns / 1e9
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "less than 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _facts(model: Overview, facts: VerdictFacts) -> list[Field]:
    hangs = model.verdict.incident is not None and model.verdict.incident.kind == "hang"
    where = shorten_host(facts.host, 32) + (f", pid {facts.pid}" if facts.pid is not None else "")
    key = "7: stacks" if hangs else _details(model)
    fields = [
        _since(facts, ended=model.ended),
        _cost_of(facts.incident, model.diagnosed.unit, 4 if hangs else 2, final=model.ended or model.diagnosed.whole),
        Field(where, where, 3),
    ]
    known = [field for field in fields if field.full]  # the key alone is in the footer, too
    return [*known, Field(key, key, 5 if not hangs else 2, "dim")] if known else []


def _details(model: Overview) -> str:
    """Returns the key for more, and how many incidents the verdict is chosen from."""
    found = model.diagnosed
    ongoing = [] if model.ended else [one for one in found.incidents if one.open and one.counts]
    if found.whole:  # which may start later than the position
        ongoing = [one for one in ongoing if covers(one, model.newest_step or 0, model.now_ns)]
    return f"7: {len(ongoing)} ongoing" if len(ongoing) > 1 else "7: details"


def _since(facts: VerdictFacts, ended: bool) -> Field:
    """Returns when the incident started and, while the run goes on, how long ago that was."""
    incident = facts.incident
    if incident is None or incident.since_step is None or incident.kind in ("hang", "death"):  # the sentence says when
        return Field("", "")
    if ended:
        return Field(f"from step {incident.since_step} to the end", f"from step {incident.since_step}", 1, "strong")
    since = f"since step {incident.since_step}"
    lasts = f", for {_lasted(facts.lasts_ns)}" if facts.lasts_ns is not None else ""
    return Field(since + lasts, since, 1, "strong")


def _cost_of(incident: Incident | None, unit: str, priority: int, final: bool) -> Field:
    if incident is None or (incident.share or 0.0) < LEAST_SHARE:
        return Field("", "")
    until = "so far" if incident.open and not final else "in all"
    lost = share_with_stuck(incident)
    brief = f"{'cost' if lost is None else 'lost'} {until} {share_text(lost or incident.share)} of all ranks' time"
    return Field(f"cost {until} {cost_text(incident, unit)}", brief, priority)
