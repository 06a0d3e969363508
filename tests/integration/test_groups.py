"""A job with two data-parallel groups: one has a slow rank, in the other one a rank skips batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpwatch.analysis.run import steps_across_ranks
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Group
from tests.integration.scripts.group_numbers import BAD_EVERY, SLOW_S, STEPS
from tests.support.jobs import SCRIPTS, Job, messages

pytestmark = [pytest.mark.xdist_group("groups"), pytest.mark.seconds(12)]  # one job for all
SKIPPED = STEPS // BAD_EVERY


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    with Job(SCRIPTS / "groups.py", str(folder / "run.mcap"), log=folder / "log", ranks=4) as job:
        assert job.wait() == 0, job.output()
    return folder / "run.mcap"


@pytest.fixture(scope="module")
def report(recording: Path) -> dict[str, Any]:
    return report_of(recording).as_json()


def last_state(recording: Path) -> RunState:
    state = RunState()
    for message, envelope in Recording(recording):
        state.apply_message(message, envelope.received_ns)
    return state


def test_groups_are_named_alike_by_all_ranks(recording: Path, report: dict[str, Any]) -> None:
    groups = [group for group in report["groups"] if group["kind"] == "data parallel"]
    assert sorted(group["ranks"] for group in groups) == [[0, 1], [2, 3]]
    assert [group["ranks"] for group in report["groups"] if group not in groups] in ([], [[0, 1, 2, 3]])  # where seen
    assert {group["backend"] for group in report["groups"]} == {"gloo"}
    assert all(1 <= group["other_collectives_per_step"] < 1.5 for group in groups)  # the flag
    ids = {tuple(group.ranks): group.id for group in messages(list(Recording(recording)), Group)}
    of_ddp = {ids[0, 1], ids[2, 3]}
    assert [[one for one in row["groups"] if one in of_ddp] for row in report["ranks"]] == [
        [ids[0, 1]], [ids[0, 1]], [ids[2, 3]], [ids[2, 3]],
    ]  # fmt: skip


def test_a_slow_rank_is_named_within_its_group(recording: Path, report: dict[str, Any]) -> None:
    found = [finding for finding in report["findings"] if finding["kind"] == "straggler"]
    assert [finding["rank"] for finding in found] == [3]
    assert "in its group (ranks 2, 3)" in found[0]["message"]
    late = [row["late_ms_p50"] for row in report["ranks"]]
    assert late[3] > SLOW_S * 1e3 * 0.9
    assert max(late[:3]) < late[3] / 3
    state = last_state(recording)
    (late_rank,) = [one for one in state.diagnosis.incidents() if one.kind == "straggler"]
    assert (late_rank.ranks, late_rank.evidence.group, late_rank.phase) == ((3,), [2, 3], "backward")
    recent = state.recent()
    assert recent
    last = {STEPS - 1: {0, 2, 3}}  # which rank 1 skips, and so it has ended before
    assert all(across.members == last.get(across.step, {0, 1, 2, 3}) for across in recent)


def test_a_rank_that_skips_batches_is_no_straggler(recording: Path, report: dict[str, Any]) -> None:
    counts = [row["steps"] for row in report["ranks"]]
    assert counts[1] == counts[0] - SKIPPED == STEPS - SKIPPED
    assert counts[2] == counts[3] == STEPS
    assert [finding["message"] for finding in report["findings"] if finding["kind"] == "step_counts"] == [
        f"the ranks count different steps: rank 1 {STEPS - SKIPPED}, rank 0 {STEPS}; "
        "they are matched by their collectives"
    ]
    compared = 0
    for across in steps_across_ranks(message for message, _ in Recording(recording)):
        seqs = {across.ranks[rank].comm_first_seq for rank in (0, 1) if rank in across.members}
        assert len(seqs - {None}) <= 1
        compared += 0 in across.skew.late
    assert compared > STEPS // 4
