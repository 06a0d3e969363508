"""The job is sacred: the same bits with and without us, the same exceptions, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPTS, Job


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.usefixtures("run_directory")
def test_watching_changes_no_bit(ranks: int, tmp_path: Path) -> None:
    """With 3 ranks 1/n is not exact, so multiplying and dividing would differ."""
    with Job(SCRIPTS / "safety.py", ranks=ranks, log=tmp_path / "log") as job:
        assert job.wait() == 0, job.output()
    lines = [json.loads(line[7:]) for line in job.output().splitlines() if line.startswith("RESULT ")]
    results = {rows[0]["case"]: rows for rows in lines}
    refusals = results.pop("refusals")
    for row in results.pop("freed"):
        assert row["watched"][0] == row["watched"][1]
        assert row["plain"][0] == row["plain"][1]
    for row in results.pop("copies"):
        assert row["watched"] == row["plain"] == {"same": True, "foreign": False}
    assert len(results) == 20
    assert {case: [row["same"] for row in rows] for case, rows in results.items()} == {
        case: [True] * ranks for case in results
    }
    assert all(
        row["trained"]
        for case, rows in results.items()
        if case not in ("second watch()", "one rank only")
        for row in rows
    )
    for row in refusals:
        assert "before model.register_comm_hook" in row["python"]
        assert "before model.register_comm_hook" in row["builtin"]
        assert "can only be called once" in row["second"]
    assert "ddpwatch stops watching" not in job.output()
