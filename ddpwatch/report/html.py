"""The report as one HTML file: figures, incidents, and a timeline to zoom and click in. It loads no other resource.

Names in a recording come from other machines. They travel as JSON, cleaned by `ddpwatch.common.text.clean`, and
appear on the page only as text. The page's content security policy forbids every connection.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from operator import attrgetter

import msgspec
import numpy as np

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.incident_json import IncidentFigures
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.account_names import timed_by
from ddpwatch.analysis.figures import Report
from ddpwatch.analysis.groups import RoleOf
from ddpwatch.analysis.rank_strips import RankStrips
from ddpwatch.analysis.step import USE_NAMES, BucketKey, bucket_keys, named_stretches
from ddpwatch.analysis.waiting import flights, split_exposed
from ddpwatch.common.text import UNKNOWN, clean
from ddpwatch.report import incidents as worst
from ddpwatch.report.build import Drawn
from ddpwatch.report.headline import tiles
from ddpwatch.report.lost import account_table, bar_parts, lost_sentence
from ddpwatch.report.tables import collective_tables, explanation_table, phase_table, rank_table
from ddpwatch.report.text import chosen_sentence, cost_sentence
from ddpwatch.wire.messages import ALL_REDUCE, OWN_COLLECTIVES, Layout

MOST_RANKS = 64  # of a step
LEAST_RANKS = 4
MOST_HOOKS = 2000  # of a rank in a step
MOST_MARKS = 300_000  # hooks of all steps, or what takes as much room: 5 MB
_MARKS_OF_A_RANK, _MARKS_OF_A_BUCKET = 20, 6  # beside its hooks
_PLACEHOLDER = "/*DATA*/null"


def render_html(report: Report, drawn: Drawn, version: str) -> bytes:
    """Renders the page.

    Args:
        report: From `ddpwatch.report.build.report_of`.
        drawn: Of the same recording.
        version: Of ddpwatch.
    """
    outline, ranks = drawn.outline, rank_table(report)
    details = outline.details()
    shown = [*collective_tables(report), *map(explanation_table, report.explained)]
    data = {
        "report": _cleaned(report.as_json()),
        "timed_by": timed_by(clean(report.run.timing_source or UNKNOWN)),
        "tiles": _cleaned(list(tiles(report).items())),
        "phases": phase_table(report).rows,
        "ranks": _cleaned([ranks.title, ranks.header, ranks.rows]),
        "collectives": _cleaned([(found.title, found.header, found.rows) for found in shown]),
        "lost": _cleaned(_lost(report)),
        "cost": " · ".join(filter(None, (cost_sentence(report), chosen_sentence(report)))),
        "incidents": _cleaned([_incident(row, report) for row in report.incidents]),
        "points": [asdict(point) for point in outline.points],
        "stride": outline.stride,
        "lanes": _strips(drawn.strips),
        "steps": [_step(across.detached(), why, MOST_MARKS // len(details)) for across, why in details],
        "params": _cleaned(_params(drawn.layouts.values())),
        "version": version,
    }
    encoded = msgspec.json.encode(data).decode()
    # Only these characters could end the script element, or start a comment in it.
    safe = encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    safe = safe.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template = files("ddpwatch.report").joinpath("template.html").read_text(encoding="utf-8")
    return template.replace(_PLACEHOLDER, safe, 1).encode()


def _cleaned(value: object) -> object:
    """Returns the same value with every text in it cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, (list, tuple)) else value


def _lost(report: Report) -> dict[str, object]:
    table = account_table(report)
    bar = bar_parts(report.lost)
    return {"sentence": lost_sentence(report), "bar": bar, "header": table.header, "rows": table.rows}


def _incident(row: IncidentFigures, report: Report) -> dict[str, object]:
    kind = KINDS[row.kind].name
    return {
        "kind": kind, "severity": row.severity, "message": row.message,
        "after_kind": worst.named(row.kind, row.message).removeprefix(kind),
        "facts": worst.facts(row, report), "details": worst.details(row), "evidence": worst.evidence(row),
        "next": f"next: {row.next_step}",
        "ranks": row.ranks, "since": row.since_step, "until": row.until_step,
    }  # fmt: skip


def _strips(strips: RankStrips) -> dict[str, object]:
    """Returns the strips, a row of columns per rank, in base64.

    A step of 2^(n / 1024) ns is the 16-bit number n, and a rank that is late for n/254 of its time the 8-bit number
    n + 1; 0 is what is not known.
    """
    steps = np.round(np.log2(np.maximum(strips.longest_ns(), 1)) * 1024).astype("<u2")
    late = np.nan_to_num(1 + np.round(np.clip(strips.late(), 0, 1) * 254), nan=0).astype("u1")
    return {
        "first": strips.first, "stride": strips.stride, "columns": strips.columns, "ranks": strips.ranks,
        "steps": steps.tobytes(), "late": late.tobytes(),
    }  # fmt: skip


def _step(across: StepAcrossRanks, why: str, most_marks: int) -> dict[str, object]:
    ranks = _drawn_ranks(across, most_marks)
    origin = min(map(across.start_of, ranks)) if across.comparable else None
    return {
        "step": across.step,
        "why": why,
        "comparable": across.comparable,
        "cut": _cut(across, len(ranks)),
        "ranks": [_rank(across, rank, origin) for rank in ranks],
    }


def _drawn_ranks(across: StepAcrossRanks, most_marks: int) -> list[int]:
    """Returns the ranks that there is room for, in order: if not all, the latest."""
    steps, late = across.ranks.values(), across.skew.late
    marks = max(min(len(step.hook_ns), MOST_HOOKS) + _MARKS_OF_A_BUCKET * len(step.comm_bytes) for step in steps)
    room = min(MOST_RANKS, max(LEAST_RANKS, most_marks // (marks + _MARKS_OF_A_RANK)))
    return sorted(heapq.nlargest(room, sorted(across.members), key=lambda rank: late.get(rank, 0)))


def _cut(across: StepAcrossRanks, ranks: int) -> str:
    """Returns a note on what of the step is not drawn; empty for nothing."""
    cut = []
    if len(across) > ranks:
        cut.append(f"the {ranks} {'latest' if across.skew.late else 'first'} of {len(across)} ranks")
    if any(len(step.hook_ns) > MOST_HOOKS for step in across.ranks.values()):
        cut.append(f"the first {MOST_HOOKS} hooks of each rank")
    return f"This shows only {' and '.join(cut)}." if cut else ""


def _rank(across: StepAcrossRanks, rank: int, origin: int | None) -> dict[str, object]:
    step, figure = across.ranks[rank], across.figures[rank]
    found = flights(step, across.facts_of(rank), across.skew)
    return {
        "rank": rank,
        "at": 0 if origin is None else across.start_of(rank) - origin,
        "ns": step.duration_ns,
        "epoch": step.epoch,
        "overlap": figure.overlap,
        "exposed_ns": figure.exposed_ns,
        "spans": named_stretches(step),
        "exposed": split_exposed(figure.exposed, found),
        "hooks": list(zip(step.hook_param, step.hook_ns, strict=True))[:MOST_HOOKS],
        "buckets": list(
            zip(map(partial(_named, across.role_of), bucket_keys(step)), step.comm_bytes, step.comm_ready,
                step.comm_launch, step.comm_done, strict=True)
        ),
        "waits": [None if flight is None else (flight.start, flight.transfer, flight.last_rank) for flight in found],
    }  # fmt: skip


def _named(role_of: RoleOf, key: BucketKey) -> tuple[str, str]:
    """Returns what a collective is called in a bar, and in full."""
    module, index, _, group, use = key
    number = f"{module}/{index}" if module else str(index)
    if module == OWN_COLLECTIVES:
        op = USE_NAMES[use or ALL_REDUCE]
        return op, f"{op} in {role_of(group)}"
    return number, f"group {number}, {USE_NAMES[use]}" if use else f"bucket {number}"


def _params(layouts: Iterable[Layout]) -> list[dict[str, object]]:
    return [
        {"module": layout.module, "epoch": layout.epoch, "base": layout.param_base, "names": layout.params}
        for layout in sorted(layouts, key=attrgetter("module", "epoch"))
    ]
