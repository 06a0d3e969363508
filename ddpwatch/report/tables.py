"""The tables of a report, for every kind of text: phases, ranks, collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.incident import End
from ddpwatch.analysis.diagnosis.words.account_names import phase_name
from ddpwatch.analysis.explain.explanation import Explanation
from ddpwatch.analysis.explain.lines import LineDifference
from ddpwatch.analysis.figures import CollectiveFigures, RankFigures, Report
from ddpwatch.analysis.findings import describe_end
from ddpwatch.analysis.step import USE_NAMES
from ddpwatch.common.text import UNKNOWN, adding_up, clean, number, one_of, percent, plus_minus, size, three_digits

Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], str]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts; names in it are as the recording has them."""

    title: str
    header: list[str]
    rows: list[list[str]]


MOST_OF_DETAIL = 60
NOW_AND_THEN = {  # not where all ranks have this
    "clock ±ms": UNKNOWN, "host memory": UNKNOWN, "GPU memory": UNKNOWN, "by tensors": UNKNOWN, "lost messages": "0",
}  # fmt: skip

RANK_COLUMNS: Columns[RankFigures] = {
    "rank": lambda row: str(row.rank),
    "host": lambda row: row.host or UNKNOWN,
    "steps": lambda row: str(row.steps),
    "step ms": lambda row: number(row.step_ms),
    "late ms": lambda row: number(row.late_ms_p50),
    "wait ms": lambda row: number(row.wait_ms_p50),
    "overlap": lambda row: percent(row.overlap),
    "exposed ms": lambda row: number(row.exposed_ms),
    "clock ±ms": lambda row: number(row.clock_error_ms),
    "host memory": lambda row: size(row.memory.host_peak_bytes),
    "GPU memory": lambda row: size(row.memory.gpu_peak_bytes),
    "by tensors": lambda row: size(row.memory.gpu_allocated_peak_bytes),
    "lost messages": lambda row: str(row.dropped),
    "end": lambda row: _end(row.end) if row.end else UNKNOWN,
}
COLLECTIVE_COLUMNS: Columns[CollectiveFigures] = {
    "bucket": lambda row: _numbered(row),
    "group": lambda row: _numbered(row) if row.kind == "group" else _role(row),
    "place": lambda row: row.name or UNKNOWN,
    "collective": lambda row: USE_NAMES.get(row.use, ""),
    "steps": lambda row: str(row.steps),
    "a step": lambda row: UNKNOWN if row.per_step is None else f"{row.per_step:g}",
    "size": lambda row: size(row.nbytes),
    "params": lambda row: str(len(row.params)),
    "ready ms": lambda row: number(row.ready_ms_p50),
    "launch ms": lambda row: number(row.launch_ms_p50),
    "done ms": lambda row: number(row.done_ms_p50),
    "wait ms": lambda row: number(row.wait_ms_p50),
    "transfer ms": lambda row: number(row.transfer_ms_p50),
    "exposed ms": lambda row: number(row.exposed_ms_p50),
    "busbw GB/s": lambda row: three_digits(row.busbw_gbps_p50),
    "last": lambda row: _last(row),
}
_IN_STEP = frozenset({"ready ms", "launch ms", "done ms", "params"})  # of one collective that each step has once
# Title, and columns that do not apply, by what is communicated
UNITS: Mapping[str, tuple[str, frozenset[str]]] = {
    "bucket": (
        "Collectives of DDP's buckets (from the backward's start; medians do not add up)",
        frozenset({"group", "place", "collective", "steps", "a step", "wait ms"}),
    ),
    "group": (
        "Collectives of FSDP2's parameter groups (from forward; medians do not add up)",
        frozenset({"bucket", "place", "steps", "a step", "wait ms"}),
    ),
    "call": (
        "Collectives by the place that issues them (of a step; medians do not add up)",
        _IN_STEP | {"bucket"},
    ),
}


def tables(report: Report, omit: Collection[str] = ()) -> list[Table]:
    """Returns the tables that have rows, without the columns to omit."""
    explained = map(explanation_table, report.explained)
    found = [phase_table(report), rank_table(report), *explained, *collective_tables(report, omit)]
    return [table for table in found if table.rows]


def rank_table(report: Report) -> Table:
    """Returns a row per rank."""
    nothing = {
        name for name, says in NOW_AND_THEN.items() if all(RANK_COLUMNS[name](row) == says for row in report.ranks)
    }
    return _table("Ranks (means; late and wait: p50; memory: peak)", RANK_COLUMNS, report.ranks, nothing)


def collective_tables(report: Report, omit: Collection[str] = ()) -> list[Table]:
    """Returns what was communicated, a table per kind."""
    found = [_collectives(report, kind, omit) for kind in UNITS]
    return [table for table in found if table.rows]


def _collectives(report: Report, kind: str, omit: Collection[str]) -> Table:
    title, without = UNITS[kind]
    rows = [row for row in report.collectives if row.kind == kind]
    return _table(title, COLLECTIVE_COLUMNS, rows, {*omit, *without})


def _end(end: End) -> str:
    """Returns how a rank ended, with the start of a long message: its incident has all of it."""
    detail = end.detail if len(end.detail) <= MOST_OF_DETAIL else f"{end.detail[: MOST_OF_DETAIL - 1]}…"
    return describe_end(replace(end, detail=detail))


def _numbered(row: CollectiveFigures) -> str:
    return str(row.index) if row.module == 0 else f"{row.module}/{row.index}"


def _role(row: CollectiveFigures) -> str:
    return f"{row.role} {row.group_size or UNKNOWN}".lstrip()


_SAMPLED = {"input": "gap", "between": "rest", "sync": "waits"}  # phases as in the other tables


def explanation_table(found: Explanation) -> Table:
    """Returns the lines of code, or the operators, that explain a rank, in ms a step."""
    rows = []
    for line in found.lines:
        beside = _calls(line) if found.how == "profiler" else line.module or UNKNOWN
        row = [_SAMPLED.get(line.phase, line.phase) or UNKNOWN, beside, line.place, number(line.ms)]
        if found.peer is not None:
            more = plus_minus(number(line.difference_ms), number(line.reach_ms))
            if line.stalls:
                more = f"{number(line.stall_ms)} in {line.stalls} steps"
            row += [number(line.peer_ms), more, "yes" if line.certain else "no"]
        rows.append(row)
    columns = [] if found.peer is None else [f"rank {found.peer}", "more", "sure"]
    title = f"Explained: {clean(found.text)} (ms a step, in {found.steps} steps)"
    kind = ["calls", "operator"] if found.how == "profiler" else ["module", "function"]
    return Table(title, ["phase", *kind, f"rank {found.rank}", *columns], rows)


def _calls(line: LineDifference) -> str:
    """Returns how often an operator is called in a step, here and there if that differs."""
    here, there = number(line.calls, 0), number(line.peer_calls, 0)
    return here if line.peer_calls is None or here == there else f"{here} : {there}"


def phase_table(report: Report) -> Table:
    """Returns the mean step, split into its phases."""
    step_ms, phases = report.steps.step_ms, report.phases_ms
    known = {phase: ms for phase, ms in phases.items() if ms is not None}
    if not step_ms or not known:
        return Table("The mean step", [], [])
    times = _shown(known, step_ms, 1)
    shares = _shown({phase: 100 * ms / step_ms for phase, ms in known.items()}, 100, 0)
    rows = [
        [phase_name(phase), times.get(phase, UNKNOWN), f"{shares[phase]} %" if phase in shares else UNKNOWN]
        for phase in phases
    ]
    title = f"The mean step ({number(step_ms)} ms; phases from {report.steps.watched} of {report.steps.averaged} steps)"
    return Table(title, ["phase", "ms", "share"], rows)


def _shown(phases: Mapping[str, float], whole: float, digits: int) -> dict[str, str]:
    """Returns the phases as text: they add up to the whole, and what is exposed is as it is shown elsewhere."""
    exposed = {phase: f"{value:.{digits}f}" for phase, value in phases.items() if phase == "exposed_comm"}
    rest = {phase: value for phase, value in phases.items() if phase not in exposed}
    left = float(f"{whole:.{digits}f}") - sum(map(float, exposed.values()))
    return dict(zip(rest, adding_up(left, list(rest.values()), digits), strict=True)) | exposed


def _table(title: str, columns: Columns[Row], rows: Sequence[Row], omit: Collection[str]) -> Table:
    shown = {name: cell for name, cell in columns.items() if name not in omit}
    return Table(title, list(shown), [[cell(row) for cell in shown.values()] for row in rows])


def _last(row: CollectiveFigures) -> str:
    if not row.last_ranks:
        return UNKNOWN
    named = f"rank {row.last_rank}" if row.last_rank is not None else f"{one_of(row.last_ranks)}:"
    return f"{named} {percent(row.last_share)}"
