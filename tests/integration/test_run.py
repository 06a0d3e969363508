"""`ddpwatch run -- COMMAND`: scripts that know nothing of ddpwatch, not changed by a byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpwatch.reporting import report_of
from tests.integration.jobs import SCRIPTS

pytestmark = pytest.mark.usefixtures("run_directory")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from ddpwatch.cli import main; main()", "run", *arguments]
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_tutorial_script(tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    done = run("--headless", "--record", str(file), "--", *TORCHRUN, str(SCRIPTS / "tutorial.py"), "--flag", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["trained --flag x"]
    assert "ddpwatch: watching tutorial-" in done.stderr
    report = report_of(file)
    assert [row["steps"] for row in report["ranks"]] == [25, 25]
    assert [row["end"]["reason"] for row in report["ranks"]] == ["finished", "finished"]
    assert len(report["buckets"]) >= 3
    assert not report["recording"]["cut_tail"]


def test_spawned_ranks_forked_workers_and_a_sitecustomize_that_is_already_there(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OTHER_SITECUSTOMIZE'] = 'ran'\n")
    file = tmp_path / "run.mcap"
    command = [sys.executable, str(SCRIPTS / "spawned.py"), str(tmp_path / "store")]
    done = run("--headless", "--record", str(file), "--", *command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "marker: ran" in done.stdout
    assert [row["steps"] for row in report_of(file)["ranks"]] == [12, 12]


def test_the_exit_code_is_the_jobs() -> None:
    done = run("--headless", "--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7
    assert "nothing was watched" in done.stderr
    killed = run("--headless", "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == 128 + 9


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    command = [sys.executable, str(SCRIPTS / "spawned.py"), str(tmp_path / "store")]
    done = run("--headless", "--record", str(file), "--", *command, DDPWATCH="0")
    assert done.returncode == 0, done.stderr
    assert "nothing was watched" in done.stderr
    assert not file.exists()


@pytest.mark.parametrize("arguments", [["--", "no-such-command"], ["--"], []])
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "rror: " in done.stderr
