"""Loops in which watching has done harm before end, compile, warn and raise as if nobody watched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.fork_server import ADDRESS, server_address
from tests.support.jobs import COMPILERS, PROBE_IMPORTS, SCRIPTS, Job, ddpwatch, forked_command, together

pytestmark = [pytest.mark.seconds(15), pytest.mark.usefixtures("run_directory")]
SCRIPT = SCRIPTS / "unharmed_loops.py"
GOES_ON = (
    "compiles", "odd_optimizers", "others_know_backward", "sparse_gradients", "sees_each_function", "raises_everywhere",
)  # fmt: skip
ENDS = (
    "exits_with_a_handle", "exits_without_its_peer", "destroys_with_a_handle", "groups_come_and_go",
    "threads_have_ended",
)  # fmt: skip


@pytest.mark.parametrize("names", [GOES_ON, *((name,) for name in ENDS)], ids="-".join)
def test_it_is_as_if_nobody_watched(names: Sequence[str], tmp_path: Path) -> None:
    bare, watched = tmp_path / "bare", tmp_path / "watched"
    preload = COMPILERS if names is GOES_ON else PROBE_IMPORTS
    ends = names is not GOES_ON  # what has compiled and ends is in test_safety.py

    def unwatched() -> int:
        with Job(SCRIPT, *names, log=tmp_path / "log", preload=preload, streams=bare, tears_down=ends) as job:
            return job.wait()

    command = forked_command(2, watched, SCRIPT, *names, preload=preload, tears_down=ends)
    run = partial(ddpwatch, "run", "--headless", "--", *command, **{ADDRESS: server_address()})
    code, done = together(unwatched, run)
    assert done.returncode == code, done.stderr
    assert "2 ranks" in done.stderr  # watching them
    for rank in ("0", "1"):
        for stream in ("stdout.log", "stderr.log"):
            assert said(watched / rank / stream) == said(bare / rank / stream)
    assert code == 0


def said(path: Path) -> list[str]:
    """What a rank says, without times and process ids."""
    return re.sub(r"W\d+ [\d:.]+ \d+", "W", path.read_text()).splitlines()


def test_all_cases_are_tried() -> None:
    assert set(re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)) == {*GOES_ON, *ENDS}
