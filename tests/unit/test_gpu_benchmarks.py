"""The GPU benchmark's parts where there is no GPU: what they find on the simulated one, and what they write."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import drift, host_cost, illegal_access, overlap_blocking, part, timed_group

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def results(
    module: ModuleType, out: Path, simulated: Callable[[], part.Rows] | str, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    """What a part writes; on a machine without a GPU it says so, and exits with 0."""
    name = module.__name__.rpartition(".")[2]
    assert part.run(name, module.__doc__, module.on_gpu, simulated, ["--out", str(out / "deep" / "file.json")]) == 0
    shown = capsys.readouterr().out
    assert part.NO_GPU in shown
    assert not isinstance(simulated, str) or f"not simulated: {simulated}" in shown
    found = json.loads((out / "deep" / "file.json").read_text())
    assert (found["part"], found["ran"], found["why"], found["rows"]) == (name, False, part.NO_GPU, [])
    return list(found["simulated"])


def test_stamps_are_those_of_collectives_of_known_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = results(timed_group, tmp_path, timed_group.simulated, capsys)
    assert [row["known ms"] for row in rows] == list(timed_group.LENGTHS_MS)
    assert all(row["off us"] < 1 and row["collectives"] == 2 * timed_group.STEPS for row in rows)


def test_drift_is_inside_what_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drift, "STEPS", 500)
    for row in results(drift, tmp_path, drift.simulated, capsys):
        assert row["from ppm"] <= row["drift ppm"] <= row["to ppm"]
        assert abs(row["off us"]) <= row["stated us"]
        assert row["after us"] < 100
        assert row["epochs"] == 0


def test_a_job_with_collectives_that_are_made_up_has_steps_of_all_levels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DDP takes its default path through `SleepingGroup`."""
    rows = results(host_cost, tmp_path, partial(host_cost.simulated, blocks=1, steps=3), capsys)
    assert [row["level"] for row in rows] == list(host_cost.LEVELS)
    assert all(row["own us"] > 0 for row in rows)


def test_a_broken_gpu_loses_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = results(illegal_access, tmp_path, illegal_access.simulated, capsys)
    assert row["steps"] == illegal_access.STEPS_BEFORE
    assert 0 < row["unresolved"] < row["steps"]


def test_what_needs_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results(overlap_blocking, tmp_path, overlap_blocking.NOT_SIMULATED, capsys) == []


def test_every_part_is_run_and_documented(tmp_path: Path) -> None:
    shared = {"__init__", "__main__", "part", "job", "simulated"}
    assert {path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py")} - shared == set(everything.PARTS)
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert all(f"| `{name}` |" in page for name in everything.PARTS)
    assert everything.outcome(tmp_path, "drift", 1) == "failed with exit code 1"
    part.write(tmp_path / "drift.json", "drift", False, [], [])
    assert everything.outcome(tmp_path, "drift", 0) == part.NO_GPU
