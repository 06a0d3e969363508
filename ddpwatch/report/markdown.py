"""The report as Markdown, for a ticket or a pull request."""

from __future__ import annotations

import re

from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.figures import Report
from ddpwatch.common.text import clean, counted
from ddpwatch.report import incidents as worst
from ddpwatch.report.headline import exposed_sentence, goodput_sentence, step_sentence, throughput_sentence
from ddpwatch.report.lost import account_table, bar, lost_sentence
from ddpwatch.report.tables import Table, tables

BAR_WIDTH = 60
_OMITTED = ("ready ms",)  # so that a table fits into a page
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~@!])")


def render_markdown(report: Report) -> str:
    """Returns the report's figures, incidents and notes, with names escaped so that none of them acts as markup."""
    run, steps = report.run, report.steps
    lines = [
        f"## {plain(run.id or 'run')}",
        "",
        f"{plain(run.model or '?')} on {counted(run.world_size or None, 'rank')} ({plain(run.backend or '?')}, torch "
        f"{plain(run.torch or '?')}); {counted(steps.count, 'step')}, of these {steps.warmup} warm-up and "
        f"{steps.aborted} aborted.",
        "",
        f"- {plain(step_sentence(report))}",
        f"- {plain(exposed_sentence(report))}",
        *(f"- {plain(text)}" for text in (throughput_sentence(report), goodput_sentence(report)) if text),
        "",
        *_lost(report),
        "### Incidents",
        "",
        *_incidents(report),
        "",
        *_notes(report),
    ]
    for table in tables(report, omit=_OMITTED):
        lines += _table(table)
    return "\n".join(lines).rstrip()


def _lost(report: Report) -> list[str]:
    sentence = lost_sentence(report)
    if not sentence:
        return []
    drawn = [f"    {line}" for line in bar(report.lost, BAR_WIDTH)]
    return [f"**{plain(sentence)}**", "", *drawn, "", *_table(account_table(report))]


def _incidents(report: Report) -> list[str]:
    found, more = worst.shown(report.incidents)
    lines = [f"**Verdict**: {plain(report.verdict.text)}", ""]
    if advice := worst.advice(report, found):
        lines += [f"Next: {plain(advice)}", ""]
    for row in found:
        facts = plain(worst.facts(row, report))
        lines.append(f"- **{KINDS[row.kind].name}** ({row.severity}): {plain(row.message)} · {facts}")
        lines += [f"  - {plain(line.strip())}" for line in worst.lines_below(row)]
    return [*lines, *([f"- {more}"] if more else [])]


def _notes(report: Report) -> list[str]:
    notes = [f"- **{note.severity}**: {plain(note.message)}" for note in report.notes or ()]
    return ["### Notes", "", *notes, ""] if notes else []


def plain(text: str) -> str:
    """Returns the text with markup escaped, on one line."""
    return _SPECIAL.sub(r"\\\1", clean(text).replace("\n", " "))


def _table(table: Table) -> list[str]:
    rows = [[plain(cell) for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in [table.header, ["--:"] * len(table.header), *rows]]
    return [f"### {plain(table.title)}", "", *lines, ""]
