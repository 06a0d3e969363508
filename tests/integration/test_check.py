"""A check among three ranks over Gloo: the slow rank and the one with the slow link are named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ddpwatch.check.judge import LIMITS, CheckResult
from tests.support.jobs import SCRIPTS, Job


@pytest.mark.seconds(10)
@pytest.mark.same_everywhere
def test_a_slow_rank_and_a_slow_link_are_named(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ("--seconds", "2", "--result", str(file), "--disk", str(tmp_path))
    with Job(SCRIPTS / "checked.py", *arguments, ranks=3, log=tmp_path / "log") as job:
        assert job.wait() == 0, job.output()
    result = msgspec.json.decode(file.read_bytes(), type=CheckResult)
    assert (result.ranks, result.device) == (3, "cpu")
    assert {figure.measure for figure in result.figures} | {"clock"} == LIMITS.keys()
    assert [text.split(" (")[0] for text in result.slow] == ["rank 1", "rank 2"]
    assert "): matrix products " in result.slow[0]
    assert "): link " in result.slow[1]
