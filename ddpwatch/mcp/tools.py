"""The tools: what an agent may ask. Each answer is part of a report, with the names and units of its JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta
from msgspec.structs import asdict, replace

from ddpwatch.analysis.compare import AccountChange, IncidentOfOne
from ddpwatch.analysis.diagnosis.incident_json import AccountFigures, Figures, IncidentFigures
from ddpwatch.analysis.diagnosis.words.account_names import rank_seconds
from ddpwatch.analysis.figures import (
    CostFigures,
    OverlapFigures,
    RankFigures,
    Report,
    RunFigures,
    StepCounts,
    VerdictFigures,
)
from ddpwatch.analysis.run_outline import Outline, Point
from ddpwatch.export.tables import StepRow, step_rows
from ddpwatch.mcp.runs import LiveRun, RecordedRun, Runs
from ddpwatch.recording.selection import Selection, selection_of
from ddpwatch.report.build import Drawn, compare_recordings
from ddpwatch.viewer.listing import row_of
from ddpwatch.whatif.answer import Prediction, Refused, ReplayedSetting
from ddpwatch.whatif.command import WhatIfOptions, answer, check_answered
from ddpwatch.whatif.recorded import recorded_of

MOST = 12  # rows of a table
MOST_POINTS = 60  # of a timeline
Row = TypeVar("Row")

RunName = Annotated[
    str, Meta(description="A live run's id (or its start), or the path of a recording. Empty: the newest live run.")
]
RecordingName = Annotated[str, Meta(description="The path of a recording: a file, or a directory of rank files.")]
Steps = Annotated[str, Meta(description="Only these steps, as 100:200: from 100 to 199. Empty: all.")]
Ranks = Annotated[str, Meta(description="Only these ranks, as 0,4-7. Empty: all.")]


class AnswerSource(Figures, frozen=True):
    """What an answer is of; ``notes`` limit it."""

    run: str
    kind: Literal["live", "recording"]
    id: str | None
    ranks: int | None
    steps: int
    notes: Sequence[str]


def _source(run: LiveRun | RecordedRun, report: Report) -> AnswerSource:
    notes = [*run.notes(), *(off.message for off in report.off)]
    return AnswerSource(run.name, run.kind, report.run.id, report.run.world_size, report.steps.count, notes)


class ListedRun(Figures, frozen=True):
    """A live run; ``run`` is what other tools take."""

    run: str
    host: str
    script: str
    ranks: int
    started: str
    recording: str
    verdict: VerdictFigures


class ListedRecording(Figures, frozen=True):
    """A recording; ``run`` is what other tools take."""

    run: str
    written: str


class RunList(Figures, frozen=True):
    """The live runs, and recordings; newest first, times in UTC."""

    live: Sequence[ListedRun]
    recordings: Sequence[ListedRecording]


def list_runs(runs: Runs) -> RunList:
    """Lists the live runs on this machine with the verdict on each, and recordings."""
    live = []
    for info in runs.live()[:MOST]:
        runs.deadline.check()
        about = (info.run_id, info.host, info.script, info.world_size, _utc(info.started), info.recording)
        live.append(ListedRun(*about, row_of(info).verdict))
    files = [ListedRecording(str(path), _utc(path.stat().st_mtime)) for path in runs.recordings()]
    return RunList(live, files)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class RunSummary(Figures, frozen=True):
    """A run's means, and what matters most; ``latest_ranks`` are at most 12. ``cost`` is that of watching."""

    source: AnswerSource
    verdict: VerdictFigures
    run: RunFigures
    steps: StepCounts
    phases_ms: Mapping[str, float | None]
    overlap: OverlapFigures
    lost_share: float | None
    incidents: int
    latest_ranks: Sequence[RankFigures]
    cost: CostFigures


def summary(runs: Runs, run: RunName = "", steps: Steps = "", ranks: Ranks = "") -> RunSummary:
    """Says what a run is, what matters most now, how long a step takes and of what it consists, and who is late."""
    found, report = _report(runs, run, steps, ranks)
    latest = sorted(report.ranks, key=lambda rank: -(rank.late_ms_p50 or 0.0))
    return RunSummary(
        source=_source(found, report),
        verdict=report.verdict,
        run=replace(report.run, hosts=report.run.hosts[:MOST]),
        steps=report.steps,
        phases_ms=report.phases_ms,
        overlap=report.overlap,
        lost_share=report.lost.lost_share,
        incidents=len(report.incidents),
        latest_ranks=[replace(rank, groups=rank.groups[:MOST]) for rank in latest[:MOST]],
        cost=report.cost,
    )


class FoundIncident(IncidentFigures, frozen=True):
    """An incident; its evidence by name, as a schema knows no union of what a device did."""

    evidence: Mapping[str, Any]  # type: ignore[assignment]


class Incidents(Figures, frozen=True):
    """What went wrong, worst first; ``left_out``: further ones. ``seconds`` are of rank-time."""

    source: AnswerSource
    incidents: Sequence[FoundIncident]
    left_out: int


def incidents(
    runs: Runs,
    run: RunName = "",
    steps: Steps = "",
    ranks: Ranks = "",
    stacks: Annotated[bool, Meta(description="With the Python stacks of ranks that hang.")] = False,
) -> Incidents:
    """Lists what went wrong in a run, worst first: who, since when, what it cost, why, and what to do next."""
    found, report = _report(runs, run, steps, ranks)
    rows, left_out = _first(report.incidents)
    return Incidents(_source(found, report), [_with_evidence(row, stacks) for row in rows], left_out)


def _with_evidence(row: IncidentFigures, stacks: bool) -> FoundIncident:
    evidence = {name: value for name, value in row.evidence.known().items() if stacks or name != "stacks"}
    return FoundIncident(**{**asdict(row), "evidence": evidence})


class RunLostTime(Figures, frozen=True):
    """Where the rank-time went, largest account first; ``unit`` is what the seconds are of."""

    source: AnswerSource
    unit: str
    rank_seconds: float
    lost_share: float | None
    accounts: Sequence[AccountFigures]
    left_out: int


def lost_time(runs: Runs, run: RunName = "", steps: Steps = "", ranks: Ranks = "") -> RunLostTime:
    """Says where a run's time went, by account: compute, waiting for a rank, transfer, input, pauses and so on."""
    found, report = _report(runs, run, steps, ranks)
    unit, lost = rank_seconds(report.run.timing_source), report.lost
    return RunLostTime(_source(found, report), unit, lost.rank_seconds, lost.lost_share, *_first(lost.accounts))


class StepTimeline(Figures, frozen=True):
    """Watched steps in order; each point is the slowest of ``stride`` steps, with means over its ranks.

    ``ranks`` are of a single step: the slowest ones.
    """

    source: AnswerSource
    stride: int
    points: Sequence[Point]
    ranks: Sequence[StepRow]


def step_timeline(runs: Runs, run: RunName = "", steps: Steps = "", ranks: Ranks = "") -> StepTimeline:
    """Shows how steps went over time; of a single step (such as 120:121), what each rank did."""
    drawn = Drawn(outline=Outline(MOST_POINTS))
    found, report = _report(runs, run, steps, ranks, drawn)
    points, rows = drawn.outline.points, list[StepRow]()
    if len(points) == 1:
        rows = [row for across, _ in drawn.outline.details() for row in step_rows(across)]
        rows.sort(key=lambda row: -(row.step_ms or 0.0))
    return StepTimeline(_source(found, report), drawn.outline.stride, points, rows[:MOST])


class Compared(Figures, frozen=True):
    """B against A: ``ratio`` is by how much its step is longer (0.1: 10 %), from ``low`` to ``high`` (99 %)."""

    a: str
    b: str
    verdict: str
    text: str
    ratio: float | None
    low: float | None
    high: float | None
    phase: str
    step_ms: Sequence[float | None]
    phases_ms: Sequence[Mapping[str, float | None]]
    lost: Sequence[AccountChange]
    incidents: Sequence[IncidentOfOne]
    notes: Sequence[str]


def compare(runs: Runs, a: RecordingName, b: RecordingName, steps: Steps = "", ranks: Ranks = "") -> Compared:
    """Says whether recording B is slower than A, by how much, how certainly, and why."""
    notes: list[str] = []
    opened = [runs.recorded(name).recording for name in (a, b)]
    found = compare_recordings(opened, _selection(steps, ranks), note=notes.append)
    (difference,) = found.differences
    return Compared(
        a=a,
        b=b,
        verdict=difference.verdict,
        text=difference.text,
        ratio=difference.ratio,
        low=difference.low,
        high=difference.high,
        phase=difference.phase,
        step_ms=[one.step_ms for one in found.runs],
        phases_ms=[one.phases_ms for one in found.runs],
        lost=difference.lost[:MOST],
        incidents=difference.incidents[:MOST],
        notes=notes,
    )


class Predicted(Figures, frozen=True):
    """Predictions from full steps, the surest gain first; gains in ms of a step, with a 90 % interval."""

    run: str
    steps: int
    replayed: ReplayedSetting
    scenarios: Sequence[Prediction]
    left_out: int
    refused: Sequence[Refused]
    notes: Sequence[str]


def whatif(
    runs: Runs,
    run: RunName = "",
    caps_mib: Annotated[str, Meta(description="Other bucket caps, as 1,5,25.")] = "",
    hooks: Annotated[str, Meta(description="Comm hooks: fp16, bf16, powersgd-RANK.")] = "",
    links: Annotated[str, Meta(description="Networks so many times as fast, as 2,10.")] = "",
    without_rank: Annotated[int | None, Meta(description="With this rank as fast as the others.")] = None,
    worlds: Annotated[str, Meta(description="With so many ranks, as 8,16.")] = "",
    accumulate: Annotated[str, Meta(description="Reduce gradients once in so many batches, as 2,4.")] = "",
    no_input: Annotated[bool, Meta(description="Without waits for data.")] = False,
) -> Predicted:
    """Predicts the step time under other settings; without any, under those that are worth trying."""
    options = WhatIfOptions(
        caps=caps_mib or None,
        hooks=hooks or None,
        links=links or None,
        without_rank=without_rank,
        worlds=worlds or None,
        accumulate=accumulate or None,
        no_input=no_input,
    )
    found = runs.find(run)
    result = answer(recorded_of(message for message, _ in found.frames()), options.changes())
    check_answered(result)
    scenarios, left_out = _first(result.scenarios)
    about = (result.steps, result.replayed, scenarios, left_out, result.refused[:MOST])
    return Predicted(found.name, *about, found.notes())


TOOLS = (list_runs, summary, incidents, lost_time, step_timeline, compare, whatif)


def _report(
    runs: Runs, name: str, steps: str, ranks: str, drawn: Drawn | None = None
) -> tuple[LiveRun | RecordedRun, Report]:
    run = runs.find(name)
    return run, run.report(_selection(steps, ranks), drawn)


def _selection(steps: str, ranks: str) -> Selection:
    return selection_of(steps or None, ranks or None)


def _first(rows: Sequence[Row]) -> tuple[Sequence[Row], int]:
    """Returns the first rows of a table, and how many are left out."""
    return rows[:MOST], max(0, len(rows) - MOST)
