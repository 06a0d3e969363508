"""Histories of runs as text: a sentence, a chart of the step times, a row for each run."""

from __future__ import annotations

from datetime import datetime
from textwrap import shorten

from ddpwatch.analysis.figures import GoodputFigures
from ddpwatch.analysis.goodput import goodput
from ddpwatch.analysis.history import PastRun, RunHistory
from ddpwatch.analysis.throughput import throughput_text
from ddpwatch.common.text import UNKNOWN, clean, counted, number, percent
from ddpwatch.common.text import table as text_table
from ddpwatch.report.terminal_charts import FEWEST_POINTS, chart

_HEADER = ["started", "commit", "step p50 ms", "steps", "throughput", "lost", "goodput", "recording"]
MOST_WORST = 80  # characters of an incident


def goodput_of(run: PastRun) -> GoodputFigures | None:
    """Returns that of the run alone."""
    return None if run.time is None else goodput([(run.run, run.time)])


def render_history(history: RunHistory, width: int | None = None) -> str:
    """Returns the history of one script with one setup. ``width``: of the chart, in columns; None for no chart."""
    parameters = f", {history.parameters:,} parameters" if history.parameters else ""
    runs = counted(len(history.runs), "run")
    head = f"{history.script}, {counted(history.ranks, 'rank')}, {history.device}{parameters}: {runs}"
    verdicts = {change.b: change.verdict for change in history.changes}
    rows = [
        [
            datetime.fromtimestamp(run.started).strftime("%Y-%m-%d %H:%M"),
            run.commit,
            number(run.step_ms),
            str(run.steps),
            throughput_text(run.throughput) or UNKNOWN,
            percent(run.lost, 1),
            percent(None if (found := goodput_of(run)) is None else found.ratio, 1),
            clean(run.path.rpartition("/")[2]),
        ]
        for run in history.runs
    ]
    lines = text_table(_HEADER, rows)
    for place, run in enumerate(history.runs, 1):
        said = [part for part in (verdicts.get(run.path, ""), run.worst) if part]
        lines[place] += f"  {shorten(clean('; '.join(said)), MOST_WORST, placeholder=' …')}" if said else ""
    timed = [(float(place), run.step_ms) for place, run in enumerate(history.runs, 1) if run.step_ms is not None]
    drawn = []
    if width is not None and len(timed) >= FEWEST_POINTS:
        drawn = ["", chart("median step time (ms) by run", [x for x, _ in timed], [y for _, y in timed], width)]
    return "\n".join([clean(head), clean(history.text), *drawn, "", *lines])
