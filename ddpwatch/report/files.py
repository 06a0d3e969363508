"""The report of a recording as an HTML file, and as text with charts."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddpwatch.analysis.figures import Report
from ddpwatch.errors import UsageError
from ddpwatch.recording.overwrite_guard import check_output
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import Drawn, report_of
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
    drawn = Drawn()
    return write_page(report_of(path, selection, drawn), drawn, out)


def write_page(report: Report, drawn: Drawn, out: Path) -> int:
    """Writes a report as one HTML file; returns its size in bytes.

    Raises:
        UsageError: The output cannot be written.
    """
    try:
        return out.write_bytes(render_html(report, drawn, __version__))
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}", "give --html a path you can write to") from error


def text_report(report: Report, drawn: Drawn | None = None) -> str:
    """Returns the report as text; with what is drawn, it has charts of the terminal's width."""
    text = render_report(report)
    if drawn is None:
        return text
    from ddpwatch.report.terminal_charts import charts

    shown = charts(drawn.outline, shutil.get_terminal_size().columns)
    return f"{text}\n\n{shown}" if shown else text
