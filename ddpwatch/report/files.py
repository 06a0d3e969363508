"""The report of a recording as an HTML file, and as text with charts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ddpwatch.errors import UsageError
from ddpwatch.messages import Layout
from ddpwatch.recording.overwrite_guard import check_output
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import outline_of, report_of_recording
from ddpwatch.report.html import render_html
from ddpwatch.report.text import render_report
from ddpwatch.version import __version__


def write_html(path: Path, out: Path, selection: Selection) -> int:
    """Writes the report of a recording as one HTML file; returns its size in bytes.

    Raises:
        UsageError: The recording is unreadable, the selection is empty, or the output cannot be written or is a
            recording itself.
    """
    check_output(out)
    recording = Recording(path)
    report = report_of_recording(recording, selection)
    layouts = [message for message, _ in recording.select(selection) if isinstance(message, Layout)]
    page = render_html(report, outline_of(recording, selection), layouts, __version__)
    try:
        return out.write_bytes(page)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}", "give --html a path you can write to") from error


def text_report(path: Path, report: dict[str, Any], selection: Selection, terminal: bool) -> str:
    """The report as text, on a terminal with charts of its width."""
    text = render_report(report)
    if not terminal:
        return text
    from ddpwatch.report.charts import charts

    drawn = charts(outline_of(Recording(path), selection), shutil.get_terminal_size().columns)
    return f"{text}\n\n{drawn}" if drawn else text
