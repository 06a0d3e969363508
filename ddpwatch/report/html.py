"""The report as one HTML file: figures, findings, and a timeline to zoom and click in. It loads nothing from anywhere.

Names in a recording come from other machines. They travel as JSON, without characters that do more than show themselves
(`ddpwatch.report.format`), and are only ever put on the page as text; the page's own policy forbids it any connection.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files
from typing import Any

import msgspec

from ddpwatch.analysis.assembly import StepGroup
from ddpwatch.analysis.outline import Outline
from ddpwatch.messages import Layout
from ddpwatch.report.format import clean

MOST_RANKS = 64
MOST_HOOKS = 2000
_PLACE = "/*DATA*/null"


def render_html(report: dict[str, Any], outline: Outline, layouts: list[Layout], version: str) -> bytes:
    """The page.

    Args:
        report: As from `ddpwatch.report.build.report_of`.
        outline: Of the same recording.
        layouts: Where parameter names come from.
        version: Of ddpwatch.
    """
    data = {
        "report": _cleaned(report),
        "points": [asdict(point) for point in outline.points],
        "stride": outline.stride,
        "steps": [_step(group, why) for group, why in outline.details()],
        "params": _cleaned(_params(layouts)),
        "version": version,
    }
    encoded = msgspec.json.encode(data).decode()
    # Inside a script element only these could end it, or begin a comment.
    safe = encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    safe = safe.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template = files("ddpwatch.report").joinpath("template.html").read_text(encoding="utf-8")
    return template.replace(_PLACE, safe, 1).encode()


def _cleaned(value: Any) -> Any:
    """The same with every text in it cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


def _step(group: StepGroup, why: str) -> dict[str, Any]:
    ranks = sorted(group.steps)[:MOST_RANKS]
    origin = min(group.steps[rank].start_ns for rank in ranks)
    return {
        "step": group.number,
        "why": why,
        "comparable": group.comparable,
        "cut": _cut(group),
        "ranks": [_rank(group, rank, origin if group.comparable else group.steps[rank].start_ns) for rank in ranks],
    }


def _cut(group: StepGroup) -> str:
    """What of the step is not drawn, in words; empty for nothing."""
    cut = []
    if len(group.steps) > MOST_RANKS:
        cut.append(f"the first {MOST_RANKS} of {len(group.steps)} ranks")
    if any(len(step.hook_ns) > MOST_HOOKS for step in group.steps.values()):
        cut.append(f"the first {MOST_HOOKS} hooks of each rank")
    return f"This shows only {' and '.join(cut)}." if cut else ""


def _rank(group: StepGroup, rank: int, origin: int) -> dict[str, Any]:
    step, figure = group.steps[rank], group.figures[rank]
    return {
        "rank": rank,
        "at": step.start_ns - origin,
        "ns": step.duration_ns,
        "epoch": step.epoch,
        "overlap": figure.overlap,
        "exposed_ns": figure.exposed_ns,
        "phases": figure.phases_ns,
        "spans": [[span.phase, span.start, span.end] for span in step.spans],
        "exposed": figure.exposed,
        "hooks": list(zip(step.hook_param, step.hook_ns, strict=True))[:MOST_HOOKS],
        "buckets": list(
            zip(step.bucket_module, step.bucket_index, step.bucket_bytes, step.bucket_ready, step.bucket_launch,
                step.bucket_done, strict=True)
        ),
    }  # fmt: skip


def _params(layouts: list[Layout]) -> list[dict[str, Any]]:
    """One layout per module and epoch, whichever rank told it."""
    found = {(layout.module, layout.epoch): layout for layout in layouts}
    return [
        {"module": module, "epoch": epoch, "base": layout.param_base, "names": layout.params}
        for (module, epoch), layout in sorted(found.items())
    ]
