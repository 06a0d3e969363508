"""Jobs that issue their collectives themselves: the report has the roles of groups, and what a step issues in them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scripts.any_loop_ranks import RANKS
from tests.support.fork_server import ADDRESS, server_address
from tests.support.jobs import PROBE_IMPORTS, SCRIPTS, ddpwatch, forked_command

SEES = sys.version_info >= (3, 12) or tuple(map(int, version("torch").split(".")[:2])) >= (2, 14)
pytestmark = [pytest.mark.seconds(10), pytest.mark.usefixtures("run_directory")]
STEPS = 20
# How the job is parallel, and what a step issues, by role, size and operation
JOBS = {
    "own_dp_and_tp": ("dp 2 × tp 2", {("tp", 2, "all_reduce"): 2, ("dp", 2, "all_reduce"): 4}),
    "own_mixture_of_experts": ("ep 2", {("ep", 2, "all_to_all"): 4, ("world", 2, "all_reduce"): 4}),
    "pipeline_1f1b": ("pp 2", {("pp", 2, "send"): 4, ("pp", 2, "recv"): 4}),
}
NAMED_BY_MAKERS = ("own_mixture_of_experts", "pipeline_1f1b")  # their groups have no names of torch's

# The same of jobs that have DDP's or FSDP2's wrapper, too; by kind, role, size and operation
BESIDE = {
    "mixture_of_experts": {("bucket", "dp", 2, ""): 1, ("call", "dp", 2, "all_to_all"): 4},
    "ddp_and_tp": {("bucket", "dp", 2, ""): 1, ("call", "tp", 2, "all_reduce"): 3},
    "fsdp2_and_tp": {
        ("group", "shard", 2, "all_gather"): 1,
        ("group", "shard", 2, "reduce_scatter"): 1,
        ("call", "tp", 2, "all_reduce"): 3,
    },
    "metrics_each_step": {("bucket", "dp", 2, ""): 1, ("call", "dp", 2, "all_gather"): 4},
}


def watched(name: str, file: Path, **about: str) -> dict[str, Any]:
    """Runs a job of which rank 1 is slow; its report."""
    command = forked_command(RANKS[name], None, SCRIPTS / "any_loop.py", name, preload=PROBE_IMPORTS)
    about = {ADDRESS: server_address(), "SLOW": "1", **about}
    job = ddpwatch("run", "--headless", "--record", str(file), "--", *command, **about)
    assert job.returncode == 0, job.stderr
    made = ddpwatch("report", str(file), "--json")
    assert made.returncode == 0, made.stderr
    report: dict[str, Any] = json.loads(made.stdout)
    return report


@pytest.mark.skipif(not SEES, reason="this torch and Python only count collectives")
@pytest.mark.parametrize("name", BESIDE)
def test_beside_a_wrapper_the_jobs_own_collectives_are_seen(name: str, tmp_path: Path) -> None:
    report = watched(name, tmp_path / "run.mcap", DDPWATCH_DETAIL="full")
    found: Counter[tuple[str, str, int, str]] = Counter()
    for row in report["collectives"]:
        assert row["steps"] >= STEPS - 2
        found[row["kind"], row["role"], row["group_size"], row["use"]] += row["per_step"]
    assert found == BESIDE[name]
    assert report["off"] == []


@pytest.mark.skipif(not SEES, reason="this torch and Python only count collectives")
def test_a_rank_that_is_late_within_the_forward_is_named(tmp_path: Path) -> None:
    """Also where not all steps are recorded in full: buckets alone would say that nobody is late."""
    incidents = watched("mixture_of_experts", tmp_path / "run.mcap")["incidents"]
    late = [row for row in incidents if row["kind"] == "straggler"]
    assert [row["ranks"] for row in late] == [[1]]
    assert "its forward takes" in late[0]["message"]


@pytest.mark.parametrize("name", JOBS)
def test_the_report_has_what_each_group_does(name: str, tmp_path: Path) -> None:
    report = watched(name, tmp_path / "run.mcap", DDPWATCH_DETAIL="full")
    if not SEES:
        assert report["collectives"] == []
        assert [row["feature"] for row in report["off"]] == ["collectives"]
        assert "are not seen" in report["off"][0]["message"]
        return
    parallelism, issued = JOBS[name]
    if sys.version_info < (3, 12) and name in NAMED_BY_MAKERS:
        pytest.skip("only the interpreter's events show who makes a group")
    assert report["run"]["parallelism"] == parallelism
    found: Counter[tuple[str, int, str]] = Counter()
    for row in report["collectives"]:
        assert (row["kind"], row["steps"]) == ("call", STEPS - 1)
        found[row["role"], row["group_size"], row["use"]] += row["per_step"]
    assert found == issued
    roles = {(row["role"], len(row["ranks"])) for row in report["groups"]}
    assert {(role, size) for role, size, _ in issued} <= roles
    known = [row for row in report["collectives"] if row["use"] not in ("send", "recv")]
    assert all(row["wait_ms_p50"] is not None and row["last_ranks"] for row in known)
    assert all(row["busbw_gbps_p50"] is None for row in report["collectives"] if row not in known)
    late = [row["ranks"] for row in report["incidents"] if row["kind"] == "straggler"]
    assert sys.version_info < (3, 12) or [1] in late, report["incidents"]  # else nobody sees it wait
