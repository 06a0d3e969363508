"""Ranks that communicate in a way of their own: nobody says that they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import Step
from tests.support.jobs import SCRIPTS, Job

STEPS = 24  # of each loop
pytestmark = [pytest.mark.xdist_group("own averaging"), pytest.mark.seconds(15)]  # one job for all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    with Job(SCRIPTS / "own_averaging.py", str(folder), log=folder / "log", DDPWATCH_DETAIL="full") as job:
        assert job.wait() == 0, job.output()
    return folder


@pytest.mark.parametrize("name", ["object", "local_sgd", "idle_hook", "no_sync"])
def test_it_has_no_false_alarm(name: str, folder: Path) -> None:
    report = report_of(folder / name).as_json()
    assert report["steps"]["count"] == STEPS
    assert [incident for incident in report["incidents"] if incident["severity"] == "error"] == []
    assert report["off"] == []


def test_an_object_of_a_class_as_the_output_hides_no_backward(folder: Path) -> None:
    steps = [message for message, _ in Recording(folder / "object") if isinstance(message, Step)]
    assert len(steps) == 2 * STEPS
    for step in steps:
        assert step.comm_label == [0]
        assert {"forward", "backward", "sync", "optimizer"} <= {span.phase for span in step.spans}


def test_a_hook_that_reduces_in_another_group_reduces(folder: Path) -> None:
    steps = [message for message, _ in Recording(folder / "local_sgd") if isinstance(message, Step)]
    assert len(steps) == 2 * STEPS
    assert all(step.reduced for step in steps)
