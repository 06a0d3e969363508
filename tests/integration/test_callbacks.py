"""The callbacks for Lightning (DDP and FSDP2), Transformers and Accelerate, one after the other in one real job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ddpwatch import open_recording
from ddpwatch.analysis.means import ENOUGH_FULL
from ddpwatch.integrations.closing import closing, closing_of
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import OWN_COLLECTIVES, Layout, Mark, Step
from tests.support.fork_server import FRAMEWORKS
from tests.support.jobs import ROOT, SCRIPTS, Job, messages, require
from tests.support.runs import record, run_of

pytestmark = [pytest.mark.seconds(20), pytest.mark.xdist_group("callbacks")]

STEPS = {"sharded": 4, "transformers": 8, "lightning": 32, "accelerate": 16}  # in this order
CLOSED_LATER = {"sharded": 1, "transformers": 1, "lightning": 1, "accelerate": 0}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    require(FRAMEWORKS)
    folder = tmp_path_factory.mktemp("callbacks")
    environment = {"DDPWATCH_DIR": str(folder), "DDPWATCH_DETAIL": "full", "DDPWATCH_RECORD": str(folder / "run.mcap")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "ddpwatch" / "job" / "path"), str(ROOT)])
    log = folder / "log"
    with Job(SCRIPTS / "callbacks.py", str(folder), log=log, preload=FRAMEWORKS, **environment) as job:
        assert job.wait() == 0, job.output()
        return folder, job.output()


def marks(folder: Path, rank: int) -> dict[str, list[str]]:
    """A rank's marks, by the function of the script that made them."""
    found: dict[str, list[str]] = {(name := "sharded"): []}  # before its first step, there is nothing to mark
    for mark in messages(list(open_recording(folder / "run.mcap").frames()), Mark):
        if mark.rank == rank and mark.kind == "user":
            if mark.name in ("transformers", "lightning", "accelerate"):
                found[name := mark.name] = []
            else:
                found[name].append(mark.name)
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_marks(rank: int, job: tuple[Path, str]) -> None:
    found = marks(job[0], rank)
    assert found["sharded"] == ["epoch 0"]
    assert found["transformers"] == ["epoch 0", "step 4", "checkpoint", "epoch 1", "step 8", "checkpoint"]
    assert [name for name in found["lightning"] if name.startswith("epoch")] == ["epoch 0", "epoch 1"]
    assert {"step 5", "step 10", "checkpoint"} <= set(found["lightning"])
    assert "step 4" not in found["lightning"]
    if rank == 0:  # the only one that Accelerate's trackers run on
        assert {"epoch 0", "step 2", "epoch 1", "step 4"} <= set(found["accelerate"])
    assert "checkpoint" in found["accelerate"]


@pytest.mark.parametrize("framework", STEPS)
def test_the_logger_gets_the_figures(framework: str, job: tuple[Path, str]) -> None:
    """Of the run so far: all four share one, and what is trained next closes a framework's last step."""
    folder, said = job
    logged = json.loads((folder / "logged.json").read_text())[framework]
    before = list(STEPS)[: list(STEPS).index(framework)]
    count = sum(STEPS[name] for name in before) + STEPS[framework] - CLOSED_LATER[framework]
    assert logged["ddpwatch/run/world_size"] == 2
    assert logged["ddpwatch/steps/count"] == count
    known = count - 1 >= ENOUGH_FULL  # the first is warm-up
    assert ("ddpwatch/overlap/exposed_ms" in logged) is known
    assert not known or 0 < logged["ddpwatch/overlap/exposed_ms"] < logged["ddpwatch/steps/step_ms"]
    paragraph = re.search(rf"ddpwatch: 2 ranks, {count} steps\. step ([\d.]+) ms \(.*?, overlap (\d+|–) ", said)
    assert paragraph is not None
    assert float(paragraph[1]) == pytest.approx(logged["ddpwatch/steps/step_ms"], rel=0.1)
    assert (paragraph[2] != "–") is known


def test_the_last_figures_are_the_report_s(job: tuple[Path, str]) -> None:
    folder, _ = job
    logged = json.loads((folder / "logged.json").read_text())["accelerate"]
    report = report_of(folder / "run.mcap").as_json()
    assert report["steps"]["count"] == sum(STEPS.values())
    for name in ("count", "warmup"):
        assert logged[f"ddpwatch/steps/{name}"] == report["steps"][name]
    assert logged["ddpwatch/steps/step_ms"] == pytest.approx(report["steps"]["step_ms"], rel=0.1)


def test_each_framework_s_steps_are_watched(job: tuple[Path, str]) -> None:
    steps = messages(list(open_recording(job[0] / "run.mcap").frames()), Step)
    watched = [(step.rank, {*step.comm_module} - {OWN_COLLECTIVES}) for step in steps]
    modules = Counter((rank, module) for rank, modules in watched for module in modules)
    assert modules == {(rank, module): count for rank in (0, 1) for module, count in enumerate(STEPS.values())}


def test_lightning_s_callback_watches_what_fully_shard_has_sharded(job: tuple[Path, str]) -> None:
    """Its strategy's model is the Lightning module, which is not sharded itself."""
    folder, said = job
    frames = list(open_recording(folder / "run.mcap").frames())
    assert {layout.kind for layout in messages(frames, Layout) if layout.module == 0} == {"group"}
    steps = [step for step in messages(frames, Step) if "reduce_scatter" in step.comm_op]
    assert sorted((step.rank, step.step) for step in steps) == [(rank, step) for rank in (0, 1) for step in range(4)]
    assert "not watched" not in said


def test_on_a_cpu_accelerate_leaves_fsdp2_alone(job: tuple[Path, str]) -> None:
    """As docs/frameworks.md says."""
    assert job[1].count("with its plugin for FSDP2, Accelerate trains MULTI_CPU") == 2


def test_the_paragraph_and_the_figures_are_the_report_s(tmp_path: Path) -> None:
    made = report_of(record(tmp_path / "a.mcap", run_of(steps=60)))
    found, report = closing_of(made), made.as_json()
    assert found is not None
    assert found.metrics["ddpwatch/steps/step_ms"] == report["steps"]["step_ms"]
    assert found.metrics["ddpwatch/phases_ms/forward"] == report["phases_ms"]["forward"]
    assert found.metrics["ddpwatch/lost/lost_share"] == report["lost"]["lost_share"]
    assert "\n" not in found.text
    assert f"step {report['steps']['step_ms']:.1f} ms (" in found.text
    assert report["incidents"][0]["message"] in found.text


def test_unwatched_there_is_nothing_to_say() -> None:
    assert closing() is None


def test_no_framework_is_imported_before_its_class_is_used() -> None:
    code = (
        "import sys, ddpwatch.integrations as i; "
        "loaded = {'torch', 'lightning', 'transformers', 'accelerate'} & set(sys.modules); "
        "assert not loaded, loaded; assert not hasattr(i, 'KerasCallback')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
