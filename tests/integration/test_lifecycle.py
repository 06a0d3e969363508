"""Collectors that come and go on one host: who may remove what, who may take whose place, and how they end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch import rundir
from tests.integration.test_collector import Stage, step
from tests.support.jobs import DDPWATCH, finished, wait_for

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.fixture
def stage(run_directory: Path, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "run.mcap")
    stage.send(stage.hello(), step(1))
    wait_for(rundir.live_runs, "the run is listed")
    yield stage
    stage.close()


def test_a_viewer_in_another_pid_namespace_does_not_delete_a_live_run(stage: Stage, run_directory: Path) -> None:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to create a pid namespace")
    listed = finished(*NAMESPACE, *DDPWATCH, "ls")
    assert stage.run_id in listed.stdout
    assert (run_directory / f"{stage.run_id}.json").exists()
    assert (run_directory / f"{stage.run_id}.pub").exists()
    stage.finish()
    assert list(run_directory.glob("*.json")) == []
