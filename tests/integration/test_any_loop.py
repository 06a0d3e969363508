"""Jobs that train in their own way, unwatched and watched: the same digests, output and exit code."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from tests.integration.scripts.any_loop_ranks import RANKS
from tests.support.fork_server import ADDRESS, server_address
from tests.support.jobs import PROBE_IMPORTS, SCRIPTS, Job, ddpwatch, forked_command, require, together

pytestmark = [pytest.mark.seconds(10), pytest.mark.usefixtures("run_directory")]
NEEDS = {name: ("deepspeed",) for name in RANKS if name.startswith("deepspeed")}


@pytest.mark.parametrize("name", RANKS)
def test_it_trains_as_if_nobody_watched(name: str, tmp_path: Path) -> None:
    require(NEEDS.get(name, ()))
    script, ranks = SCRIPTS / "any_loop.py", RANKS[name]
    command = forked_command(ranks, None, script, name, preload=PROBE_IMPORTS)
    watch = partial(ddpwatch, "run", "--headless", "--", *command)

    def unwatched() -> str:
        with Job(script, name, log=tmp_path / "log", ranks=ranks) as job:
            assert job.wait() == 0, job.output()
            return job.output()

    plain, watched = together(unwatched, partial(watch, **{ADDRESS: server_address()}))
    assert watched.returncode == 0, watched.stderr
    assert digests(plain) == digests(watched.stdout)
    assert len(digests(plain)) == ranks


def digests(output: str) -> list[str]:
    """What ranks print; lines of two ranks may run into each other."""
    return sorted(re.findall(r"rank \d [0-9a-f]{16}", output))


def test_all_jobs_are_tried() -> None:
    script = (SCRIPTS / "any_loop.py").read_text()
    assert re.findall(r"^@job\ndef (\w+)", script, re.MULTILINE) == list(RANKS)
