"""The HTML report's data: nothing in it reorders its neighbours, and a note says what is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, StackGroup
from ddpwatch.analysis.diagnosis.incident_json import incident_row
from ddpwatch.analysis.step import USE_NAMES
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import Drawn, report_of
from ddpwatch.report.files import write_html, write_page
from ddpwatch.report.html import LEAST_RANKS, MOST_HOOKS, MOST_MARKS, MOST_RANKS
from ddpwatch.report.incidents import named
from ddpwatch.wire.messages import Bye, Hello, Layout, Message, Step
from tests.support.dashboards import ended_recording
from tests.support.runs import MS, record, run_of
from tests.support.sharded import hsdp_run

REORDERED = "in\u202eni\x1b[31m\u2066x\u200b"


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r"^const DATA = (.*);$", page.read_text(), re.MULTILINE)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_no_name_reorders_the_page(tmp_path: Path) -> None:
    def hostile() -> Iterator[tuple[Message, int]]:
        for message, at in run_of():
            if isinstance(message, Hello):
                message = replace(message, run_id=REORDERED, host=REORDERED, module=REORDERED, torch=REORDERED)
            elif isinstance(message, Layout):
                message = replace(message, params=[REORDERED] * 3)
            elif isinstance(message, Bye):
                message = replace(message, detail=REORDERED, phase=REORDERED)
            yield message, at

    write_html(record(tmp_path / "run.mcap", hostile()), tmp_path / "report.html", Selection())
    data = data_of(tmp_path / "report.html")
    text = json.dumps(data, ensure_ascii=False)
    assert not [c for c in ("\u202e", "\u2066", "\u200b", "\\u001b") if c in text]
    assert data["report"]["run"]["id"] == data["params"][0]["names"][0] == "inni[31mx"
    assert "inni[31mx" in data["report"]["findings"][0]["message"]
    assert "inni[31mx" in data["incidents"][0]["message"]


def test_the_page_says_what_it_does_not_draw(tmp_path: Path) -> None:
    """Rank 0 is the first of the samples' ranks: it is left out."""

    def large() -> Iterator[tuple[Message, int]]:
        for message, at in run_of(ranks=MOST_RANKS + 1, steps=3):
            if isinstance(message, Step) and message.step == 2:
                message = replace(message, hook_param=[0] * (MOST_HOOKS + 1), hook_ns=[30 * MS] * (MOST_HOOKS + 1))
            yield message, at

    write_html(record(tmp_path / "large.mcap", large()), tmp_path / "large.html", Selection())
    first, second = data_of(tmp_path / "large.html")["steps"]
    assert first["cut"] == "This shows only the 64 latest of 65 ranks."
    assert second["cut"] == "This shows only the 64 latest of 65 ranks and the first 2000 hooks of each rank."
    assert [rank["rank"] for rank in second["ranks"]] == list(range(1, MOST_RANKS + 1))
    assert len(second["ranks"][0]["hooks"]) == MOST_HOOKS
    write_html(record(tmp_path / "small.mcap"), tmp_path / "small.html", Selection())
    assert {step["cut"] for step in data_of(tmp_path / "small.html")["steps"]} == {""}


def test_steps_of_large_models_leave_ranks_out(tmp_path: Path) -> None:
    """48 steps of 64 ranks with 2,000 hooks each would take 90 MB."""

    def large() -> Iterator[tuple[Message, int]]:
        for message, at in run_of(ranks=16, steps=60):
            if isinstance(message, Step):
                message = replace(message, hook_param=[0] * MOST_HOOKS, hook_ns=[30 * MS] * MOST_HOOKS)
            yield message, at

    write_html(record(tmp_path / "large.mcap", large()), tmp_path / "large.html", Selection())
    steps = data_of(tmp_path / "large.html")["steps"]
    assert min(len(step["ranks"]) for step in steps) == LEAST_RANKS
    assert sum(len(rank["hooks"]) for step in steps for rank in step["ranks"]) <= 1.5 * MOST_MARKS
    assert (tmp_path / "large.html").stat().st_size < 10_000_000


def test_exposed_communication_names_the_rank_waited_for(tmp_path: Path) -> None:
    """Bucket 1 is launched at 65, 72 and 79 ms; from 75 on it is exposed, so 4 of 10 ms are a wait for rank 2."""

    def late() -> Iterator[tuple[Message, int]]:
        for message, at in run_of(ranks=3, steps=3):
            if isinstance(message, Step):
                message = replace(message, comm_launch=[40 * MS, (65 + 7 * message.rank) * MS])
            yield message, at

    write_html(record(tmp_path / "run.mcap", late()), tmp_path / "report.html", Selection())
    first, _, last = data_of(tmp_path / "report.html")["steps"][0]["ranks"]
    assert first["exposed"] == [[75 * MS, 79 * MS, 2], [79 * MS, 85 * MS, None]]
    assert last["exposed"] == [[79 * MS, 85 * MS, None]]
    assert first["waits"][1] == [65 * MS, 79 * MS, 2]
    assert last["waits"][1] == [79 * MS, 79 * MS, 2]


def test_the_page_says_what_is_done_with_a_parameter_group(tmp_path: Path) -> None:
    write_html(ended_recording(tmp_path / "hsdp.mcap", hsdp_run(4)), tmp_path / "report.html", Selection())
    data = data_of(tmp_path / "report.html")
    drawn = {named for (_, named), *_ in data["steps"][0]["ranks"][0]["buckets"]}
    rows = data["report"]["collectives"]
    assert drawn == {f"group {row['index']}, {USE_NAMES[row['use']]}" for row in rows}
    ((title, header, cells),) = data["collectives"]
    assert "parameter groups" in title
    assert header[:2] == ["group", "collective"]
    assert [row[1] for row in cells] == [USE_NAMES[row["use"]] for row in rows]


def test_the_page_has_the_incidents_of_the_report(tmp_path: Path) -> None:
    write_html(record(tmp_path / "run.mcap", run_of(steps=40)), tmp_path / "report.html", Selection())
    data = data_of(tmp_path / "report.html")
    assert [row["message"] for row in data["incidents"]] == [row["message"] for row in data["report"]["incidents"]]
    for row, found in zip(data["incidents"], data["report"]["incidents"], strict=True):
        assert f"{row['kind']}{row['after_kind']}" == named(found["kind"], found["message"])  # its kind comes once
    death = next(row for row in data["incidents"] if row["kind"] == "death")
    assert (death["since"], death["until"]) == (39, 39)
    assert any("rank 1 died of an exception (RuntimeError: " in text for text in death["evidence"])
    assert " % exposed transfer" in data["lost"]["sentence"]
    assert sum(data["lost"]["bar"].values()) == pytest.approx(1, abs=0.01)


def test_stacks_are_cleaned(tmp_path: Path) -> None:
    """A hang's evidence has tuples of calls, and ranks as keys."""
    evidence = Evidence(stacks=[StackGroup((1,), REORDERED, REORDERED, (REORDERED,))], call_sites={1: REORDERED})
    hang = incident_row(Incident("hang", "error", REORDERED, (1,), open=True, evidence=evidence))
    report = report_of(record(tmp_path / "run.mcap"))
    write_page(replace(report, incidents=[hang]), Drawn(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert not [c for c in ("\u202e", "\u2066", "\u200b", "\\u001b") if c in text]
    assert text.count("inni[31mx") >= 5
