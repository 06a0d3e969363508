"""Scripts written as the docs of PyTorch, Accelerate, Lightning, Transformers and Ray teach, under `ddpwatch run`.

Not a byte of them is changed. Each runs twice, unwatched and watched: what it computes and says must be the same, and
the report must be complete. Proves docs/frameworks.md. Unwatched, Ray trains in its local mode: one cluster is enough.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ddpwatch import open_recording
from ddpwatch.analysis.step import USE_NAMES
from ddpwatch.report.build import report_of
from tests.support import ray_worker
from tests.support.fork_server import ADDRESS, EXECUTABLE, FRAMEWORKS, RAY, TORCHRUN_IMPORTS, server_address
from tests.support.forked_job import python_that_forks
from tests.support.jobs import ROOT, SCRIPTS, Job, ddpwatch, forked_command, kill, require, together, wait_for

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.seconds(30)
DOCS = ROOT / "docs" / "frameworks.md"
Report = dict[str, Any]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no_python")
ACCELERATE = (
    "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", "--no_python",
)  # fmt: skip
QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else it leaves a token in the home directory
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_local_fs_capacity_threshold": "1",  # a disk that is nearly full is nothing that these tests are about
}
# What Ray's own loggers write, and what it forwards from its processes: with times and pids, and at times too late.
RAY_S_OWN = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\t|(\x1b\[\d+m)?\((\w+ )?pid=\d+\)")


@dataclass
class Script:
    """One script: how its docs start it, and what must be found in its report.

    What starts the ranks, and these, are forked from a process that has imported what they need. That our bootstrap is
    found from ``python SCRIPT``, test_run.py shows.

    Attributes:
        launcher: The module that starts its ranks, with arguments; empty where the script starts them.
        ranks: How many are forked, as torchrun would start them; 0 where something else starts them.
        buckets: How many there are; or parameter groups.
        halved: Whether parameters are gathered in bfloat16.
    """

    name: str
    framework: str
    steps: int
    parameters: int
    launcher: tuple[str, ...] = ()
    ranks: int = 0
    buckets: int = 2
    halved: bool = False

    @property
    def preload(self) -> tuple[str, ...]:
        if self.name == "titan.py" and find_spec("lightning") is None:
            return ()  # it needs none of them, and shares the import where it can
        return {"plain.py": TORCHRUN_IMPORTS, "mingpt.py": (), "with_ray.py": RAY}.get(self.name, FRAMEWORKS)

    @property
    def twin(self) -> Path:
        return SCRIPTS / ("ray_local.py" if self.name == "with_ray.py" else f"unmodified/{self.name}")

    def command(self, saved: Path) -> list[str]:
        fork = partial(forked_command, preload=self.preload)
        program = (str(SCRIPTS / "unmodified" / self.name), str(saved))
        if "--no_python" not in self.launcher:
            return fork(self.ranks, None, *program, tears_down=True)
        return fork(0, None, *self.launcher, *fork(0, None, *program, tears_down=True))


ALL = [
    Script("plain.py", "PyTorch, `torchrun`", steps=20, parameters=8, launcher=TORCHRUN),
    Script("mingpt.py", "PyTorch, as minGPT trains", steps=20, parameters=29, ranks=2),
    Script("titan.py", "PyTorch, as torchtitan trains", steps=16, parameters=15, ranks=2, buckets=4, halved=True),
    Script("with_accelerate.py", "Accelerate, `accelerate launch`", steps=16, parameters=10, launcher=ACCELERATE),
    Script("with_lightning.py", "Lightning, `python`", steps=32, parameters=8),
    Script("with_fsdp2.py", "Lightning, `ModelParallelStrategy`", steps=16, parameters=8, ranks=2, buckets=4),
    Script("with_trainer.py", "Transformers, `Trainer`", steps=16, parameters=29, ranks=2),
    Script("with_ray.py", "Ray Train, `TorchTrainer`", steps=32, parameters=8),
]


@dataclass
class Runs:
    """The same script unwatched and watched: what it wrote to stdout and stderr, and what it saved."""

    script: Script
    plain: list[str]
    watched: list[str]
    parameters: list[dict[str, torch.Tensor]]
    report: Report
    recording: str


@pytest.fixture(
    scope="module",
    params=[pytest.param(script, id=script.name, marks=pytest.mark.xdist_group(script.name)) for script in ALL],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    script, path = request.param, tmp_path_factory.mktemp("unmodified")
    require(script.preload)
    saved, file = [path / "plain.pt", path / "watched.pt"], str(path / "run.mcap")
    address = server_address()  # starts the server, if it must, without Ray's environment
    with pytest.MonkeyPatch.context() as patch, ray(script, patch):
        patch.setenv("DDPWATCH_DIR", str(path))
        patch.setenv(ADDRESS, address)
        if script.name == "with_lightning.py":  # which starts the second rank by itself
            patch.setenv(EXECUTABLE, str(python_that_forks(path / "python", "*.py", script.preload)))
        run = ("run", "--headless", "--record", file, "--", *script.command(saved[1]))
        plain, watched = together(lambda: unwatched(script, path, saved[0]), lambda: ddpwatch(*run))
        assert watched.returncode == 0, watched.stderr
    output = [watched.stdout, watched.stderr]
    return Runs(script, plain, output, [parameters(one) for one in saved], report_of(file).as_json(), file)


@contextmanager
def ray(script: Script, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a script that starts Ray: a directory with a short path, and nothing of Ray left at the end.

    Ray starts its workers itself. What it takes for Python has them forked, with the environment that Ray gives them.
    """
    if script.name != "with_ray.py":
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="dw-"))
    executable = ray_worker.python(folder / "python", RAY)
    for name, value in {**QUIET_RAY, "RAY_TMPDIR": str(folder), EXECUTABLE: str(executable)}.items():
        patch.setenv(name, value)
    try:
        yield
        wait_for(lambda: not left_below(folder), "all of Ray has ended")
    finally:
        kill(left_below(folder))
        shutil.rmtree(folder)


def left_below(folder: Path) -> list[psutil.Process]:
    """Processes that have got this folder from the test, or have a file open there."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            opened = (file.path for file in process.open_files())
            if process.environ().get("RAY_TMPDIR") == str(folder) or any(str(folder) in path for path in opened):
                found.append(process)
    return found


def unwatched(script: Script, path: Path, saved: Path) -> list[str]:
    """The output of the same ranks, all of them forked."""
    streams = path / "streams"
    log = path / "log"
    with Job(script.twin, str(saved), log=log, preload=script.preload, streams=streams) as job:
        code = job.wait()
    said = ["".join(log.read_text() for log in streams.glob(f"*/{name}.log")) for name in ("stdout", "stderr")]
    assert code == 0, said
    return said


def parameters(file: Path) -> dict[str, torch.Tensor]:
    """What a script has saved, whatever its framework wraps it into."""
    import torch

    saved = torch.load(file, weights_only=True)
    return saved.get("state_dict", saved)


def lines(text: str) -> list[str]:
    """The job's own lines. Two ranks write into one stream, so their order is by chance."""
    return sorted(line for line in text.splitlines() if not (line.startswith("ddpwatch: ") or RAY_S_OWN.match(line)))


def test_it_computes_the_same_bits(runs: Runs) -> None:
    import torch

    plain, watched = runs.parameters
    assert len(plain) == runs.script.parameters
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_it_says_the_same(runs: Runs) -> None:
    assert runs.plain[0]
    for plain, watched in zip(runs.plain, runs.watched, strict=True):
        assert lines(watched) == lines(plain)
        assert not re.search(r"pid=\d+\)\S* ddpwatch", watched)  # a worker's warning, which Ray forwards


def test_every_step_of_every_rank_is_there(runs: Runs) -> None:
    report, steps = runs.report, runs.script.steps
    assert report["run"]["world_size"] == 2
    assert (report["run"]["backend"], report["run"]["timing_source"]) == ("gloo", "host")
    assert (report["steps"]["count"], report["steps"]["warmup"], report["steps"]["aborted"]) == (steps, 1, 0)
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    for row in report["ranks"]:
        assert (row["steps"], row["dropped"]) == (steps, 0)
        assert row["end"]["reason"] == "finished"
        assert row["late_ms_p50"] is not None
    assert not report["recording"]["cut_tail"]
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]


def test_its_line_in_the_docs(runs: Runs, request: pytest.FixtureRequest) -> None:
    row = f"| {' | '.join([runs.script.framework, *map(str, found(runs))])} |"
    text = DOCS.read_text()
    written = with_row(text, row)
    if request.config.getoption("--write-table", default=False):
        DOCS.write_text(written)
    assert written == text or DOCS.read_text() == written, "the table no longer fits: make framework-table"


def found(runs: Runs) -> Iterator[object]:
    """The cells of a line: what the report says, and which warnings there are."""
    run, steps = runs.report["run"], runs.report["steps"]
    yield from (run["model"], run["world_size"], run["backend"], steps["count"], steps["warmup"])
    yield ", ".join(name for name, ms in runs.report["phases_ms"].items() if ms > 0 and name != "other")
    uses = Counter(USE_NAMES[row["use"] or "all_reduce"] for row in of_wrapper(runs.report))
    yield ", ".join(f"{count} {use}" for use, count in uses.items())
    said = "\n".join(runs.watched).splitlines()
    warnings = [line for line in said if "ddpwatch " in line and not line.startswith("ddpwatch: ")]
    errors = [one["kind"] for one in runs.report["incidents"] + runs.report["notes"] if one["severity"] == "error"]
    yield ", ".join(warnings + errors) or "none"


def of_wrapper(report: Report) -> list[Report]:
    """Without the collectives of the job's own, which newer torches show."""
    return [row for row in report["collectives"] if row["kind"] != "call"]


def reduced(report: Report) -> list[Report]:
    """DDP's buckets, or FSDP2's parameter groups: each is reduced once. These are gathered as well, in other rows."""
    return [row for row in of_wrapper(report) if row["use"] in ("", "reduce_scatter")]


def with_row(text: str, row: str) -> str:
    """The text with a row of its table exchanged, or added at the end."""
    first = re.escape(row.split(" | ")[0])
    written, count = re.subn(rf"^{first} \|.*$", lambda _: row, text, flags=re.MULTILINE)
    return written if count else text.replace("\n<!-- end frameworks -->", f"\n{row}\n<!-- end frameworks -->")


def test_the_time_of_a_step_is_split_without_remainder(runs: Runs) -> None:
    phases = runs.report["phases_ms"]
    assert sum(phases.values()) == pytest.approx(runs.report["steps"]["step_ms"], rel=1e-9)
    assert {name for name, ms in phases.items() if not ms > 0} <= {"other"}


def test_overlap_is_measured(runs: Runs) -> None:
    overlap = runs.report["overlap"]
    assert 0 <= overlap["ratio"] <= 1
    timed = [row for row in open_recording(runs.recording).steps() if row.status == "ok"]  # others have no such figures
    assert 0 < overlap["exposed_ms"] <= overlap["comm_ms"] < max(row.step_ms for row in timed)


def test_every_bucket_has_its_parameters_and_times(runs: Runs) -> None:
    buckets = reduced(runs.report)
    assert len(buckets) == runs.script.buckets
    wrapped = "_checkpoint_wrapped_module."  # in the names of parameters, but not in those of the state
    names = [name.replace(wrapped, "") for bucket in buckets for name in bucket["params"]]
    sizes = {name.removeprefix("model."): tensor.nbytes for name, tensor in runs.parameters[0].items()}
    assert sorted(names) == sorted(sizes)
    for bucket in of_wrapper(runs.report):
        whole = sum(sizes[name.replace(wrapped, "")] for name in bucket["params"])
        assert bucket["nbytes"] == (whole // 2 if runs.script.halved and bucket not in buckets else whole)
        stamps = ("ready", "launch", "done") if bucket in buckets else ("launch", "done")
        assert all(bucket[f"{stamp}_ms_p50"] > 0 for stamp in stamps)
        assert bucket["transfer_ms_p50"] > 0
        assert bucket["last_rank"] in (0, 1)
    seen = [row for row in open_recording(runs.recording).collectives() if row.done_ms is not None]
    assert {row.rank for row in seen} == {0, 1}
    for row in seen:  # not the medians, which are over other steps for each stamp: only full steps have a done
        assert row.ready_ms is None or 0 < row.ready_ms <= row.launch_ms
        assert 0 < row.launch_ms < row.done_ms
