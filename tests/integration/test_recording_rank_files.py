"""Jobs without a collector: every rank writes a file of its own, whatever becomes of the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir
from tests.support.jobs import ROOT, SCRIPTS, Job, ddpwatch, wait_for

pytestmark = pytest.mark.usefixtures("run_directory")
TRAINING = ["--model", "mlp:width=64", "--data", "digits", "--watch", "--inject", "slow-forward:ms=20"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks record to."""
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", str(tmp_path / "files"))
    return tmp_path / "files"


def training(tmp_path: Path, steps: int) -> Job:
    return Job(ROOT / "demo" / "train.py", *TRAINING, "--steps", str(steps), log=tmp_path / "job.log")


def report(place: Path) -> dict[str, Any]:
    done = ddpwatch("report", str(place), "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_rank_that_ends_by_itself_is_followed_by_the_next_in_its_place(folder: Path, tmp_path: Path) -> None:
    """A rank ends alike by ``sys.exit``, and where torchrun's SIGTERM makes it close: ddpwatch sees no failure."""
    about = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}
    with Job(SCRIPTS / "ends.py", ranks=0, log=tmp_path / "log", **about) as job:
        assert job.wait() == 0, job.output()
    runs = sorted(folder.iterdir(), key=lambda run: run.stat().st_mtime)
    found = [json.loads(Recording(run / "rank00000.mcap").attachments()["run.json"]) for run in runs]
    assert [run["previous"] for run in found] == [None, runs[0].name]
    said = report(runs[1])
    assert (said["run"]["previous"], said["ranks"][0]["steps"]) == (runs[0].name, 4)
    goodput = said["goodput"]
    assert (goodput["runs"], goodput["missing"]) == ([run.name for run in runs], None)
    assert goodput["seconds"]["between_runs"] > 0
    assert goodput["rank_seconds"] == pytest.approx(sum(goodput["seconds"].values()))


def test_jobs_that_record_to_one_directory(folder: Path, tmp_path: Path) -> None:
    """Nothing is overwritten, the newest is read, and what is not there is said."""
    for steps in (8, 6):
        with training(tmp_path, steps) as job:
            assert job.wait() == 0, job.output()
        assert f"`ddpwatch replay {folder} --follow`" in job.output()
        assert "to attach" not in job.output()
    runs = sorted(folder.iterdir(), key=lambda run: run.stat().st_mtime)
    assert len(runs) == 2
    assert [row["steps"] for row in report(runs[0])["ranks"]] == [8, 8]
    newest = report(folder)
    assert [row["steps"] for row in newest["ranks"]] == [6, 6]
    assert newest["run"]["id"] == runs[1].name
    assert str(runs[0]) in newest["recording"]["notes"][0]
    assert {"cut_tail", "recording_lost", "missing_ranks"}.isdisjoint(f["kind"] for f in newest["findings"])
    assert json.loads(Recording(runs[1] / "rank00001.mcap").attachments()["run.json"])["ends"]["1"]["step"] == 6
    assert list(rundir.directory().iterdir()) == []  # nobody would clean it up
    (runs[1] / "rank00001.mcap").unlink()
    missing = [f for f in report(folder)["findings"] if f["kind"] == "missing_ranks"]
    assert [f["evidence"]["ranks"] for f in missing] == [[1]]
    followed = ddpwatch("replay", str(runs[0]), "--plain", "--follow")
    assert followed.returncode == 0, followed.stderr
    words = [line.split() for line in followed.stdout.splitlines()]
    assert [first for first, *_ in words if first.isdigit()][-1] == "7"


def test_files_that_are_removed_under_way(folder: Path, tmp_path: Path) -> None:
    """Training goes on, and so does the recording; what is missing is counted."""
    with training(tmp_path, 100) as job:
        wait_for(lambda: len(list(folder.glob("*/rank*.mcap"))) == 2, "the ranks record")
        wait_for(lambda: all(file.stat().st_size > 4000 for file in folder.glob("*/*.mcap")), "their steps are there")
        shutil.rmtree(folder)
        assert job.wait() == 0, job.output()
    assert "ddpwatch does not record" in job.output()
    assert "stops watching" not in job.output()
    found = report(folder)
    assert found["recording"]["rank_files"] == [0, 1]
    assert found["recording"]["lost"] > 0
    assert [row["end"]["reason"] for row in found["ranks"]] == ["finished", "finished"]
    assert {"recording_lost", "missing_parts"} <= {finding["kind"] for finding in found["findings"]}
