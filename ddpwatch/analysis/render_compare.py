"""A comparison of runs as text: figures side by side, and the verdict in words."""

from __future__ import annotations

from typing import Any

from ddpwatch.analysis.render import number, percent, table
from ddpwatch.analysis.text import clean


def render_compare(result: dict[str, Any]) -> str:
    """What `ddpwatch.reporting.compare_recordings` found."""
    runs = result["runs"]
    rows = [["steps", *(str(run["steps"]) for run in runs)], ["step ms", *(number(run["step_ms"]) for run in runs)]]
    rows += [
        [f"  {part}", *(number(run["parts_ms"][part]) for run in runs)]
        for part in (runs[0]["parts_ms"] if runs else ())
    ]
    rows.append(["overlap", *(percent(run["overlap"]) for run in runs)])
    lines = table(["p50", *(clean(run["name"]) for run in runs)], [list(row) for row in rows])
    return "\n".join([*lines, "", *(clean(found["text"]) for found in result["differences"])])
