"""FSDP2 from the job to the report: its parameter groups, its waits, and the rank that is late in one of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddpwatch.analysis.run import steps_across_ranks
from ddpwatch.analysis.step import figures
from ddpwatch.common.intervals import intersect, total, union
from ddpwatch.export.writers import export
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import report_of
from ddpwatch.report.text import render_report
from ddpwatch.wire.messages import Hello, Layout, Step
from tests.support.jobs import ROOT, Job, messages

pytestmark = [pytest.mark.xdist_group("sharded"), pytest.mark.seconds(25)]  # two short jobs for all
TRAIN = ROOT / "demo" / "train.py"
MODEL = ("--strategy", "fsdp2", "--model", "gpt:width=32,heads=2,layers=4", "--steps", "40")
LATE = ("--inject", "slow-backward:rank=1,ms=120,layer=blocks.2")
GROUP = 3  # of blocks.2: the root's comes first


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A job in which all ranks are alike, and one with a late rank."""
    folder = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(folder))
        patch.setenv("DDPWATCH_DETAIL", "full")
        for name, faults in {"alike": (), "late": LATE}.items():
            with Job(TRAIN, *MODEL, *faults, "--record", str(folder / f"{name}.mcap"), log=folder / name) as job:
                assert job.wait() == 0, job.output()
    return {name: folder / f"{name}.mcap" for name in ("alike", "late")}


@pytest.fixture(scope="module")
def reports(recordings: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: report_of(file).as_json() for name, file in recordings.items()}


def test_the_parameter_groups_are_those_of_the_model(recordings: dict[str, Path]) -> None:
    frames = list(Recording(recordings["alike"]))
    layout = messages(frames, Layout)[0]
    assert layout.kind == "group"
    assert [bucket.name for bucket in layout.buckets] == ["GPT", *(f"blocks.{i}" for i in range(4))]
    assert all(layout.params[i].startswith("blocks.2.") for i in layout.buckets[GROUP].params)
    hello = messages(frames, Hello)[0]
    assert (hello.module, hello.ddp["strategy"], hello.ddp["parameter_groups"]) == ("GPT", "fsdp2", 5)


def test_every_collective_has_its_stamps(recordings: dict[str, Path]) -> None:
    """A block is gathered for the forward and for the backward, and reduced; the root's parameters stay gathered."""
    steps = [step for step in messages(list(Recording(recordings["alike"])), Step) if step.status == "ok"]
    assert len(steps) > 60  # of both ranks
    for step in steps:
        assert (step.comm_op.count("all_gather"), step.comm_op.count("reduce_scatter")) == (9, 5)
        assert step.comm_seq == list(range(14))
        assert step.comm_done == step.comm_wait_end  # each is synchronous
        assert step.comm_launch == step.comm_wait_begin
        ready = [at for op, at in zip(step.comm_op, step.comm_ready, strict=True) if op == "reduce_scatter"]
        assert None not in ready


def test_what_is_exposed_are_the_waits(recordings: dict[str, Path]) -> None:
    for across in steps_across_ranks(message for message, _ in Recording(recordings["late"])):
        for step in across.ranks.values():
            figure = figures(step)
            waits = union(
                (a, b) for a, b in zip(step.comm_wait_begin, step.comm_wait_end, strict=True) if a is not None
            )
            assert figure.exposed_ns == total(waits) == figure.comm_ns == figure.phases_ns["exposed_comm"]
            assert sum(figure.phases_ns.values()) == figure.step_ns
            compute = [(s.start, s.end) for s in step.spans if s.phase in ("forward", "backward")]
            assert not intersect(union(compute), waits)


def test_a_late_rank_is_named_with_its_parameter_group(reports: dict[str, dict[str, Any]]) -> None:
    """By what costs most: a busy machine may make a rank late elsewhere, too, or interrupt the incident."""
    stragglers = [one for one in reports["late"]["incidents"] if one["kind"] == "straggler"]
    costliest = max(stragglers, key=lambda one: one["seconds"])
    assert (costliest["ranks"], costliest["phase"], costliest["bucket"]) == ([1], "backward", GROUP)
    assert "its backward takes" in costliest["message"]
    assert f"parameter group {GROUP} (blocks.2) on" in costliest["message"]
    assert 90 < costliest["evidence"]["late_ms"] < 400
    same = [one for one in stragglers if (one["ranks"], one["bucket"]) == ([1], GROUP)]
    assert sum(one["seconds"] for one in same) > 30 * 0.09  # of the other rank


def test_ranks_that_are_alike_are_not_named(reports: dict[str, dict[str, Any]]) -> None:
    """Unless for what the machine did to them, which costs less than what was injected."""
    kinds, late = ("straggler", "drift"), reports["late"]["incidents"]
    injected = max(one["seconds"] for one in late if one["kind"] in kinds)
    named = [one for one in reports["alike"]["incidents"] if one["kind"] in kinds and not one["device"]]
    assert sum(one["seconds"] for one in named) < injected / 2


def test_reports_and_traces_name_the_groups(recordings: dict[str, Path], tmp_path: Path) -> None:
    report = report_of(recordings["alike"])
    uses = {row.use for row in report.collectives}
    assert uses == {"all_gather", "all_gather_backward", "reduce_scatter"}
    table = render_report(report).partition("FSDP2's parameter groups")[2]
    assert re.search(r"^group +size", table, re.MULTILINE)
    assert {"all-gather", "reduce-scatter"} <= set(re.findall(r"^ +collective: (\S+)$", table, re.MULTILINE))
    trace = tmp_path / "trace.json"
    export(Recording(recordings["alike"]), "chrome", trace, Selection())
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {f"group {GROUP} all-gather", f"group {GROUP} reduce-scatter"} <= names
