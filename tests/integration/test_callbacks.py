"""The callbacks for Lightning and Accelerate in one real job; that for Transformers with its Trainer, in this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ddpwatch
from ddpwatch.integrations.closing import Closing, closing, closing_of
from ddpwatch.messages import Mark
from ddpwatch.recording import open_recording
from ddpwatch.report.build import report_of
from tests.support.jobs import SCRIPTS, Job
from tests.support.runs import record, run_of

pytestmark = [pytest.mark.seconds(20), pytest.mark.xdist_group("callbacks")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("callbacks")
    script, preload = SCRIPTS / "callbacks.py", ("ddpwatch.probe.session", "lightning", "accelerate")
    streams = {"DDPWATCH_DIR": str(folder), "DDPWATCH_STEPS": "full"}
    with Job(script, str(folder), log=folder / "log", preload=preload, **streams) as job:
        assert job.wait() == 0, job.output()
        return folder, job.output()


def marks(folder: Path, rank: int) -> list[str]:
    frames = open_recording(folder / "run.mcap").frames()
    return [m.name for m, _ in frames if isinstance(m, Mark) and m.rank == rank and m.kind == "user"]


def test_marks(job: tuple[Path, str]) -> None:
    folder, _ = job
    for rank in (0, 1):
        found = marks(folder, rank)
        assert [name for name in found if name.startswith("epoch")][:2] == ["epoch 0", "epoch 1"]
        assert {"step 5", "step 10", "checkpoint"} <= set(found)
        assert "step 4" not in found[: found.index("epoch 1")]


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_the_logger_gets_the_figures(framework: str, job: tuple[Path, str]) -> None:
    folder, said = job
    logged = json.loads((folder / "logged.json").read_text())[framework]
    report = report_of(folder / "run.mcap")
    assert logged["ddpwatch/run/world_size"] == 2
    assert 0 < logged["ddpwatch/overlap/exposed_ms"] < logged["ddpwatch/steps/step_ms"]
    assert logged["ddpwatch/steps/warmup"] == report["steps"]["warmup"]
    assert logged["ddpwatch/steps/count"] == report["steps"]["count"]
    assert re.search(r"ddpwatch: 2 ranks, \d+ steps: [\d.]+ ms a step, overlap \d+ %", said)


def test_the_paragraph_and_the_figures_are_the_report_s(tmp_path: Path) -> None:
    report = report_of(record(tmp_path / "a.mcap", run_of(steps=60)))
    found = closing_of(report)
    assert found is not None
    assert found.metrics["ddpwatch/steps/step_ms"] == report["steps"]["step_ms"]
    assert found.metrics["ddpwatch/phases_ms/forward"] == report["phases_ms"]["forward"]
    assert found.metrics["ddpwatch/lost/lost_share"] == report["lost"]["lost_share"]
    assert "\n" not in found.text
    assert f"{report['steps']['step_ms']:.1f} ms a step" in found.text
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


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from ddpwatch.integrations import TransformersCallback

    marked: list[str] = []
    logged: dict[str, Any] = {}

    class Reporting(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            logged.update(logs)

    monkeypatch.setattr(ddpwatch, "mark", marked.append, raising=False)
    monkeypatch.setattr(
        "ddpwatch.integrations.for_transformers.closing", lambda: Closing("ddpwatch: so it was.", {"ddpwatch/x": 2.0})
    )
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=16))
    batch = {"input_ids": torch.zeros(8, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, num_train_epochs=2, save_strategy="epoch", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[batch] * 8, callbacks=[Reporting()])
    trainer.add_callback(TransformersCallback(trainer, every=4))
    trainer.train()
    assert marked == ["epoch 0", "step 4", "checkpoint", "epoch 1", "step 8", "checkpoint"]
    assert logged["ddpwatch/x"] == 2
    assert "train_runtime" in logged
