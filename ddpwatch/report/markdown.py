"""The report as Markdown, for a ticket or a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ddpwatch.analysis.diagnosis.findings import describe_death
from ddpwatch.report.format import clean, number, percent, size

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~@!])")


def render_markdown(report: dict[str, Any]) -> str:
    """The report's figures and findings; names are escaped, so that none of them is taken for markup."""
    run, steps, overlap = report["run"], report["steps"], report["overlap"]
    lines = [
        f"## {plain(run['id'] or 'run')}",
        "",
        f"{plain(run['model'] or '?')} on {run['world_size'] or '–'} ranks ({plain(run['backend'] or '?')}, torch "
        f"{plain(run['torch'] or '?')}); {steps['count']} steps, of these {steps['warmup']} warm-up and "
        f"{steps['aborted']} aborted. Median step **{number(steps['step_ms_p50'])} ms** (p90 "
        f"{number(steps['step_ms_p90'])} ms), overlap **{percent(overlap['ratio_p50'])}**, exposed communication "
        f"**{number(overlap['exposed_ms_p50'])} ms**.",
        "",
        "### Findings",
        "",
        *([f"- **{f['severity']}**: {plain(f['message'])}" for f in report["findings"]] or ["Nothing stands out."]),
        "",
        *_split(report),
        *_ranks(report["ranks"]),
        *_buckets(report["buckets"]),
    ]
    return "\n".join(lines).rstrip()


def plain(text: str) -> str:
    """Text without markup."""
    return _SPECIAL.sub(r"\\\1", clean(text).replace("\n", " "))


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["--:"] * len(header), *rows]]
    return [f"### {title}", "", *lines, ""]


def _split(report: dict[str, Any]) -> list[str]:
    whole = report["steps"]["step_ms_p50"]
    if not whole:
        return []
    rows = [[name, number(ms), percent(None if ms is None else ms / whole)] for name, ms in report["phases_ms"].items()]
    return _table("The median step", ["phase", "ms", "share"], rows)


def _ranks(rows: list[dict[str, Any]]) -> list[str]:
    header = ["rank", "host", "steps", "step ms", "late ms", "wait ms", "overlap", "exposed ms", "dropped", "end"]
    cells = [
        [
            str(row["rank"]), plain(row["host"] or "–"), str(row["steps"]), number(row["step_ms_p50"]),
            number(row["late_ms_p50"]), number(row["wait_ms_p50"]), percent(row["overlap_p50"]),
            number(row["exposed_ms_p50"]), str(row["dropped"]), _end(row["end"]),
        ]
        for row in rows
    ]  # fmt: skip
    return _table("Ranks (p50)", header, cells)


def _end(end: dict[str, Any] | None) -> str:
    if end is None:
        return "–"
    return "finished" if end["reason"] == "finished" else plain(describe_death(end))


def _buckets(rows: list[dict[str, Any]]) -> list[str]:
    header = ["bucket", "size", "params", "launch ms", "done ms", "transfer ms", "exposed ms", "busbw GB/s", "last"]
    cells = [
        [
            f"{row['module']}/{row['index']}", size(row["nbytes"]), str(len(row["params"])),
            number(row["launch_ms_p50"]), number(row["done_ms_p50"]), number(row["transfer_ms_p50"]),
            number(row["exposed_ms_p50"]), number(row["busbw_gbps_p50"], 2),
            "–" if row["last_rank"] is None else f"rank {row['last_rank']} {percent(row['last_share'])}",
        ]
        for row in rows
    ]  # fmt: skip
    return _table("Buckets (p50, from the start of the backward)", header, cells)
