"""The report as text for a terminal or a log: aligned columns, units, and a dash for what is unknown."""

from __future__ import annotations

from typing import Any

from ddpwatch.analysis.diagnosis.findings import describe_death
from ddpwatch.report.format import UNKNOWN, clean, number, percent, size, table


def render_report(report: dict[str, Any]) -> str:
    """The report in about as many lines as it has ranks and buckets."""
    sections = [_head(report), _split(report), _ranks(report["ranks"]), _buckets(report["buckets"]), _findings(report)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(report: dict[str, Any]) -> list[str]:
    run, steps, overlap = report["run"], report["steps"], report["overlap"]
    hosts = ", ".join(clean(host) for host in run["hosts"]) or UNKNOWN
    source = clean(run["timing_source"] or UNKNOWN)
    lines = [
        f"{clean(run['id'] or 'run')}: {clean(run['model'] or '?')} on {run['world_size'] or UNKNOWN} ranks "
        f"({clean(run['backend'] or '?')}, torch {clean(run['torch'] or '?')}, {hosts}), times from {source} stamps",
        f"{steps['count']} steps ({steps['warmup']} warm-up, {steps['aborted']} aborted, {steps['shadow']} shadow, "
        f"{steps['unwatched']} unwatched), "
        f"p50 {number(steps['step_ms_p50'])} ms, p90 {number(steps['step_ms_p90'])} ms",
        f"overlap {percent(overlap['ratio_p50'])}, communication {number(overlap['comm_ms_p50'])} ms, "
        f"of that exposed {number(overlap['exposed_ms_p50'])} ms (p50 over ranks and steps)",
    ]
    if (cost := report["cost"])["ratio"] is not None:
        lines.append(
            f"watching cost {percent(cost['ratio'], 2)} of the step (95 % interval {percent(cost['low'], 2)} to "
            f"{percent(cost['high'], 2)}, from {cost['pairs']} comparisons with unwatched steps)"
        )
    recording = report.get("recording")
    if recording:
        cut = ", cut off at the end" if recording["cut_tail"] else ""
        if (parts := recording.get("parts", 1)) > 1:
            cut += f", {parts} files"
        lines.append(
            f"recording: {recording['frames']} frames, {size(recording['bytes'])}, {recording['seconds']:.1f} s{cut}"
        )
        lines += [f"note: {clean(note)}" for note in recording.get("notes", ())]
    return lines


def _split(report: dict[str, Any]) -> list[str]:
    phases, whole = report["phases_ms"], report["steps"]["step_ms_p50"]
    if not whole:
        return []
    rows = [[name, number(ms), percent(None if ms is None else ms / whole)] for name, ms in phases.items()]
    return ["The median step", *table(["phase", "ms", "share"], rows)]


def _ranks(rows: list[dict[str, Any]]) -> list[str]:
    header = [
        "rank",
        "host",
        "steps",
        "step ms",
        "late ms",
        "wait ms",
        "overlap",
        "exposed ms",
        "dropped",
        "own cost",
        "end",
    ]
    cells = [
        [
            str(row["rank"]), clean(row["host"] or UNKNOWN), str(row["steps"]), number(row["step_ms_p50"]),
            number(row["late_ms_p50"]), number(row["wait_ms_p50"]), percent(row["overlap_p50"]),
            number(row["exposed_ms_p50"]), str(row["dropped"]), percent(row["own_cost_ratio"], 2), _end(row["end"]),
        ]
        for row in rows
    ]  # fmt: skip
    return ["Ranks (p50)", *table(header, cells)] if rows else []


def _end(end: dict[str, Any] | None) -> str:
    if end is None:
        return UNKNOWN
    return "finished" if end["reason"] == "finished" else clean(describe_death(end))


def _buckets(rows: list[dict[str, Any]]) -> list[str]:
    header = [
        "bucket",
        "size",
        "params",
        "ready ms",
        "launch ms",
        "done ms",
        "transfer ms",
        "exposed ms",
        "busbw",
        "last",
    ]
    cells = [
        [
            str(row["index"]) if row["module"] == 0 else f"{row['module']}/{row['index']}", size(row["nbytes"]),
            str(len(row["params"])), number(row["ready_ms_p50"]), number(row["launch_ms_p50"]),
            number(row["done_ms_p50"]), number(row["transfer_ms_p50"]), number(row["exposed_ms_p50"]),
            number(row["busbw_gbps_p50"], 2, " GB/s"), _last(row),
        ]
        for row in rows
    ]  # fmt: skip
    return ["Buckets (p50, from the start of the backward)", *table(header, cells)] if rows else []


def _last(row: dict[str, Any]) -> str:
    return UNKNOWN if row["last_rank"] is None else f"rank {row['last_rank']} {percent(row['last_share'])}"


def _findings(report: dict[str, Any]) -> list[str]:
    found = report["findings"]
    if not found:
        return ["Findings", "nothing stands out"]
    return ["Findings", *(f"[{finding['severity']}] {clean(finding['message'])}" for finding in found)]
