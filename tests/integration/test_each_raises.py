"""An error of ddpwatch's never reaches the job, whichever of its functions it is in: they are found by code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import PATIENCE_S, SCRIPTS, Job

SHAPES = {
    "ddp": 50,
    "ddp_with_collectives": 2 * (sys.version_info >= (3, 12)),  # elsewhere, few torches show them
    "ddp_with_a_comm_hook": 2,
    "fsdp2": 20,
    "loop": 5,
}  # and how many functions at least are tried by signals
PRELOAD = (
    "ddpwatch.probe.watch", "ddpwatch.probe.fsdp", "ddpwatch.probe.loop", "ddpwatch.job.auto",
    "torch.distributed.fsdp", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
)  # fmt: skip
LEAST = 100  # functions of each shape: fewer, and the search has missed some


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name before Python 3.11")
@pytest.mark.seconds(45)
@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("run_directory")
def test_each_function_raises_once(shape: str, all_of_them: bool, tmp_path: Path) -> None:
    """Parameters, exit code and output are those of the unwatched job; what a signal brings is the job's.

    Each function that the shape calls from places of its own raises on one rank. ``make soak`` lets all of them raise
    in each shape, on both ranks at once, and brings a signal to all, not to every third.
    """
    beside = [] if all_of_them else ["--quick"] if shape == "ddp" else ["--quick", "--not-in=ddp"]
    options = {"preload": PRELOAD, "streams": tmp_path, "DDPWATCH_RECORD_DIR": str(tmp_path / "files")}
    with Job(SCRIPTS / "each_raises.py", str(tmp_path), shape, *beside, log=tmp_path / "log", **options) as job:  # type: ignore[arg-type]
        assert job.process.wait(2 * PATIENCE_S) == 0, [
            (tmp_path / str(rank) / "stderr.log").read_text() for rank in (0, 1)
        ]
    for rank in (0, 1):
        found: dict[str, Any] = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["wrong"] == []
        assert (tmp_path / str(rank) / "stdout.log").read_text() == "the job's own line\n"
        assert (tmp_path / str(rank) / "stderr.log").read_text() == ""
        assert len(found["functions"][shape]) >= LEAST
        tried = found["tried"][shape]
        assert tried.get("signal", 0) >= SHAPES[shape] / (1 if all_of_them else 3)
        assert len(found["not called again"][shape]) <= 3  # what an error before has left undone
        print(f"torch {found['torch']}, {shape}, rank {rank}: {tried.get('error', 0)} functions raised, and by a "
              f"signal {tried.get('signal', 0)}; {len(found['doors'])} are called by the job's code")  # fmt: skip


@pytest.mark.parametrize("how", ["returns", "raises", "exits", "exits hard", "forks"])
@pytest.mark.usefixtures("run_directory")
def test_what_runs_at_the_end_raises(how: str, tmp_path: Path) -> None:
    """Exit handlers, `os._exit`, and what forked children run; the job ends as the bare one does."""
    ends = []
    for files in ([], [str(tmp_path / "raised")]):
        with Job(SCRIPTS / "end_raises.py", how, *files, ranks=1, log=tmp_path / "log") as job:
            ends.append((job.process.wait(PATIENCE_S), job.output()))
    assert (tmp_path / "raised").exists()
    assert ends[1] == ends[0]
    assert "the job's own line" in ends[0][1]
