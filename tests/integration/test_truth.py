"""Timings against schedules known in closed form, stamped by the script itself, and against DDP's own logger."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddpwatch.analysis.intervals import intersect, total, union
from ddpwatch.analysis.ranks import bucket_figures, lateness, waiting
from ddpwatch.analysis.steps import figures
from ddpwatch.messages import Span, Step
from tests.integration.jobs import SCRIPTS, Job

MS = 1_000_000
TOLERANCE = 5 * MS

Row = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    """Every case's rows, one per rank, from one job."""
    path = tmp_path_factory.mktemp("truth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(path))
        patch.setenv("DDPWATCH_SHADOW", "0")  # every step in full
        with Job(SCRIPTS / "truth.py", log=path / "log") as job:
            assert job.wait() == 0, job.output()
        lines = [json.loads(line[7:]) for line in job.output().splitlines() if line.startswith("RESULT ")]
    return {rows[0]["case"]: rows for rows in lines}


def probe_step(row: Row, which: str = "step", rank: int = 0) -> Step:
    sent = row[which]
    count = len(sent["index"])
    return Step(
        rank=rank,
        step=1,
        start_ns=sent["start_ns"],
        duration_ns=sent["duration_ns"],
        spans=[Span(*span) for span in sent["spans"]],
        bucket_module=sent["module"],
        bucket_index=sent["index"],
        bucket_bytes=[4] * count,
        bucket_ready=sent["ready"],
        bucket_launch=sent["launch"],
        bucket_done=sent["done"],
    )


def near(measured: float | None, expected: float) -> bool:
    return measured is not None and abs(measured - expected) <= max(TOLERANCE, 0.05 * expected)


SCHEDULES = ("hidden", "exposed", "half", "out of order", "many", "two modules")


@pytest.mark.parametrize("case", SCHEDULES)
def test_communication_and_overlap(results: dict[str, list[Row]], case: str) -> None:
    for row in results[case]:
        comm, compute = union(map(tuple, row["comm"])), union(map(tuple, row["compute"]))
        expected_exposed = total(comm) - total(intersect(comm, compute))
        measured = figures(probe_step(row))
        assert near(measured.comm_ns, total(comm))
        assert near(measured.exposed_ns, expected_exposed)
        assert measured.overlap == pytest.approx(1 - expected_exposed / total(comm), abs=TOLERANCE / total(comm))


def test_the_schedules_are_what_their_names_say(results: dict[str, list[Row]]) -> None:
    """In closed form: all hidden; all exposed; half; the rest in between."""
    overlap = {case: figures(probe_step(results[case][0])).overlap or 0.0 for case in SCHEDULES}
    assert overlap["hidden"] > 0.9
    assert overlap["exposed"] < 0.1
    assert 0.25 < overlap["half"] < 0.75
    assert len(results["many"][0]["comm"]) == 12
    done = [end for _, end in results["out of order"][0]["comm"]]
    assert done != sorted(done)
    # Four gradients 20 ms apart: the second module's buckets are launched at 20 and 40 ms and take 35; the first's at
    # 60 and 80, and take 50. The backward computes for 100 ms, so communication lasts from 20 to 130, 30 of it exposed.
    assert results["two modules"][0]["step"]["module"] == sorted(results["two modules"][0]["step"]["module"])[::-1]
    assert overlap["two modules"] == pytest.approx(80 / 110, abs=0.1)


def test_the_forward_is_where_the_script_saw_it(results: dict[str, list[Row]]) -> None:
    for case in SCHEDULES:
        for row in results[case]:
            sent, (begin, end) = row["step"], row["compute"][0]
            own = [span[1:] for span in sent["spans"] if span[0] == "forward"]  # of each module
            assert abs(sent["start_ns"] + own[0][0] - begin) < TOLERANCE
            assert abs(sent["start_ns"] + own[-1][1] - end) < TOLERANCE


def test_every_bucket_is_stamped_where_it_was_launched_and_done(results: dict[str, list[Row]]) -> None:
    for case in SCHEDULES:
        for row in results[case]:
            sent = row["step"]
            measured = sorted(zip(sent["launch"], sent["done"], strict=True))
            for (launch, done), (own_launch, own_done) in zip(measured, row["comm"], strict=True):
                assert abs(sent["start_ns"] + launch - own_launch) < TOLERANCE
                assert abs(sent["start_ns"] + done - own_done) < TOLERANCE


def test_a_bucket_is_ready_when_its_last_gradient_has_come(results: dict[str, list[Row]]) -> None:
    """Here each bucket is launched as soon as it is ready: the reducer's own ready times must agree with that."""
    for rows in results.values():
        for row in rows:
            assert row["step"]["ready"]
            assert all(0 <= b - a < TOLERANCE for a, b in zip(row["step"]["ready"], row["step"]["launch"], strict=True))


def test_a_late_rank_is_late_by_what_it_slept(results: dict[str, list[Row]]) -> None:
    """Rank 1 needs 40 ms longer before its first gradient; the other waits for it, at every bucket."""
    buckets = bucket_figures({rank: probe_step(row, rank=rank) for rank, row in enumerate(results["late rank"])})
    assert len(buckets) == 3
    backwards = [row["compute"][1] for row in results["late rank"]]
    slept = (backwards[1][1] - backwards[1][0]) - (backwards[0][1] - backwards[0][0])
    head_start = backwards[1][0] - backwards[0][0]
    assert slept > 30 * MS
    assert near(lateness(buckets, 1), slept + head_start)
    assert near(waiting(buckets, 0), slept + head_start)
    assert all(bucket.last_rank == 1 for bucket in buckets)
    assert all(bucket.transfer is not None and bucket.transfer < slept / 2 for bucket in buckets)


def test_the_envelope_of_a_step_is_what_ddps_own_logger_says(results: dict[str, list[Row]]) -> None:
    """DDP logs first launch to last done as one envelope, one iteration late."""
    for row in results["late rank"]:
        sent = row["before"]
        assert near(max(sent["done"]) - min(sent["launch"]), row["logged_comm_ns"])


@pytest.mark.parametrize("source", ["DDP's statistics", "Python hooks"])
def test_gradients_arrive_when_a_hook_of_the_scripts_own_says(results: dict[str, list[Row]], source: str) -> None:
    """Layers are 15 ms apart, so an offset, or the times of another parameter, would show."""
    for row in results[f"hooks, by {source}"]:
        own, probed = row["own"], row["probed"]
        assert len(own) == 8
        assert probed.keys() == own.keys()
        assert all(abs(probed[name] - own[name]) < TOLERANCE for name in own)
