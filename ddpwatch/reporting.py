"""From a recording to its report."""

from __future__ import annotations

import os
from typing import Any

from ddpwatch.analysis.findings import findings
from ddpwatch.analysis.report import ReportBuilder
from ddpwatch.errors import UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection


def report_of(path: str | os.PathLike[str], selection: Selection | None = None) -> dict[str, Any]:
    """The report of a recording, as ``ddpwatch report --json`` prints it.

    Raises:
        UsageError: Nothing in the file is readable, or nothing of it selected.
    """
    return report_of_recording(Recording(path), selection)


def report_of_recording(recording: Recording, selection: Selection | None = None) -> dict[str, Any]:
    """See `report_of`."""
    chosen = selection or Selection()
    builder = ReportBuilder(None if chosen.ranks is None else len(chosen.ranks))
    for message, _ in recording.select(chosen):
        builder.apply(message)
    if recording.frames == 0:
        raise UsageError(f"{recording.path}: no frame is readable", "it was cut before its first second, or is damaged")
    if not chosen.whole and not any(samples.steps for samples in builder.ranks.values()):
        raise UsageError(f"{recording.path}: nothing of what was selected is in it", _what_there_is(recording))
    result = builder.report()
    result["recording"] = _about(recording)
    result["findings"] = findings(result)
    return result


def _about(recording: Recording) -> dict[str, Any]:
    ends = [part.end for part in recording.parts]
    lost = [end["lost"] for end in ends if end.get("lost", "").isdecimal()]
    return {
        "frames": recording.frames,
        "bytes": recording.nbytes,
        "seconds": recording.seconds,
        "cut_tail": recording.cut_tail,
        "skipped": recording.skipped,
        "parts": len(recording.parts),
        "dropped_parts": recording.dropped_parts,
        "lost": int(lost[-1]) if lost else 0,
        "notes": recording.notes,
    }


def _what_there_is(recording: Recording) -> str:
    steps = recording.steps
    return f"it holds the steps {steps[0]} to {steps[1]}" if steps else "leave --steps and --ranks away"
