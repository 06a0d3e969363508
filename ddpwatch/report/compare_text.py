"""A comparison of runs as text: figures side by side, then a sentence for each difference."""

from __future__ import annotations

from typing import Any

from ddpwatch.report.format import clean, number, percent, table


def render_compare(result: dict[str, Any]) -> str:
    """The result of `ddpwatch.report.build.compare_recordings` as text."""
    runs = result["runs"]
    rows = [["steps", *(str(run["steps"]) for run in runs)], ["step ms", *(number(run["step_ms_p50"]) for run in runs)]]
    rows += [
        [f"  {phase}", *(number(run["phases_ms_p50"][phase]) for run in runs)]
        for phase in (runs[0]["phases_ms_p50"] if runs else ())
    ]
    rows.append(["overlap", *(percent(run["overlap_p50"]) for run in runs)])
    lines = table(["p50", *(clean(run["name"]) for run in runs)], [list(row) for row in rows])
    return "\n".join([*lines, "", *(clean(found["text"]) for found in result["differences"])])
