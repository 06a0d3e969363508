"""A recording in the format of 0.1: a job of two ranks with a slow backward on rank 1, packed by node from step 30.

Every later version must read it. Its figures are those that 0.1 printed, but for means: they are now of all steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpwatch import open_recording
from ddpwatch.report.build import report_of
from ddpwatch.report.markdown import render_markdown
from ddpwatch.report.text import render_report

DATA = Path(__file__).parents[1] / "data"
NAMES = ["written-by-0.1"]


@pytest.mark.parametrize("name", NAMES)
def test_its_report_is_the_one_that_was_printed_then(name: str) -> None:
    then = json.loads((DATA / f"{name}.json").read_text())
    then["collectives"] = then.pop("buckets")
    report = report_of(DATA / f"{name}.mcap")
    now = json.loads(json.dumps(report.as_json()))

    def kept(report: dict[str, Any]) -> dict[str, Any]:
        """What a later version may add to is compared by what was there."""
        figures = {key: {field: report[key][field] for field in then[key]} for key in FIGURES}
        rows = {key: [{field: row[field] for field in then[key][0]} for row in report[key]] for key in ROWS}
        return figures | rows

    assert kept(now) == then
    accounts = {(row["account"], row["rank"]): row["share"] for row in now["lost"]["accounts"]}
    assert accounts["waiting", 1] > 5 * accounts["transfer", None]
    for render in (render_report, render_markdown):
        assert "rank 1" in render(report)


FIGURES = ("run", "cost", "recording", "steps", "phases_ms", "overlap")
ROWS = ("ranks", "collectives", "findings", "incidents")


@pytest.mark.parametrize("name", NAMES)
def test_its_steps_are_all_there(name: str) -> None:
    rows = [(row.step, row.rank) for row in open_recording(DATA / f"{name}.mcap").steps()]
    assert sorted(rows) == [(step, rank) for step in range(60) for rank in range(2)]
