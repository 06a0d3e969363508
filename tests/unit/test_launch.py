"""What a run is called: after the job's script, or its module."""

from __future__ import annotations

import pytest

from ddpwatch.launch import Launch
from ddpwatch.run import rundir


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
