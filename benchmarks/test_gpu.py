"""The GPU benchmark's parts where there is no GPU: what they find on the simulated one, and what they write."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import ahead, drift, illegal_access, overlap_blocking, overlap_known, part, stamp_cost
from benchmarks.gpu import two_ranks as shared
from benchmarks.gpu.two_ranks import Outcome
from ddpwatch.wire.messages import Step
from tests.support.frames import bye, enveloped, run

ROOT = Path(__file__).resolve().parents[1]


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
    rows = results(overlap_known, tmp_path, overlap_known.simulated, capsys)
    assert [row["known ms"] for row in rows] == list(overlap_known.LENGTHS_MS)
    assert all(row["off us"] < 1 and row["collectives"] == 2 * overlap_known.STEPS for row in rows)


def test_stamps_are_compared_with_kernels_after_the_clocks_difference() -> None:
    """The kernel of each collective starts 0.3 ms later than ddpwatch says, and its clock is 5 s behind."""
    steps = [message for message in run(20) if isinstance(message, Step) and message.rank == 0]
    ours = [span for step in steps for span in overlap_known.collectives_of(step)]
    behind, late = 5 * 10**9, 300_000
    kernels = [(start - behind + late, done - behind) for start, done in ours]
    row = overlap_known.row(5.0, steps, kernels, [(kernels[0][0], kernels[-1][1])])
    assert (row["start p5 us"], row["p95 us"], row["end p5 us"], row["p95"]) == (-300, -300, 0, 0)
    assert row["kernels' %"] == 100


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
    rows = results(stamp_cost, tmp_path, partial(stamp_cost.simulated, blocks=1, steps=3), capsys)
    assert [row["level"] for row in rows] == ["free", "unwatched", "shadow", "ok"]
    assert [row["own us"] is None for row in rows] == [True, False, False, False]


def test_a_host_that_never_waits_loses_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = results(ahead, tmp_path, ahead.simulated, capsys)
    assert [row["ahead"] for row in rows] == list(ahead.SIMULATED_STEPS)
    assert all(row["resolved"] == row["steps"] == row["ahead"] for row in rows)


def test_a_broken_gpu_loses_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = results(illegal_access, tmp_path, illegal_access.simulated, capsys)
    assert row["steps"] == illegal_access.STEPS_BEFORE
    assert 0 < row["unresolved"] < row["steps"]


def test_what_needs_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results(overlap_blocking, tmp_path, overlap_blocking.NOT_SIMULATED, capsys) == []


def test_every_part_is_run_and_documented(tmp_path: Path) -> None:
    others = {"__init__", "__main__", "part", "job", "two_ranks_job"}
    assert {path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py")} - others == set(everything.PARTS)
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert all(f"| `{name}` |" in page for name in everything.PARTS)


def test_a_part_is_said_to_be_measured_once_all_its_rows_are_there() -> None:
    whole = {"complete": True, "why": "", "rows": [{}]}
    assert everything.outcome(whole, 0) == "measured"
    assert everything.outcome(whole, 1) == "measured, outside its budget"
    assert everything.outcome({**whole, "why": part.NO_GPU}, 0) == part.NO_GPU
    assert everything.outcome({**whole, "complete": False}, 1) == "failed with exit code 1: 1 rows"
    assert everything.outcome({**whole, "complete": False}, everything.CUT) == "no time left: 1 rows"
    assert everything.outcome({}, everything.CUT) == "no time left"


STAYS = """
import json, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
out = pathlib.Path(sys.argv[2])
new = out.with_suffix(".new")
new.write_text(json.dumps({"complete": False, "why": "", "rows": [{"child": child.pid}]}))
new.replace(out)
if "long" in __file__:
    time.sleep(600)
"""


def test_a_part_that_is_cut_leaves_its_rows_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next part runs as usual; one for which no time is left says so."""
    out = tmp_path / "out"
    out.mkdir()

    class Cut(subprocess.Popen[bytes]):
        """Reaches its limit once a long part has written a row."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or "long" not in str(self.args):
                return super().wait(timeout)
            while not (out / "long.json").exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired("long", timeout)

    monkeypatch.setattr(everything, "FOLDER", tmp_path)
    monkeypatch.setattr(everything.subprocess, "Popen", Cut)
    for name in ("long", "short"):
        (tmp_path / f"{name}.py").write_text(STAYS)
    found: dict[str, dict[str, Any]] = {}
    everything.run_all(["long", "short"], out, float("inf"), found)
    everything.run_all(["late"], out, 0.0, found)
    assert {name: one["outcome"] for name, one in found.items()} == {
        "long": "no time left: 1 rows", "short": "failed with exit code 0: 1 rows", "late": "no time left",
    }  # fmt: skip
    assert json.loads((out / "results.json").read_text()) == found
    assert not any(running(found[name]["rows"][0]["child"]) for name in ("long", "short"))


def running(pid: int) -> bool:
    """Whether a process is there, and not only its exit code, which its new parent may not have read yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_job_of_two_ranks_is_judged_by_its_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal parameters are those of every rank, and a job that printed none is not equal to another such."""
    monkeypatch.setattr(shared, "Recording", lambda file: enveloped([*run(late_rank=1), bye()]))
    digests = {0: "ab" * 8, 1: "cd" * 8}
    printed = shared.printed(f"parameters 1 {digests[1]}parameters 0 {digests[0]}\n\nstep 1.000 ms\n")
    assert printed == [f"parameters {rank} {digest}" for rank, digest in digests.items()]
    row = shared.row("late host", Outcome(0, printed), Outcome(0, printed), Path("x.mcap"))
    assert (row["equal"], row["steps"], row["with times"], row["expected"], row["named"]) == (True, 80, 80, "1", "1")
    assert str(row["says"]).startswith("rank 1 is late by")
    assert not shared.row("late host", Outcome(0, printed), Outcome(0, printed[:1]), Path("x.mcap"))["equal"]
    assert not shared.row("late host", Outcome(1, []), Outcome(1, []), Path("x.mcap"))["equal"]
    assert shared.row("hang", Outcome(0, printed), Outcome(0, printed), Path("x.mcap"))["named"] == "–"
