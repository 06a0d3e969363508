"""What happens to a recording does not happen to training: parameters stay bit-identical, and the user is told."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.viewer.plain import line
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Status, Step
from tests.support.jobs import (
    ROOT,
    Frames,
    Job,
    collector_pids,
    ddpwatch,
    live,
    messages,
    read_until,
    the_run,
    wait_for,
)

pytestmark = [
    pytest.mark.same_everywhere,
    pytest.mark.usefixtures("run_directory"),
    pytest.mark.xdist_group("recording"),  # one unwatched job for all
    pytest.mark.seconds(25),
]
STEPS = 150
TRAINING = ["--model", "mlp:width=64", "--data", "digits", "--steps", str(STEPS), "--inject", "slow-forward:ms=20"]


def training(tmp_path: Path, *options: str) -> Job:
    parameters = ["--save-params", str(tmp_path / "params.pt")]
    return Job(ROOT / "demo" / "train.py", *TRAINING, *parameters, *options, log=tmp_path / "job.log")


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parameters that the job ends with when nobody watches."""
    folder = tmp_path_factory.mktemp("unwatched")
    with training(folder) as job:
        assert job.wait() == 0, job.output()
    return folder / "params.pt"


def fill_the_disk(pid: int, _: Path) -> None:
    """The collector's files may not grow any further."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))


def remove_the_directory(_: int, folder: Path) -> None:
    shutil.rmtree(folder)


def told(frames: Frames) -> bool:
    return any(status.recording_error for status in messages(frames, Status))


@pytest.mark.parametrize(
    ("strike", "words"), [(fill_the_disk, "File too large"), (remove_the_directory, "was removed")]
)
def test_a_disk_that_fails(strike: Callable[[int, Path], None], words: str, unwatched: Path, tmp_path: Path) -> None:
    file = tmp_path / "disk" / "run.mcap"
    file.parent.mkdir()
    with training(tmp_path, "--record", str(file)) as job:
        info = the_run(job)
        wait_for(lambda: file.exists() and file.stat().st_size > 4096, "the recording grows")
        strike(collector_pids(info.run_id)[0], file.parent)
        with live(info) as source:
            frames = read_until(source, told, "the loss is told")
        assert job.wait() == 0, job.output()
    state = RunState()
    for message, envelope in frames:
        state.apply_message(message, envelope.received_ns)
    assert words in line(state, []).split("recording: ")[1]
    assert same(unwatched, tmp_path / "params.pt")
    if file.exists():
        done = ddpwatch("report", str(file))
        assert done.returncode == 0, done.stderr
        assert "cut off" in done.stdout


def test_the_recorder_is_killed(unwatched: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    with training(tmp_path, "--record", str(file)) as job:
        info = the_run(job)
        with live(info) as source:
            seen = read_until(source, lambda frames: len(messages(frames, Step)) >= 20, "steps")
        wait_for(lambda: len(steps_in(file)) >= 20, "they are recorded")
        os.kill(collector_pids(info.run_id)[0], signal.SIGKILL)
        assert job.wait() == 0, job.output()
    assert same(unwatched, tmp_path / "params.pt")
    assert len(steps_in(file)) >= len(messages(seen, Step))
    done = ddpwatch("replay", str(file), "--plain")
    assert done.returncode == 0, done.stderr
    assert "cut off" in done.stderr


def steps_in(file: Path) -> list[int]:
    return [message.step for message, _ in Recording(file) if isinstance(message, Step)]


def same(one: Path, other: Path) -> bool:
    import torch

    a, b = (torch.load(path, weights_only=True) for path in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
