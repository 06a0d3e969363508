"""From a recording to its report."""

from __future__ import annotations

import os
from typing import Any

from ddpwatch.analysis.findings import findings
from ddpwatch.analysis.report import ReportBuilder
from ddpwatch.errors import UsageError
from ddpwatch.recording.reader import Recording


def report_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The report of a recording, as ``ddpwatch report --json`` prints it.

    Raises:
        UsageError: Nothing in the file is readable.
    """
    recording = Recording(path)
    builder = ReportBuilder()
    for message, _ in recording:
        builder.apply(message)
    if recording.frames == 0:
        raise UsageError(f"{path}: no frame is readable", "it was cut before its first second, or is damaged")
    result = builder.report()
    result["recording"] = {
        "frames": recording.frames,
        "bytes": recording.nbytes,
        "seconds": recording.seconds,
        "cut_tail": recording.cut_tail,
        "skipped": recording.skipped,
    }
    result["findings"] = findings(result)
    return result
