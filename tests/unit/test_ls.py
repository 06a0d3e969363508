"""`ddpwatch ls` shows the verdict on each run, as text and as JSON."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from ddpwatch.cli import app
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer import listing, plain
from ddpwatch.viewer.plain import line
from tests.support.frames import beat, run, state_of
from tests.support.publisher import Publisher


def listed(publisher: Publisher, *options: str, silent: int = 0) -> Result:
    """Runs it while a collector answers, who has had so many heartbeats since the newest step."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(CliRunner().invoke, app, ["ls", *options])
        publisher.retain([*run(40, late_rank=1), *(silent * [beat(1, 40, "sync")])])
        return done.result()


@pytest.fixture
def info(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> RunInfo:
    made = RunInfo(run_id="train-1", ingest="", publish=f"ipc://{run_directory}/pub", pid=1, world_size=2, started=1.0)
    monkeypatch.setattr(rundir, "live_runs", lambda: [made])
    return made


def test_the_verdict_is_the_one_of_plain_lines(info: RunInfo) -> None:
    state = state_of(run(40, late_rank=1))
    found = state.verdict(plain.summarise(state.window()), state.diagnosis.incidents())
    said, following = found.with_others(), found.next_step
    assert re.match("rank 1 is late by 40 ms.*; also ongoing: exposed transfer$", said)
    assert line(state, state.diagnosis.incidents()).endswith(said)
    publisher = Publisher(info.publish)
    try:
        assert listed(publisher).output.splitlines()[-1] == f"train-1: {said}"
        (row,) = json.loads(listed(publisher, "--json").output)
        (later,) = json.loads(listed(publisher, "--json", silent=400).output)
    finally:
        publisher.close()
    assert row["verdict"] == {"kind": "straggler", "severity": "bad", "text": said, "next_step": following}
    assert (row["run_id"], row["world_size"], row["node"]) == ("train-1", 2, "")
    assert row["steps_per_s"] > 0
    assert later["steps_per_s"] is None  # a job that hung had its rate of before
    assert 0 < row["lost"] < 1


def test_runs_of_other_machines_are_listed_through_ssh(
    info: RunInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine is not there."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\ncase "$*" in *lost*) echo no route >&2; exit 255;; esac\ncat {tmp_path}/rows\n')
    ssh.chmod(0o700)
    monkeypatch.setenv("DDPWATCH_SSH", str(ssh))
    rows = [{**msgspec.to_builtins(info), "verdict": {"kind": "hang", "severity": "bad", "text": "it hangs"}, "new": 1}]
    (tmp_path / "rows").write_bytes(msgspec.json.encode(rows))
    nodes = ["ssh://me@a", "ssh://lost", "ssh://b:22/train", "ssh://b/other"]
    done = CliRunner().invoke(app, ["ls", *nodes, "--json"])
    assert [(row["run_id"], row["node"], row["lost"]) for row in json.loads(done.stdout)] == [
        ("train-1", "ssh://me@a", None), ("train-1", "ssh://b:22", None),
    ]  # fmt: skip
    assert done.exit_code == 1
    assert done.stderr.startswith("ddpwatch: lost: ssh ended with exit code 255: no route")
    lines = CliRunner().invoke(app, ["ls", "ssh://me@a"]).stdout.splitlines()
    assert "ssh://me@a" in lines[1]
    assert lines[2] == "train-1: it hangs"


def test_a_run_that_does_not_answer_has_no_verdict(info: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LOOK_S", 0.3)
    done = CliRunner().invoke(app, ["ls", "--json"])
    assert json.loads(done.output)[0]["verdict"] == {
        "kind": "unseen", "severity": "none", "text": "the run does not answer",
    }  # fmt: skip
    assert info.run_id in CliRunner().invoke(app, ["ls"]).output
