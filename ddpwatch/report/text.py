"""The report as text for a terminal or a log: aligned columns, units, and a dash for unknown figures."""

from __future__ import annotations

from ddpwatch.analysis.diagnosis.words.account_names import timed_by
from ddpwatch.analysis.figures import Report, StepCounts
from ddpwatch.common.text import UNKNOWN, clean, counted, percent, size, table
from ddpwatch.report import incidents as worst
from ddpwatch.report.headline import exposed_sentence, goodput_sentence, step_sentence, throughput_sentence
from ddpwatch.report.lost import account_table, bar, lost_sentence
from ddpwatch.report.tables import Table, tables
from ddpwatch.sampling.cost import NO_COST
from ddpwatch.sampling.lease import FULL_PPM, detail_name, detail_sentence

BAR_WIDTH = 76
WIDTH = 80  # of a terminal, whose lines wrap: wider tables are folded
NAMED_HOSTS = 4  # more are counted


def render_report(report: Report) -> str:
    """Returns the report, in about as many lines as there are ranks, collectives and incidents."""
    sections = [_head(report), _lost(report), _incidents(report), _notes(report), *map(_table, tables(report))]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def cost_sentence(report: Report) -> str:
    """Returns the overhead, or why it is not known."""
    cost = report.cost
    if cost.ratio is None:
        return f"overhead {UNKNOWN}: {NO_COST}"
    return (
        f"overhead {percent(cost.ratio, 2)} of the step (95 % interval {percent(cost.low, 2)} to "
        f"{percent(cost.high, 2)}, from {cost.pairs} comparisons with steps that are not watched; "
        f"the collector's part: {percent(cost.collector, 2)})"
    )


def chosen_sentence(report: Report) -> str:
    """Returns the recording's detail, which its number of full steps follows from; empty if that is not known."""
    if report.cost.budget is None:
        return ""
    ppm = round(report.cost.budget * FULL_PPM)
    timed = f"{report.steps.full} of {report.steps.averaged} steps were timed in full"
    return f"detail {detail_name(ppm)}: {detail_sentence(ppm, timed)}"


def _parallel(report: Report) -> str:
    return f"{clean(report.run.parallelism)}, " if report.run.parallelism else ""


def _rare(steps: StepCounts) -> str:
    """Returns steps that most jobs have none of."""
    counts = ((steps.unresolved, "unresolved"), (steps.profiled, "profiled"))
    return "".join(f", {count} {what}" for count, what in counts if count)


def _head(report: Report) -> list[str]:
    run, steps = report.run, report.steps
    hosts = ", ".join(clean(host) for host in run.hosts) or UNKNOWN
    if len(run.hosts) > NAMED_HOSTS:
        hosts = f"{len(run.hosts)} hosts"
    source = clean(timed_by(run.timing_source or UNKNOWN))
    lines = [
        f"{clean(run.id or 'run')}: {clean(run.model or '?')} on {counted(run.world_size or None, 'rank')} "
        f"({_parallel(report)}{clean(run.backend or '?')}, torch {clean(run.torch or '?')}, {hosts}), "
        f"timed by {source}",
        f"{counted(steps.count, 'step')}, numbered from 0 "
        f"({steps.warmup} warm-up, {steps.aborted} aborted, {steps.full} timed in full, {steps.shadow} timed in part, "
        f"{steps.unwatched} duration only{_rare(steps)})",
        step_sentence(report),
        exposed_sentence(report),
    ]
    more = (throughput_sentence(report), goodput_sentence(report), cost_sentence(report), chosen_sentence(report))
    lines += map(clean, filter(None, more))
    recording = report.recording
    if recording is not None:
        cut = ", cut off at the end" if recording.cut_tail else ""
        if (parts := recording.parts) > 1:
            cut += f", {parts} files"
        lines.append(f"recording: {recording.frames} frames, {size(recording.bytes)}, {recording.seconds:.1f} s{cut}")
        lines += [f"note: {clean(note)}" for note in recording.notes]
    return lines


def _table(found: Table) -> list[str]:
    return [
        found.title,
        *table(found.header, [[clean(cell) for cell in row] for row in found.rows], WIDTH),
    ]


def _lost(report: Report) -> list[str]:
    sentence = lost_sentence(report)
    if not sentence:
        return []
    drawn = bar(report.lost, BAR_WIDTH)
    return [clean(sentence), *drawn, "", *_table(account_table(report))]


def _incidents(report: Report) -> list[str]:
    """Returns one line for each of the worst incidents, and indented what the line cannot hold."""
    found, more = worst.shown(report.incidents)
    lines = ["Incidents", f"verdict: {clean(report.verdict.text)}"]
    if advice := worst.advice(report, found):
        lines.append(f"    next: {clean(advice)}")
    for row in found:
        lines.append(f"[{row.severity}] {clean(worst.named(row.kind, row.message))} · {worst.facts(row, report)}")
        lines += [f"    {clean(line)}" for line in worst.lines_below(row)]
    return [*lines, *([more] if more else [])]


def _notes(report: Report) -> list[str]:
    found = [f"[{note.severity}] {clean(note.message)}" for note in report.notes or ()]
    return ["Notes", *found] if found else []
