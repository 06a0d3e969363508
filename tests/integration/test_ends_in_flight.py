"""A job that ends while a collective is in flight, or while it is profiled, ends as an unwatched one."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ddpwatch.sampling.stack_order import MOST_PROFILED, StackOrder
from ddpwatch.viewer.live_source import LiveSource
from tests.support.jobs import SCRIPTS, Job, the_run, together, wait_for

ORDERS, ORDER_S = 12, 6.0
CODES = {"ValueError": 1, "SystemExit": 3, "KeyboardInterrupt": -2}


def end_of(path: Path, strategy: str, error: str, watched: str) -> tuple[int, str, list[str]]:
    """Returns rank 0's exit code, its standard output, and its standard error from the traceback on."""
    path = path / watched
    words = SCRIPTS / "ends_in_flight.py", strategy, error, watched
    path.mkdir()
    with Job(
        *words,
        log=path / "log",
        streams=path / "streams",
        tears_down=True,
        DDPWATCH_DETAIL="full",
    ) as job:
        code = job.wait()
    out, err = (path / "streams" / "0" / f"{name}.log" for name in ("stdout", "stderr"))
    return code, out.read_text(), err.read_text().partition("Traceback")[2].splitlines()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("error", CODES)
def test_its_exit_code_and_output_are_the_jobs(tmp_path: Path, run_directory: Path, strategy: str, error: str) -> None:
    ends = partial(end_of, tmp_path, strategy, error)
    bare, watched = together(lambda: ends("bare"), lambda: ends("watched"))
    assert watched == bare
    wait_for(lambda: len(list(run_directory.glob("*.last.mcap"))) == 1, "the watched job's last steps are there")
    assert bare[:2] == (CODES[error], "ends\n")
    assert bool(bare[2]) == (error != "SystemExit")


@pytest.mark.parametrize(
    ("error", "code", "last"), [("ValueError", 1, "ValueError: the job's"), ("SystemExit", 3, ""), ("_exit", 4, "")]
)
@pytest.mark.usefixtures("run_directory")
def test_it_ends_as_ever_while_it_is_profiled(tmp_path: Path, error: str, code: int, last: str) -> None:
    """torch's profiler would end it by a segmentation fault."""
    script = SCRIPTS / "ends_in_profile.py"
    with Job(script, error, log=tmp_path / "log", ranks=1, streams=tmp_path / "streams", tears_down=True) as job:
        source = LiveSource(the_run(job).publish)
        for number in range(1, ORDERS):  # a sender that wakes late has missed the steps of an order
            source.order_stacks(StackOrder(number, 0, 0, MOST_PROFILED, profiler=True))
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(ORDER_S)
                break
        assert job.wait() == code
        source.close()
    out, err = ((tmp_path / "streams" / "0" / f"{name}.log").read_text() for name in ("stdout", "stderr"))
    assert out == "ends\n"
    assert err.rstrip().endswith(last)
    assert "ddpwatch/probe" not in err
    assert bool(err) == bool(last)
