"""What a run is called: after the job's script, or its module."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpwatch.launch import Launch, run_with_dashboard
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.tui.feed import AttachSpec


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc-per-node=2 src/train.py -m 5", "train"),
        ("torchrun --nproc-per-node=2 -m pkg.train --lr 1", "pkg-train"),
        ("torchrun -m --nproc-per-node=2 pkg.train", "pkg-train"),
        ("python -m pkg.train --config a.py", "pkg-train"),
        ("python -m torch.distributed.run --standalone train.py", "train"),
        ("python -m torch.distributed.run --module pkg.train", "pkg-train"),
        ("accelerate launch --module pkg", "pkg"),
        ("sh run.sh", "sh"),
        ("python -m", "python"),
    ],
)
def test_a_run_bears_the_name_of_what_trains(command: str, name: str, run_directory: object) -> None:
    assert Launch(command.split(), None, {}).name.rsplit("-", 2)[0] == name


def test_a_package_that_python_runs_gives_its_name() -> None:
    assert rundir.new_run_id("/home/a/pkg/__main__.py").startswith("pkg-")
    assert rundir.script_name("train.py") == "train.py"


@pytest.mark.parametrize(
    ("ends", "said"), [(True, "the run is over, its command is not"), (False, "the job goes on")], ids=["over", "live"]
)
def test_who_quits_is_told_what_goes_on(
    ends: bool, said: str, run_directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dashboard that is left while the command still runs: its run may be over."""
    release = run_directory / "release"
    runs = [RunInfo(run_id="train-1", ingest="", publish="", pid=1, world_size=2, started=1.0)]
    job = Launch(["sh", "-c", f"until [ -e {release} ]; do sleep 0.05; done"], None, dict(os.environ))
    monkeypatch.setattr(job, "runs", lambda: list(runs))

    def left(spec: AttachSpec) -> None:
        assert spec.list_runs()
        if ends:
            runs.clear()

    def printed(_: object, offset: int) -> int:  # the command ends once it was looked at
        release.touch()
        return offset

    monkeypatch.setattr("ddpwatch.tui.app.run_dashboard", left)
    monkeypatch.setattr("ddpwatch.launch._print_from", printed)
    assert run_with_dashboard(job) == 0
    assert f"ddpwatch: {said}; Ctrl-C ends it" in capfd.readouterr().err
