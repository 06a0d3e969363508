"""How ranks find their collector, without one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpwatch import rundir
from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.rendezvous import JobUnwatchedError, Rendezvous

pytestmark = pytest.mark.usefixtures("run_directory")


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of collectors, none of which starts."""
    commands: list[list[str]] = []

    class Popen:
        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return commands


def recording(command: list[str]) -> Path:
    return Path(command[command.index("--record") + 1])


def test_two_jobs_below_one_ddpwatch_run_are_two_runs(
    spawned: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("DDPWATCH_RUN", "train-120000-abcd")
    runs = [Rendezvous(0, 1, 1, None, tmp_path / "run.mcap").run_id for _ in range(2)]
    assert all(run.startswith("train-120000-abcd") for run in runs)
    assert len(set(runs)) == 2
    assert [recording(command).name for command in spawned] == ["run.mcap", "run-2.mcap"]
    assert [record.message for record in caplog.records] == [
        f"ddpwatch records to {tmp_path / 'run-2.mcap'}: run.mcap exists"
    ]


def test_a_restart_has_a_recording_of_its_own(
    spawned: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPWATCH_RUN", "train-120000-abcd")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert Rendezvous(0, 1, 1, None, tmp_path / "run.mcap").run_id.endswith(".1")
    assert recording(spawned[0]).name == "run.1.mcap"


def test_a_device_is_recorded_to_as_it_is(spawned: list[list[str]]) -> None:
    Rendezvous(0, 1, 1, None, "/dev/null")
    assert recording(spawned[0]) == Path("/dev/null")


def test_a_run_id_from_the_store_is_checked(run_directory: Path) -> None:
    store = dist.HashStore()
    store.set("ddpwatch/0/1", json.dumps({"run_id": "../../x", "endpoint": "ipc:///x.in", "boot_id": ""}))
    with pytest.raises(DdpwatchError, match="not a run id"):
        Rendezvous(1, 2, 1, store, None).find()


def test_rank_0_says_once_where_it_falls_back_to(
    spawned: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DDPWATCH_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/no-such-directory")
    store = dist.HashStore()
    run_id = Rendezvous(0, 2, 1, store, None).run_id
    assert Rendezvous(1, 2, 1, store, None).find() is not None
    rundir.log(run_id).unlink()
    assert [record.message.count("XDG_RUNTIME_DIR") for record in caplog.records] == [1]


def test_where_rank_0_cannot_watch_the_others_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", "/proc/no-such-directory")
    store = dist.HashStore()
    with pytest.raises(DdpwatchError, match="no-such-directory"):
        Rendezvous(0, 2, 1, store, None)
    with pytest.raises(JobUnwatchedError):
        Rendezvous(1, 2, 1, store, None).find()
