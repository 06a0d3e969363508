"""A recording in the format of 0.1: a real job of two ranks with a slow backward on rank 1, later packed by node.

Every later version must read it.
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
KEPT_STEPS = ("count", "warmup", "aborted", "shadow", "unwatched", "unreduced")
KEPT_RANKS = ("rank", "host", "steps", "step_ms_p50", "late_ms_p50", "wait_ms_p50", "overlap_p50", "exposed_ms_p50")
KEPT_BUCKETS = ("module", "index", "nbytes", "params", "transfer_ms_p50", "busbw_gbps_p50", "last_rank", "last_share")


@pytest.mark.parametrize("name", NAMES)
def test_its_report_is_the_one_that_was_printed_then(name: str) -> None:
    then = json.loads((DATA / f"{name}.json").read_text())
    now = json.loads(json.dumps(report_of(DATA / f"{name}.mcap").as_json()))

    def kept(report: dict[str, Any]) -> dict[str, Any]:
        return {
            **{key: {field: report[key][field] for field in then[key]} for key in ("run", "cost", "recording")},
            "steps": [report["steps"][key] for key in KEPT_STEPS],
            "ranks": [
                [row[key] for key in (*KEPT_RANKS, "dropped", "own_cost_ratio", "end")] for row in report["ranks"]
            ],
            "buckets": [[row[key] for key in KEPT_BUCKETS] for row in report["buckets"]],
        }

    assert kept(now) == kept(then)
    kinds = [[(row["kind"], row["rank"]) for row in report["findings"]] for report in (then, now)]
    # Exposed were 32 ms of a step then. Rank 0 waits for rank 1 in 30 of them: these are rank 1's cost, not the wire's.
    assert kinds == [[("straggler", 1), ("exposed_comm", None)], [("straggler", 1)]]
    accounts = {(row["account"], row["rank"]): row["share"] for row in now["lost"]["accounts"]}
    assert accounts["waiting", 1] > 10 * accounts["transfer", None]
    for render in (render_report, render_markdown):
        assert "rank 1" in render(report_of(DATA / f"{name}.mcap"))


@pytest.mark.parametrize("name", NAMES)
def test_its_phases_are_those_that_were_computed_then(name: str) -> None:
    """``…-means.json`` holds the means over the full steps in the table that the earlier ddpwatch made of them."""
    then = json.loads((DATA / f"{name}-means.json").read_text())
    now = report_of(DATA / f"{name}.mcap").as_json()
    assert now["phases_ms"] == pytest.approx(
        {
            "data": None, "between": then["input_ms"],  # nobody knew what it waited for
            **{phase: then[f"{phase}_ms"] for phase in ("forward", "backward", "exposed_comm", "optimizer", "other")},
        }
    )  # fmt: skip
    assert now["steps"]["step_ms"] == pytest.approx(then["step_ms"])
    assert now["overlap"]["comm_ms"] == pytest.approx(then["comm_ms"])
    assert now["overlap"]["exposed_ms"] == pytest.approx(then["exposed_ms"])
    assert [row["exposed_ms"] for row in now["ranks"]] == pytest.approx(then["exposed_by_rank"])
    assert {row.data_ms for row in open_recording(DATA / f"{name}.mcap").steps()} == {None}
