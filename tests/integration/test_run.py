"""`ddpwatch run -- COMMAND`: how it starts, how it ends, what it refuses. The scripts know nothing of ddpwatch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddpwatch.reporting import report_of
from tests.integration.jobs import SCRIPTS, ddpwatch

pytestmark = pytest.mark.usefixtures("run_directory")
SPAWNED = str(SCRIPTS / "unmodified" / "spawned.py")


def test_spawned_ranks_forked_workers_and_a_sitecustomize_that_is_already_there(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OTHER_SITECUSTOMIZE'] = 'ran'\n")
    file = tmp_path / "run.mcap"
    command = [sys.executable, SPAWNED, str(tmp_path / "store")]
    done = ddpwatch("run", "--headless", "--record", str(file), "--", *command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "marker: ran" in done.stdout
    assert [row["steps"] for row in report_of(file)["ranks"]] == [12, 12]


def test_the_exit_code_is_the_jobs() -> None:
    done = ddpwatch("run", "--headless", "--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7
    assert "nothing was watched" in done.stderr
    killed = ddpwatch("run", "--headless", "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == 128 + 9


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    command = [sys.executable, SPAWNED, str(tmp_path / "store")]
    done = ddpwatch("run", "--headless", "--record", str(file), "--", *command, DDPWATCH="0")
    assert done.returncode == 0, done.stderr
    assert "nothing was watched" in done.stderr
    assert not file.exists()


@pytest.mark.parametrize("arguments", [["--", "no-such-command"], ["--"], []])
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str]) -> None:
    done = ddpwatch("run", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "rror: " in done.stderr


def test_a_directory_that_others_can_read_is_refused_before_the_job_starts(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir(mode=0o755)
    command = [sys.executable, "-c", "print('the job ran')"]
    done = ddpwatch("run", "--headless", "--", *command, DDPWATCH_DIR=str(shared))
    assert done.returncode != 0
    assert done.stdout == ""
    assert "not a private directory" in done.stderr
    assert "Traceback" not in done.stderr
