"""What only several ranks can show: aggregations, unused parameters, resuming, learning, and the story of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import SCRIPTS, Job

pytestmark = [pytest.mark.xdist_group("checks"), pytest.mark.seconds(15)]  # one job for all
Answers = dict[str, Any]


def ask(ranks: int, directory: Path, *checks: str) -> Answers:
    out = directory / "answers.json"
    with Job(SCRIPTS / "trainer_checks.py", str(out), *checks, ranks=ranks, log=directory / "log") as job:
        assert job.wait() == 0, job.output()
    answers: Answers = json.loads(out.read_text())
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return ask(2, tmp_path_factory.mktemp("two"), "unused", "resume", "learning", "stories")


@pytest.mark.xdist_group("aggregations")
@pytest.mark.seconds(5)
def test_aggregations_equal_their_formulas(tmp_path: Path) -> None:
    differences = ask(3, tmp_path, "aggregations")["aggregations"]
    assert set(differences) == {"weighted", "weighted by samples", "median", "trimmed mean"}
    assert max(differences.values()) < 1e-5


def test_unused_parameters_are_what_ddp_makes_of_them(answers: Answers) -> None:
    unused = answers["unused"]
    assert unused["difference"] < 1e-6
    assert unused["buckets"] > 2
    assert unused["without gradient"] == unused["ddp without gradient"] == ["idle.weight", "idle.bias"]


@pytest.mark.parametrize("strategy", ["manual", "bucketed-hooks", "ddp"])
def test_resumed_run_equals_the_uninterrupted_one(answers: Answers, strategy: str) -> None:
    assert answers["resume"][strategy]


def test_powersgd_memory_survives(answers: Answers) -> None:
    assert answers["resume"]["powersgd memory"]
    assert answers["resume"]["powersgd goes on"], "all steps but the first after the restart are compressed"
    assert answers["resume"]["powersgd"] < 0.02


def test_powersgd_learns_like_all_reduce(answers: Answers) -> None:
    loss = answers["learning"]
    assert loss["powersgd"] == pytest.approx(loss["all-reduce"], rel=0.02)


def test_manual_sends_after_the_backward(answers: Answers) -> None:
    story = answers["stories"]["manual"]
    assert "bucket_launch" not in story[: story.index("backward_compute_end")]
    assert story.count("bucket_launch") == story.count("bucket_done") == story.count("hook_fired")


@pytest.mark.parametrize("strategy", ["param-hooks", "bucketed-hooks"])
def test_hooks_send_within_the_backward(answers: Answers, strategy: str) -> None:
    story = answers["stories"][strategy]
    within = story[story.index("backward_begin") : story.index("backward_compute_end")]
    assert within.count("bucket_launch") == story.count("bucket_launch") > 1


def test_synchronous_hooks_interrupt_the_backward(answers: Answers) -> None:
    story = answers["stories"]["param-hooks-sync"]
    phases = [event for event in story if event.startswith(("forward", "backward", "wait"))]
    waits = ["wait_begin", "wait_end"] * story.count("bucket_launch")
    begin, end = ["forward_begin", "forward_end", "backward_begin"], ["backward_compute_end", "backward_end"]
    assert phases == [*begin, *waits, *end]


@pytest.mark.parametrize("strategy", ["manual", "param-hooks", "bucketed-hooks"])
def test_every_strategy_tells_its_phases(answers: Answers, strategy: str) -> None:
    phases = [event for event in answers["stories"][strategy] if event.startswith(("forward", "backward"))]
    assert phases == ["forward_begin", "forward_end", "backward_begin", "backward_compute_end", "backward_end"]
