"""Builds reports and comparisons from recordings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import asdict, replace

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.compare import (
    ComparedRun,
    Difference,
    RunComparison,
    RunDifference,
    RunSeries,
    changed_accounts,
    changed_incidents,
    compare,
    figures_of,
    only_one_ended,
    setup_of,
)
from ddpwatch.analysis.figures import (
    GoodputFigures,
    RecordingFigures,
    Report,
    RunTime,
    overlap_figures,
    phases_figures,
)
from ddpwatch.analysis.findings import findings, notes
from ddpwatch.analysis.goodput import goodput
from ddpwatch.analysis.rank_strips import RankStrips
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.analysis.run import Run
from ddpwatch.analysis.run_outline import Outline
from ddpwatch.common.garbage import no_collections
from ddpwatch.common.units import to_ms
from ddpwatch.errors import DdpwatchError, UnclearError, UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.summaries import runs_before
from ddpwatch.wire.messages import Hello, Layout
from ddpwatch.wire.transport import Frame


@dataclass
class Drawn:
    """What of a run is drawn, besides its report.

    Attributes:
        outline: Of its steps.
        strips: Of its ranks.
        layouts: The source of parameter names: one per module and epoch, as all ranks have the same.
    """

    outline: Outline = field(default_factory=Outline)
    strips: RankStrips = field(default_factory=RankStrips)
    layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)

    def add_steps(self, steps: Iterable[StepAcrossRanks]) -> None:
        """Adds steps of the run."""
        for across in steps:
            self.outline.add_step(across)
            self.strips.add_step(across)


def report_of(
    path: str | os.PathLike[str],
    selection: Selection | None = None,
    drawn: Drawn | None = None,
    price: float | None = None,
) -> Report:
    """Returns the report of a recording, as ``ddpwatch report --json`` prints it.

    Args:
        path: Of the recording.
        selection: Which steps and ranks.
        drawn: Filled in the same pass.
        price: What a rank costs in an hour.

    Raises:
        UsageError: Nothing in the file is readable, or the selection is empty.
    """
    return report_of_recording(Recording(path), selection, drawn, price)


@no_collections()
def report_of_recording(
    recording: Recording, selection: Selection | None = None, drawn: Drawn | None = None, price: float | None = None
) -> Report:
    """Reports on an open recording, as `report_of` does."""
    chosen = selection or Selection()
    recording.check(chosen)
    builder = _collected(recording.select(chosen), str(recording.path), chosen, drawn)
    if recording.frames == 0:
        raise UsageError(f"{recording.path}: no frame is readable", "it was cut off in its first second, or is damaged")
    report = replace(builder.report(), recording=_about(recording, builder))
    if chosen.everything:
        report = replace(report, goodput=_goodput(recording, report, builder.time(), price))
    return replace(report, notes=notes(report), findings=findings(report))


def _goodput(recording: Recording, report: Report, time: RunTime | None, price: float | None) -> GoodputFigures | None:
    """Returns that of all runs of the job up to this one; None before the first step."""
    if time is None:
        return None
    before, missing = runs_before(recording.path, report.run.previous or "")
    known = [(run.run, run.time) for run in before if run.time is not None]
    return goodput([*known, (report.run.id or "", time)], missing or None, price)


@no_collections()
def report_of_frames(frames: Iterable[Frame], source: str, selection: Selection, drawn: Drawn | None = None) -> Report:
    """Returns the report of frames that were selected: those of a live run. The rest as for `report_of`."""
    return _collected(frames, source, selection, drawn).report()


def _collected(frames: Iterable[Frame], source: str, selection: Selection, drawn: Drawn | None) -> ReportBuilder:
    builder = ReportBuilder(_expected(selection), source)
    for message, envelope in frames:
        steps = builder.apply_message(message, envelope.received_ns, envelope.frame)
        if drawn is not None:
            if steps:
                drawn.add_steps(steps)
            elif isinstance(message, Layout):
                drawn.layouts[message.module, message.epoch] = message
    if drawn is not None:
        drawn.add_steps(builder.rest())
    return builder


def _expected(selection: Selection) -> int | None:
    """Returns how many ranks will send a step; None for all."""
    return None if selection.ranks is None else len(selection.ranks)


def _about(recording: Recording, builder: ReportBuilder) -> RecordingFigures:
    return RecordingFigures(
        frames=recording.frames,
        bytes=recording.nbytes,
        seconds=recording.seconds,
        cut_tail=recording.cut_tail,
        skipped=recording.skipped,
        parts=len(recording.parts),
        dropped_parts=recording.dropped_parts,
        missing_parts=recording.missing_parts,
        lost=recording.lost,
        rank_files=recording.rank_files,
        notes=recording.notes,
        collector_restarts=builder.collector_restarts,
        missing_steps=builder.missing_steps if builder.collector_restarts else None,
    )


@no_collections()
def compare_recordings(
    recordings: Sequence[str | os.PathLike[str] | Recording],
    selection: Selection | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> RunComparison:
    """Compares each recording with the first. Calls ``note`` with what could not be read of them.

    Raises:
        UsageError: Fewer than two recordings, or one cannot be read.
    """
    if len(recordings) < 2:
        raise UsageError("compare needs two recordings", "ddpwatch compare A.mcap B.mcap")
    opened = [one if isinstance(one, Recording) else Recording(one) for one in recordings]
    series = [RunSeries(name) for name in _names([one.path for one in opened])]
    runs = [_run(one, each, selection or Selection(), note) for one, each in zip(opened, series, strict=True)]
    differences = [
        _difference(compare(series[0], each), runs[0], run) for each, run in zip(series[1:], runs[1:], strict=True)
    ]
    return RunComparison(runs, differences)


def _difference(found: Difference, a: ComparedRun, b: ComparedRun) -> RunDifference:
    """Returns how the steps differ, with what else does; a hang or death of one run comes first."""
    incidents = changed_incidents(a, b)
    told = replace(found, text=only_one_ended(incidents) + found.text)
    return RunDifference(**asdict(told), lost=changed_accounts(a.lost, b.lost), incidents=incidents)


def _run(recording: Recording, series: RunSeries, selection: Selection, note: Callable[[str], object]) -> ComparedRun:
    run = Run(_expected(selection), source=str(recording.path))
    recording.check(selection)
    for message, envelope in recording.select(selection):
        if isinstance(message, Hello) and not (series.setup and message.rank):  # the lowest rank's, if it is there
            series.setup = setup_of(message)
        for across in run.apply_message(message, envelope.received_ns, envelope.frame):
            series.add_step(across)
    for across in run.rest():
        series.add_step(across)
    for text in (*recording.notes, *recording.left_out):
        note(f"{series.name}: {text}")
    found = run.estimate()
    series.shown, series.shown_overlap = phases_figures(found), found.overlap
    return ComparedRun(
        **asdict(figures_of(series)),
        step_ms=to_ms(found.step_ns),
        phases_ms=series.shown,
        overlap=overlap_figures(found),
        lost=run.lost(),
        incidents=run.incidents(),
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """Names for the runs: file names where they differ, else whole paths."""
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def parse_percent(text: str) -> float:
    """Reads ``5%`` or ``5`` as 0.05.

    Raises:
        UsageError: The text is something else.
    """
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise UsageError(f"{text!r} is not a percentage", "give e.g. 5%")
    return value


def slower_than(comparison: RunComparison, limit: float) -> None:
    """Fails if a run is surely slower than the first by more than the limit, or if that is unclear.

    Raises:
        DdpwatchError: A run is slower, or could not be compared.
        UnclearError: None is, but noise could hide that one is.
    """
    for found in comparison.differences:
        if found.verdict == "unknown":
            raise DdpwatchError(found.text, "record longer runs")
        if found.low is not None and found.low > limit:
            raise DdpwatchError(f"{found.b} is {found.ratio:.1%} slower, more than {limit:.1%}")
    for found in comparison.differences:
        if found.verdict in ("slower", "unclear") and found.high is not None and found.high > limit:
            raise UnclearError(
                f"unclear whether {found.b} is more than {limit:.1%} slower ({found.low:+.1%} to {found.high:+.1%})",
                "record longer runs, or several",
            )
