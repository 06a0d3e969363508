"""A comparison of runs as text: figures side by side, then for each difference a sentence, lost time and incidents."""

from __future__ import annotations

from ddpwatch.analysis.compare import RunComparison, RunDifference
from ddpwatch.analysis.diagnosis.words.account_names import account_in_phase, phase_name
from ddpwatch.common.text import UNKNOWN, clean, number, percent, table
from ddpwatch.report.headline import exposed_parts
from ddpwatch.report.incidents import named

MOST_ACCOUNTS = 5
MOST_INCIDENTS = 10
LEAST_CHANGE = 0.001  # of the rank-time


def render_compare(result: RunComparison) -> str:
    """Returns the result of `ddpwatch.report.build.compare_recordings` as text."""
    runs = result.runs
    rows = [["steps", *(str(run.steps) for run in runs)], ["step ms", *(number(run.step_ms) for run in runs)]]
    rows += [
        [f"  {phase_name(phase)}", *(number(run.phases_ms[phase]) for run in runs)]
        for phase in (runs[0].phases_ms if runs else ())
    ]
    parts = [exposed_parts(run.overlap) for run in runs]
    for name in ("waiting", "transfer", "waiting or transfer"):
        if any(name in of_run for of_run in parts):
            rows.append([f"exposed: {name}", *(of_run.get(name, UNKNOWN) for of_run in parts)])
    rows.append(["overlap", *(percent(run.overlap.ratio) for run in runs)])
    rows.append(["step p50 ms", *(number(run.step_ms_p50) for run in runs)])
    rows.append(["lost", *(percent(run.lost.lost_share, 1) for run in runs)])
    lines = table(["mean", *(clean(run.name) for run in runs)], [list(row) for row in rows])
    for found in result.differences:
        lines += ["", clean(found.text), *_lost(found), *_incidents(found)]
    return "\n".join(lines)


def _lost(found: RunDifference) -> list[str]:
    """Returns the accounts of lost time that changed most."""
    changed = [row for row in found.lost if abs(row.change) >= LEAST_CHANGE][:MOST_ACCOUNTS]
    names = [account_in_phase(row.account, row.rank, row.phase or "") for row in changed]
    return [
        f"  {clean(name)}: {percent(row.a, 1)} of {clean(found.a)}, {percent(row.b, 1)} of {clean(found.b)}"
        for name, row in zip(names, changed, strict=True)
    ]


def _incidents(found: RunDifference) -> list[str]:
    rows = found.incidents
    lines = [
        f"  only {clean(row.run)}: [{row.severity}] {clean(named(row.kind, row.message))}"
        f" ({percent(row.share, 1)} of all ranks' time)"
        for row in rows[:MOST_INCIDENTS]
    ]
    return [*lines, *([f"  … {len(rows) - MOST_INCIDENTS} more"] if len(rows) > MOST_INCIDENTS else [])]
