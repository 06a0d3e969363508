"""Scripts written as the docs of PyTorch, Accelerate and Lightning teach, not changed by a byte, under `ddpwatch run`.

Each runs twice, unwatched and watched: what it computes and says must be the same, and the report must be complete.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

import pytest

from ddpwatch.recording import open_recording
from tests.support.jobs import SCRIPTS, TORCHRUN, Job, ddpwatch, finished, together

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.seconds(40)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
Report = dict[str, Any]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2"]
DEFAULTS = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]


@dataclass
class Script:
    """One script: how its docs start it, and what must be found in its report."""

    name: str
    command: list[str]
    steps: int
    parameters: int
    preload: tuple[str, ...] = ()
    framework: str = "PyTorch, `torchrun`"
    forks: bool = True  # Lightning starts its second rank by itself, and prints another text where it does not


ALL = [
    Script("plain.py", [*TORCHRUN, "--nproc-per-node=2"], steps=20, parameters=8),
    Script(
        "with_accelerate.py", [*ACCELERATE, *DEFAULTS], steps=16, parameters=10, preload=("accelerate",),
        framework="Accelerate, `accelerate launch`",
    ),
    Script("with_lightning.py", [sys.executable], 32, 8, framework="Lightning, `python`", forks=False),
]  # fmt: skip


@dataclass
class Runs:
    """The same script unwatched and watched."""

    script: Script
    plain: CompletedProcess[str]
    watched: CompletedProcess[str]
    parameters: list[dict[str, torch.Tensor]]
    report: Report
    recording: str


@pytest.fixture(
    scope="module",
    params=[pytest.param(script, id=script.name, marks=pytest.mark.xdist_group(script.name)) for script in ALL],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    script, path = request.param, tmp_path_factory.mktemp("unmodified")
    command = [*script.command, str(SCRIPTS / "unmodified" / script.name)]
    saved, file = [path / "plain.pt", path / "watched.pt"], str(path / "run.mcap")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(path))
        unwatched = partial(twin, script, path) if script.forks else partial(finished, *command)
        run = ("run", "--headless", "--record", file, "--", *command, str(saved[1]))
        plain, watched = together(lambda: unwatched(str(saved[0])), lambda: ddpwatch(*run))
        assert (plain.returncode, watched.returncode) == (0, 0), plain.stderr + watched.stderr
        report = ddpwatch("report", "--json", file)
    return Runs(script, plain, watched, [parameters(name) for name in saved], json.loads(report.stdout), file)


def twin(script: Script, path: Path, saved: str) -> CompletedProcess[str]:
    """The same ranks unwatched, forked from a process that has imported their framework."""
    file, streams = SCRIPTS / "unmodified" / script.name, path / "streams"
    with Job(file, saved, log=path / "log", preload=script.preload, streams=streams) as job:
        code = job.wait()
    said = ["".join(log.read_text() for log in sorted(streams.glob(f"*/{name}.log"))) for name in ("stdout", "stderr")]
    return CompletedProcess(script.name, code, *said)


def parameters(file: Path) -> dict[str, torch.Tensor]:
    """What a script has saved, whatever its framework wraps it into."""
    import torch

    saved = torch.load(file, weights_only=True)
    return saved.get("state_dict", saved)


def lines(text: str) -> list[str]:
    """The job's own lines. Two ranks write into one stream, so their order is by chance."""
    return sorted(line for line in text.splitlines() if not line.startswith("ddpwatch: "))


def test_it_computes_the_same_bits(runs: Runs) -> None:
    import torch

    plain, watched = runs.parameters
    assert len(plain) == runs.script.parameters
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_it_says_the_same(runs: Runs) -> None:
    assert runs.plain.stdout
    assert lines(runs.watched.stdout) == lines(runs.plain.stdout)
    assert lines(runs.watched.stderr) == lines(runs.plain.stderr)


def test_every_step_of_every_rank_is_there(runs: Runs) -> None:
    report, steps = runs.report, runs.script.steps
    assert report["run"]["world_size"] == 2
    assert (report["run"]["backend"], report["run"]["timing_source"]) == ("gloo", "host")
    assert (report["steps"]["count"], report["steps"]["warmup"], report["steps"]["aborted"]) == (steps, 1, 0)
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    for row in report["ranks"]:
        assert (row["steps"], row["dropped"]) == (steps, 0)
        assert row["end"]["reason"] == "finished"
        assert row["late_ms_p50"] is not None
    assert not report["recording"]["cut_tail"]
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]


def test_its_line_in_the_docs(runs: Runs) -> None:
    run, steps, buckets = runs.report["run"], runs.report["steps"], runs.report["buckets"]
    errors = [incident["kind"] for incident in runs.report["incidents"] if incident["severity"] == "error"]
    found = (steps["count"], steps["warmup"], len(buckets), run["world_size"], run["backend"])
    cells = [runs.script.framework, run["model"], *map(str, found), ", ".join(errors) or "none"]
    assert f"| {' | '.join(cells)} |" in DOCS.read_text().splitlines()


def test_the_time_of_a_step_is_split_without_remainder(runs: Runs) -> None:
    phases = runs.report["phases_ms"]
    assert sum(phases.values()) == pytest.approx(runs.report["steps"]["step_ms"], rel=1e-9)
    assert {name for name, ms in phases.items() if not ms > 0} <= {"other"}


def test_overlap_is_measured(runs: Runs) -> None:
    overlap = runs.report["overlap"]
    assert 0 <= overlap["ratio"] <= 1
    timed = [row for row in open_recording(runs.recording).steps() if row.status == "ok"]  # others have no such figures
    assert 0 < overlap["exposed_ms"] <= overlap["comm_ms"] < max(row.step_ms for row in timed)


def test_every_bucket_has_its_parameters_and_times(runs: Runs) -> None:
    buckets = runs.report["buckets"]
    assert len(buckets) == 2
    names = [name for bucket in buckets for name in bucket["params"]]
    assert sorted(names) == sorted(runs.parameters[0])
    sizes = {name: tensor.nbytes for name, tensor in runs.parameters[0].items()}
    for bucket in buckets:
        assert bucket["nbytes"] == sum(sizes[name] for name in bucket["params"])
        assert all(bucket[f"{stamp}_ms_p50"] > 0 for stamp in ("ready", "launch", "done"))
        assert bucket["transfer_ms_p50"] > 0
        assert bucket["last_rank"] in (0, 1)
    seen = [row for row in open_recording(runs.recording).buckets() if row.done_ms is not None]
    assert {row.rank for row in seen} == {0, 1}
    for row in seen:  # not the medians, which are over other steps for each stamp: only full steps have a done
        assert row.ready_ms is None or 0 < row.ready_ms <= row.launch_ms
        assert 0 < row.launch_ms < row.done_ms
