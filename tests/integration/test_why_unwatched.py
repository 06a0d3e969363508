"""What a user reads of a real job that is not watched, or has no step: in lines, in the dashboard, and at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddpwatch.analysis.diagnosis.words.why_unwatched import JOIN, KEEP_THE_PATH, STEP, WATCHED
from ddpwatch.launch import Launch
from ddpwatch.report.build import report_of
from ddpwatch.report.text import render_report
from ddpwatch.wire.messages import Beat
from tests.support.fork_server import ADDRESS, TORCHRUN_IMPORTS, server_address
from tests.support.jobs import (
    DDPWATCH,
    JOB,
    PROBE_IMPORTS,
    SCRIPTS,
    Job,
    await_recordings,
    ddpwatch,
    forked_command,
    live,
    messages,
    read_until,
    running,
    the_run,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("run_directory")
BLIND = str(SCRIPTS / "blind.py")
PYTHON_REDUCER = "(unset torch._dynamo.config.optimize_ddp='python_reducer')"
NOTHING = "ddpwatch: nothing was watched: "
YET = "ddpwatch: nothing is watched yet: "


def blind(ranks: int, case: str, *arguments: str) -> list[str]:
    """The command of a case."""
    return forked_command(ranks, None, BLIND, case, *arguments, preload=PROBE_IMPORTS)


def said_of(command: list[str], **environment: str) -> str:
    """The last line on a job that runs to its end. The job's own last line may lack its end."""
    done = ddpwatch("run", "--headless", "--", *command, **{ADDRESS: server_address()}, **environment)
    return last_line(done.stderr)


def last_line(text: str) -> str:
    """From our prefix on."""
    return text.splitlines()[-1][text.splitlines()[-1].index("ddpwatch: ") :]


@pytest.mark.parametrize(
    ("ranks", "case", "text", "hint"),
    [
        (0, "no-update", "one process with torch, and no optimizer has stepped", STEP),
        (2, "no-update", "a process group of 2 ranks, and no optimizer has stepped", STEP),
        (2, "no-group", "2 ranks, and no process group", JOIN),
        (2, "refused", "a model in DDP or FSDP2 cannot be watched: DDP runs with the Python reducer", PYTHON_REDUCER),
    ],
)
def test_a_job_that_is_not_watched(ranks: int, case: str, text: str, hint: str) -> None:
    said = said_of(blind(ranks, case))
    assert said in (f"{NOTHING}{text}; {hint}", f"{NOTHING}{text} {hint}")


@pytest.mark.parametrize(("ranks", "case"), [(0, "alone"), (2, "by-hand"), (2, "fsdp1")])
def test_a_loop_without_ddp_or_fsdp2_is_watched(ranks: int, case: str, tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    done = ddpwatch(
        "run", "--headless", "--record", str(file), "--", *blind(ranks, case), **{ADDRESS: server_address()}
    )
    assert done.returncode == 0, done.stderr
    report = report_of(file)
    assert (report.steps.count, len(report.ranks)) == (4, max(1, ranks))


def test_a_crash_before_the_model_is_named_once() -> None:
    done = ddpwatch("run", "--headless", "--", *blind(2, "crash"), **{ADDRESS: server_address()})
    assert done.returncode == 1
    said = last_line(done.stderr)
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/data', before anything was watched"
    assert said.startswith(NOTHING)
    assert said.endswith(f"raised {error}; the job's output has the traceback")
    assert said.count("FileNotFoundError") == 1


def test_a_job_whose_pythonpath_was_replaced() -> None:
    job = [sys.executable, "-c", "print('here')"]
    assert said_of(["env", "PYTHONPATH=/elsewhere", *job]) == (
        f"{NOTHING}no Python process of the job has reported to ddpwatch; {KEEP_THE_PATH}"
    )
    options = ("--standalone", "--nproc-per-node=2", "--no-python", "env", "PYTHONPATH=/elsewhere", *job)
    assert said_of(forked_command(0, None, "torch.distributed.run", *options, preload=TORCHRUN_IMPORTS)) == (
        f"{NOTHING}torchrun has started, and none of its ranks has reported to ddpwatch; {KEEP_THE_PATH}"
    )


def test_a_job_without_torch(run_directory: Path) -> None:
    assert said_of([sys.executable, "-c", ""]) == (
        f"{NOTHING}one Python process, and torch has not been imported; {WATCHED}"
    )
    assert not list(run_directory.glob("*.startup"))


def test_lines_say_it_while_the_job_runs(tmp_path: Path) -> None:
    """And the dashboard has the same words: both ask the launch."""
    go_on, sentence = tmp_path / "go-on", "a process group of 2 ranks, and no optimizer has stepped"
    command = blind(2, "no-update", str(go_on))
    with running(*DDPWATCH, "run", "--headless", "--", *command, **{ADDRESS: server_address()}) as process:
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while YET + sentence not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], said
        go_on.touch()
        _, rest = process.communicate()
    assert process.returncode == 0
    assert last_line(rest) == f"{NOTHING}{sentence}; {STEP}"
    assert YET + sentence not in rest


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no-forward", "no forward with gradients has gone through the wrapped model; a step begins where"),
        ("no-step", "no step has ended: no optimizer has stepped between two forwards of the model; a step ends when"),
    ],
)
def test_a_run_without_steps(case: str, text: str, tmp_path: Path) -> None:
    file, go_on = tmp_path / "run.mcap", tmp_path / "go-on"
    command = ("run", "--headless", "--record", str(file), "--", *blind(2, case, str(go_on)))
    with running(*DDPWATCH, *command, **{ADDRESS: server_address(), JOB: case}) as process:
        with live(the_run()) as source:
            read_until(source, lambda frames: len({beat.rank for beat in messages(frames, Beat)}) == 2, "heartbeats")
        go_on.touch()
        _, said = process.communicate()
    assert process.returncode == 0, said
    await_recordings(case)
    report = report_of(file)
    assert report.verdict.text.startswith(f"finished after 0 steps; {text}")
    assert (report.verdict.kind, report.verdict.severity) == ("no_steps", "warn")
    assert report.verdict.text in said
    assert report.verdict.text in render_report(report)


def test_ranks_that_start_are_counted(tmp_path: Path) -> None:
    go_on, script = tmp_path / "go-on", tmp_path / "rank.py"
    script.write_text(
        "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.05)\n"
    )
    start = "".join(f"RANK={rank} LOCAL_WORLD_SIZE=3 '{sys.executable}' '{script}' '{go_on}' & " for rank in (0, 1))
    launch = Launch(["sh", "-c", f"{start} wait"], None, {})
    with launch.job(None):
        try:
            wait_for(lambda: launch.why().text.startswith("2 of 3 ranks are up"), "both ranks have reported")
            assert launch.why().text == "2 of 3 ranks are up: 1 to come, 2 importing torch"
        finally:
            go_on.touch()
    launch.forget_startup()


def test_a_class_that_is_looked_at_keeps_its_signature_and_tracebacks(tmp_path: Path) -> None:
    (script := tmp_path / "looks.py").write_text("""
import inspect, traceback
from torch.distributed.fsdp import FullyShardedDataParallel
print(inspect.signature(FullyShardedDataParallel))
try:
    FullyShardedDataParallel(7)
except BaseException:
    print(traceback.format_exc())
""")
    watched = ddpwatch("run", "--headless", "--", *forked_command(0, None, script), **{ADDRESS: server_address()})
    with Job(script, ranks=0, log=tmp_path / "log", preload=()) as job:
        assert job.wait() == 0, job.output()
    assert "FullyShardedDataParallel(7)" in job.output() or "module: " in job.output()
    assert watched.stdout == job.output()
