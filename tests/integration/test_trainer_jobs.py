"""Whole jobs from the command line: faults, signals, restarts, and errors before anything starts."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import ROOT, Job, wait_for

TRAIN = ROOT / "demo" / "train.py"
SMALL = ("--model", "mlp", "--data", "digits", "--batch-size", "16", "--bucket-cap-mb", "0.2", "--log-every", "1")
ENDLESS = ("--steps", "1000000")


def reached(job: Job, step: int) -> None:
    wait_for(lambda: f"step {step}/" in job.output(), f"step {step}")


def test_raise_ends_the_job_and_a_clean_one_starts_at_once(tmp_path: Path) -> None:
    faulty = (*SMALL, "--inject", "raise:rank=1,step=3", *ENDLESS)
    with Job(TRAIN, *faulty, log=tmp_path / "faulty") as job:
        assert job.wait() != 0
        assert "injected: --inject raise" in job.output()
        assert "step 4/" not in job.output()
    with Job(TRAIN, *SMALL, "--steps", "3", log=tmp_path / "clean") as job:
        assert job.wait() == 0, job.output()


def test_killed_rank_is_restarted_from_the_checkpoint(tmp_path: Path) -> None:
    """As torchrun restarts all ranks: the second attempt does not inject the fault again."""
    keep = ("--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "2")
    faulty, steps = (*SMALL, *keep, "--inject", "kill:rank=1,step=4", "--steps", "6"), []
    for attempt in ("0", "1"):
        with Job(TRAIN, *faulty, log=tmp_path / attempt, TORCHELASTIC_RESTART_COUNT=attempt) as job:
            assert (job.wait() == 0) == (attempt == "1"), job.output()
            steps += [line.split()[1] for line in job.output().splitlines() if line.startswith("step ")]
    assert steps == ["1/6", "2/6", "3/6", "3/6", "4/6", "5/6", "6/6"]


def test_hang_lasts_until_the_job_is_told_to_end(tmp_path: Path) -> None:
    with Job(TRAIN, *SMALL, "--inject", "hang:rank=1,step=3", *ENDLESS, log=tmp_path / "log") as job:
        reached(job, 2)
        ranks = job.ranks()
        wait_for(lambda: "step 2/" in job.output() and all(r.status() == "sleeping" for r in ranks), "both are stuck")
        assert "step 3/" not in job.output()
        for rank in ranks:  # as torchrun does when it gets that signal
            rank.send_signal(signal.SIGTERM)
        assert job.wait() != 0
        assert not any(rank.is_running() for rank in ranks)


def test_stopped_rank_goes_on_when_it_is_continued(tmp_path: Path) -> None:
    with Job(TRAIN, *SMALL, "--inject", "stop:rank=1,step=3", "--steps", "5", log=tmp_path / "log") as job:
        reached(job, 2)
        stopped = job.ranks()[1]
        wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, "rank 1 is stopped")
        assert "step 3/" not in job.output()
        stopped.resume()
        assert job.wait() == 0, job.output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_rank_is_told_to_stop_and_all_stop_after_the_same_step(tmp_path: Path, number: signal.Signals) -> None:
    keep = ("--checkpoint", str(tmp_path / "kept"))
    with Job(TRAIN, *SMALL, *keep, *ENDLESS, log=tmp_path / "log") as job:
        reached(job, 3)
        job.ranks()[1].send_signal(number)
        assert job.wait() == 0, job.output()
        last = int(job.output().split("stopped as asked after step ")[1].split()[0])
    saved = tmp_path / "kept" / f"step-{last:08d}"
    assert {file.name for file in saved.iterdir()} == {"train.pt", "rank-0.pt", "rank-1.pt"}


def test_a_mistake_is_one_line_and_no_process_group(tmp_path: Path) -> None:
    with Job(TRAIN, "--comm-hook", "powersgd", ranks=1, log=tmp_path / "log", streams=tmp_path) as job:
        assert job.wait() == 2
    assert (tmp_path / "0" / "stdout.log").read_text() == ""
    said = "train.py: error: powersgd compresses what ranks send each other, and there is only one rank\n"
    assert (tmp_path / "0" / "stderr.log").read_text() == said


def test_digits_are_learnt(tmp_path: Path) -> None:
    learn = ("--model", "resnet:width=16", "--data", "digits", "--steps", "100", "--batch-size", "32", "--lr", "5e-3")
    with Job(TRAIN, *learn, "--schedule", "cosine", "--evaluate", log=tmp_path / "log") as job:
        assert job.wait() == 0, job.output()
        assert float(job.output().split("accuracy ")[1]) >= 0.97
