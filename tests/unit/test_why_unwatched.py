"""The sentence on a job that is not watched, from what its processes may have said; of real jobs: in integration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpwatch.analysis.diagnosis.words.why_unwatched import PATIENCE_S, Facts, forwards_known, why_unwatched
from ddpwatch.run import startup
from tests.support.frames import beat, bye

SITECUSTOMIZE = Path(startup.__file__).parents[1] / "job" / "path" / "sitecustomize.py"
TORCHRUN = ["1 start", "1 torch", "1 launcher"]


def read(tmp_path: Path, *lines: str) -> list[startup.Process]:
    (file := tmp_path / "job.startup").write_text("".join(f"{line}\n" for line in lines))
    found = startup.read(file)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "no Python process of the job has reported to ddpwatch so far"),
        (["1 start"], "one Python process, and torch has not been imported so far"),
        (TORCHRUN, "torchrun has started, and none of its ranks has reported to ddpwatch so far"),
        (
            [*TORCHRUN, "2 start 0 4", "3 start 1 4", "2 torch", "4 start 2 4", "4 torch", "4 group 2 4"],
            "torchrun has started, and 3 of 4 ranks are up: 1 to come, 1 importing torch, "
            "1 not in a process group yet, 1 in a process group",
        ),
        # A worker of a rank has its number, and joins nothing.
        (
            ["2 start 0 1", "2 torch", "2 group 0 1", "9 start 0 1"],
            "a process group of one rank, and no optimizer has stepped so far",
        ),
        # Ranks that multiprocessing has started; the parent is none.
        (
            ["1 start", "1 torch", "2 start", "2 torch", "2 group 0 2", "3 start", "3 torch", "3 group 1 2"],
            "a process group of 2 ranks, and no optimizer has stepped so far",
        ),
        (["2 start 0 1", "2 torch", "2 group 0 1", "2 model wrapped"], "the model is wrapped, and the first report"),
        (
            ["2 model wrapped", "3 model wrapped", "3 refused no such"],
            "a model in DDP or FSDP2 cannot be watched: no such",
        ),
        (["2 start 0 1", "2 model loop"], "an optimizer has stepped, and the first report"),
        (["2 model loop", "2 refused no such"], "the loop cannot be watched: no such"),
        # torchrun's own exception says nothing that its ranks' do not.
        (
            [*TORCHRUN, "2 start 0 2", "3 start 1 2", "2 error OSError: a", "3 error OSError: a", "1 error Failed: b"],
            "ranks 0, 1 raised OSError: a, before anything was watched",
        ),
        # ddpwatch itself did not start in the ranks.
        (
            [*TORCHRUN, "2 start 0 2", "3 start 1 2", "2 refused no zmq", "3 refused no zmq"],
            "ranks 0, 1 cannot be watched: no zmq",
        ),
        (["1 start", "1 torch", "1 refused no zmq"], "the job cannot be watched: no zmq"),
        (["1 start", "1 error ModuleNotFoundError: no"], "the job raised ModuleNotFoundError: no, before anything"),
        (["1 start", "1 error OSError: x", "1 start 0 1", "1 torch"], "the job raised OSError: x"),  # a pid used again
        (["1 future word", "garbage", "2 start x y"], "3 Python processes, and torch has not been imported so far"),
    ],
)
def test_what_is_said_while_the_job_runs(tmp_path: Path, lines: list[str], text: str) -> None:
    assert why_unwatched(Facts(read(tmp_path, *lines))).text.startswith(text)


def test_a_job_that_starts_is_not_told_what_to_do() -> None:
    assert not why_unwatched(Facts([])).hint
    assert why_unwatched(Facts([], PATIENCE_S + 1)).hint
    assert why_unwatched(Facts([], over=True)).hint


def test_without_a_file_nothing_is_claimed_of_processes(tmp_path: Path) -> None:
    assert startup.read(tmp_path / "none") is None
    assert why_unwatched(Facts(over=True)).text == "no rank has reached what could be watched"


def test_an_unfinished_line_waits(tmp_path: Path) -> None:
    (file := tmp_path / "job.startup").write_text("1 start 0 2\n1 gro")
    assert startup.read(file) == [startup.Process(0, 2)]


def test_the_file_is_private_and_new(tmp_path: Path) -> None:
    startup.create(path := tmp_path / "job.startup")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="exists"):
        startup.create(path)


def test_the_bootstrap_looks_at_what_is_named_here() -> None:
    text = SITECUSTOMIZE.read_text()
    assert f'"{startup.VARIABLE}"' in text


def test_a_process_writes_no_more_than_the_file_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    startup.create(path := tmp_path / "job.startup")
    monkeypatch.setenv("DDPWATCH", "0")  # nothing is hooked into this process
    monkeypatch.setenv(startup.VARIABLE, str(path))
    space: dict[str, object] = {"__file__": str(SITECUSTOMIZE), "__name__": "other"}
    exec(compile(SITECUSTOMIZE.read_text(), str(SITECUSTOMIZE), "exec"), space)
    tell = space["_tell"]
    assert callable(tell)
    tell("group", "1 2")
    assert startup.read(path) == [startup.Process(1, 2, group=2)]
    os.truncate(path, startup.MOST_BYTES)
    tell("group", "1 2")
    assert path.stat().st_size == startup.MOST_BYTES
    path.unlink()
    tell("group", "1 2")
    os.mkfifo(path)
    tell("group", "1 2")  # waits for nobody who reads


def test_only_a_process_that_imports_torch_pays_for_the_import_hooks(tmp_path: Path) -> None:
    """The package here stands for torch, whose own imports bring in most of what the hooks do."""
    startup.create(path := tmp_path / "job.startup")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    shown = "print('wrapt' in sys.modules, 'asyncio' in sys.modules)"
    code = f"import sys; {shown}; import torch; {shown}; print(torch.__spec__.name, torch.__loader__.name)"
    environment = os.environ | {startup.VARIABLE: str(path), "PYTHONPATH": f"{SITECUSTOMIZE.parent}:{tmp_path}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert done.stdout.splitlines() == ["False False", "True True", "torch torch"]
    assert startup.read(path) == [startup.Process(torch=True)]


def test_a_process_in_which_ddpwatch_does_not_start_says_why(tmp_path: Path) -> None:
    """The package here stands for a torch with which it cannot do anything."""
    startup.create(path := tmp_path / "job.startup")
    for name, text in (("torch/optim/optimizer", ""), ("torch/optim/__init__", ""), ("torch/__init__", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    environment = os.environ | {startup.VARIABLE: str(path), "PYTHONPATH": f"{SITECUSTOMIZE.parent}:{tmp_path}"}
    environment |= {"RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-c", "import torch.optim.optimizer"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    said, _, why = done.stderr.strip().partition(": does not watch: ")
    assert (said, why_unwatched(Facts(startup.read(path), over=True)).text) == (
        "ddpwatch", f"rank 1 cannot be watched: {why}",
    )  # fmt: skip


def test_forwards_are_known_from_phases() -> None:
    known: bool | None = False
    for message, expected in (
        (beat(0, 0, "input", 0), False),
        (beat(1, 0, "forward", 0), True),
        (beat(0, 0, "input", 0), True),
        (bye(0), None),  # whose phase nobody knows: that is not evidence of none
        (beat(0, 0, "forward", 0), None),
    ):
        known = forwards_known(known, message)
        assert known is expected
