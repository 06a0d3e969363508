"""Builds reports and comparisons from recordings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.assembly import steps_across_ranks
from ddpwatch.analysis.compare import RunSeries, compare, figures_of
from ddpwatch.analysis.diagnosis.findings import findings
from ddpwatch.analysis.outline import Outline
from ddpwatch.analysis.report_figures import ReportBuilder
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection


def report_of(path: str | os.PathLike[str], selection: Selection | None = None) -> dict[str, Any]:
    """The report of a recording, as ``ddpwatch report --json`` prints it.

    Raises:
        UsageError: Nothing in the file is readable, or the selection is empty.
    """
    return report_of_recording(Recording(path), selection)


def report_of_recording(recording: Recording, selection: Selection | None = None) -> dict[str, Any]:
    """See `report_of`."""
    chosen = selection or Selection()
    recording.check(chosen)
    builder = ReportBuilder(None if chosen.ranks is None else len(chosen.ranks))
    for message, envelope in recording.select(chosen):
        builder.apply(message, envelope.received_ns)
    if recording.frames == 0:
        raise UsageError(f"{recording.path}: no frame is readable", "it was cut off in its first second, or is damaged")
    result = builder.report()
    result["recording"] = _about(recording)
    if builder.collector_restarts:
        result["recording"]["collector_restarts"] = builder.collector_restarts
        result["recording"]["missing_steps"] = builder.missing_steps
    result["findings"] = findings(result)
    return result


def _about(recording: Recording) -> dict[str, Any]:
    return {
        "frames": recording.frames,
        "bytes": recording.nbytes,
        "seconds": recording.seconds,
        "cut_tail": recording.cut_tail,
        "skipped": recording.skipped,
        "parts": len(recording.parts),
        "dropped_parts": recording.dropped_parts,
        "missing_parts": recording.missing_parts,
        "lost": recording.lost,
        "rank_files": recording.rank_files,
        "notes": recording.notes,
    }


def outline_of(recording: Recording, selection: Selection | None = None) -> Outline:
    """The outline of a recording, in one pass."""
    outline = Outline()
    for across in _steps(recording, selection or Selection()):
        outline.add(across)
    return outline


def compare_recordings(
    paths: Sequence[str | os.PathLike[str]], selection: Selection | None = None, seed: int = 0
) -> dict[str, Any]:
    """Compares each recording with the first.

    Returns:
        ``runs``: the figures of each (`ddpwatch.analysis.compare.figures_of`). ``differences``: of all but the first
        run, with ``a``, ``b`` (names) and the fields of `ddpwatch.analysis.compare.Difference`.

    Raises:
        UsageError: Fewer than two recordings, or one cannot be read.
    """
    if len(paths) < 2:
        raise UsageError("compare needs two recordings", "ddpwatch compare A.mcap B.mcap")
    runs = [RunSeries(name) for name in _names(paths)]
    for path, run in zip(paths, runs, strict=True):
        for across in _steps(Recording(path), selection or Selection()):
            run.add(across)
    found = [(run, compare(runs[0], run, seed)) for run in runs[1:]]
    return {
        "runs": [figures_of(run) for run in runs],
        "differences": [{"a": runs[0].name, "b": run.name, **asdict(difference)} for run, difference in found],
    }


def _steps(recording: Recording, selection: Selection) -> Iterator[StepAcrossRanks]:
    recording.check(selection)
    ranks = None if selection.ranks is None else len(selection.ranks)
    return steps_across_ranks((message for message, _ in recording.select(selection)), ranks)


def _names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Names for the runs: file names where they differ, else whole paths."""
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def parse_percent(text: str) -> float:
    """``5%`` or ``5`` as 0.05.

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


def slower_than(comparison: dict[str, Any], limit: float) -> None:
    """Fails if a run is slower than the first by more than the limit, and by more than chance.

    Raises:
        DdpwatchError: A run is slower, or could not be compared.
    """
    for found in comparison["differences"]:
        if found["verdict"] == "unknown":
            raise DdpwatchError(found["text"], "record longer runs")
        if found["verdict"] == "slower" and found["ratio"] > limit:
            raise DdpwatchError(f"{found['b']} is {found['ratio']:.1%} slower, more than {limit:.1%}")
