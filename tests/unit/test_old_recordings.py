"""A recording that an earlier ddpwatch wrote: a real job of two ranks, with a slow backward on rank 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpwatch.report.build import report_of
from ddpwatch.report.markdown import render_markdown
from ddpwatch.report.text import render_report

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("name", ["written-by-0.1"])
def test_its_report_is_the_one_that_was_printed_then(name: str) -> None:
    then = json.loads((DATA / f"{name}.json").read_text())
    then["phases_ms"] |= {"data": None, "between": then["phases_ms"].pop("input")}  # nobody knew what it waited for
    now = report_of(DATA / f"{name}.mcap")
    assert json.loads(json.dumps(now)) == then
    for render in (render_report, render_markdown):
        assert "rank 1" in render(now)
