"""Timings against schedules known in closed form, stamped by the script itself, and against DDP's own logger.

Every test here reads the rows of one job. The last one gives them rows with a wrong stamp, and they have to fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.step import figures
from ddpwatch.common.intervals import intersect, total, union
from ddpwatch.wire.messages import Span, Step
from tests.support.jobs import SCRIPTS, Job

pytestmark = [pytest.mark.xdist_group("truth"), pytest.mark.seconds(50)]  # one job for all
MS = 1_000_000
TOLERANCE = 5 * MS
WRONG = 10 * MS

Row = dict[str, Any]
Rows = dict[str, list[Row]]  # by case; one per rank


@pytest.fixture
def results(request: pytest.FixtureRequest, measured: list[Rows], tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Every case's rows, from one job; a rerun takes another job, as what else runs on the machine may disturb one."""
    if len(measured) < getattr(request.node, "execution_count", 1):
        measured.append(rows_of_a_job(tmp_path_factory.mktemp("truth")))
    return measured[-1]


@pytest.fixture(scope="module")
def measured() -> list[Rows]:
    return []


def rows_of_a_job(path: Path) -> Rows:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(path))
        patch.setenv("DDPWATCH_DETAIL", "full")  # every step in full
        with Job(SCRIPTS / "truth.py", log=path / "log") as job:
            assert job.wait() == 0, job.output()
        lines = [json.loads(line[7:]) for line in job.output().splitlines() if line.startswith("RESULT ")]
    return {rows[0]["case"]: rows for rows in lines}


def probe_step(row: Row, rank: int = 0) -> Step:
    sent = row["step"]
    count = len(sent["index"])
    return Step(
        rank=rank,
        step=1,
        start_ns=sent["start_ns"],
        duration_ns=sent["duration_ns"],
        spans=[Span(*span) for span in sent["spans"]],
        comm_module=sent["module"],
        comm_label=sent["index"],
        comm_bytes=[4] * count,
        comm_ready=sent["ready"],
        comm_launch=sent["launch"],
        comm_done=sent["done"],
        comm_op=sent["op"],
        comm_wait_begin=sent["wait_begin"],
        comm_wait_end=sent["wait_end"],
    )


def near(measured: float | None, expected: float) -> bool:
    return measured is not None and abs(measured - expected) <= max(TOLERANCE, 0.05 * expected)


SHARDED = ("sharded, blocking", "sharded, prefetched")
SCHEDULES = ("hidden", "exposed", "half", "out of order", "many", "two modules", "gap")


def test_communication_and_overlap(results: Rows) -> None:
    for case in SCHEDULES:
        for row in results[case]:
            comm, compute = union(map(tuple, row["comm"])), union(map(tuple, row["compute"]))
            exposed = total(comm) - total(intersect(comm, compute))
            measured = figures(probe_step(row))
            assert near(measured.comm_ns, total(comm)), case
            assert near(measured.exposed_ns, exposed), case
            assert measured.overlap == pytest.approx(1 - exposed / total(comm), abs=TOLERANCE / total(comm)), case


def test_the_schedules_are_what_their_names_say(results: Rows) -> None:
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


def test_forward_and_backward_are_where_the_script_saw_them(results: Rows) -> None:
    for case in SCHEDULES:
        for row in results[case]:
            for phase, (begin, end) in zip(("forward", "backward"), row["compute"], strict=True):
                spans = [span[1:] for span in row["step"]["spans"] if span[0] == phase]  # forwards: of each module
                assert abs(row["step"]["start_ns"] + spans[0][0] - begin) < TOLERANCE, (case, phase)
                assert abs(row["step"]["start_ns"] + spans[-1][1] - end) < TOLERANCE, (case, phase)


def test_every_bucket_is_stamped_where_it_was_launched_and_done(results: Rows) -> None:
    for case in SCHEDULES:
        for row in results[case]:
            sent = row["step"]
            measured = sorted(zip(sent["launch"], sent["done"], strict=True))
            for (launch, done), (own_launch, own_done) in zip(measured, row["comm"], strict=True):
                assert abs(sent["start_ns"] + launch - own_launch) < TOLERANCE
                assert abs(sent["start_ns"] + done - own_done) < TOLERANCE


def test_a_bucket_is_ready_when_its_last_gradient_has_come(results: Rows) -> None:
    """Here each bucket is launched as soon as it is ready: the reducer's own ready times must agree with that."""
    for case, rows in results.items():
        for row in () if case in SHARDED else rows:
            assert row["step"]["ready"], case
            for ready, launch in zip(row["step"]["ready"], row["step"]["launch"], strict=True):
                assert 0 <= launch - ready < TOLERANCE, case


def test_a_late_rank_is_late_by_what_it_slept(results: Rows) -> None:
    """Rank 1 sleeps longer before its first gradient; the other waits for it, at every bucket."""
    across = StepAcrossRanks(0)
    for rank, row in enumerate(results["late rank"]):
        across.add_step(probe_step(row, rank=rank))
    buckets = list(across.skew.buckets.values())
    assert len(buckets) == 3
    # A layer is a bucket. Of its gradients, which are noted in the order of their arrival, the last one is kept.
    punctual, late = (
        {name.partition(".")[0]: at for name, at in row["gradients"].items()} for row in results["late rank"]
    )
    slept = max(late[layer] - punctual[layer] for layer in punctual)
    assert near(across.late_ns(1), slept)
    assert near(across.wait_ns(0), slept)
    assert all(bucket.last_rank == 1 for bucket in buckets)
    assert all(bucket.transfer is not None and bucket.transfer < slept / 2 for bucket in buckets)


def test_collectives_and_waits_of_fsdp2(results: Rows) -> None:
    for case in SHARDED:
        for row in results[case]:
            step, comm, waits = probe_step(row), union(map(tuple, row["comm"])), union(map(tuple, row["waits"]))
            assert near(figures(step).comm_ns, total(comm)), case
            assert near(figures(step).exposed_ns, total(intersect(comm, waits))), case
            seen = sorted(zip(row["step"]["wait_begin"], row["step"]["wait_end"], strict=True))
            for (begin, end), (own_begin, own_end) in zip(seen, row["waits"], strict=True):
                assert abs(step.start_ns + begin - own_begin) < TOLERANCE, case
                assert abs(step.start_ns + end - own_end) < TOLERANCE, case
            for launched, (own, _) in zip(sorted(step.comm_launch), row["comm"], strict=True):
                assert abs(step.start_ns + launched - own) < TOLERANCE, case


def test_schedules_of_fsdp2_in_closed_form(results: Rows) -> None:
    """Two layers. Blocking: four gathers of 30 ms and two scatters of 20 are exposed.

    Prefetched: the first gather of the forward, the first of the backward and the scatters are exposed; the other two
    gathers take less than a layer's 50 ms.
    """
    for row in results["sharded, blocking"]:
        assert (row["step"]["op"].count("all_gather"), row["step"]["op"].count("reduce_scatter")) == (4, 2)
        assert figures(probe_step(row)).overlap == 0
        assert figures(probe_step(row)).exposed_ns >= (4 * 30 + 2 * 20) * MS  # other load can only delay it
    for row in results["sharded, prefetched"]:
        assert figures(probe_step(row)).overlap == pytest.approx(60 / 160, abs=0.1)


def test_the_envelope_of_a_step_is_what_ddps_own_logger_says(results: Rows) -> None:
    """First launch to last done; DDP's own lasts to the end of the backward where that comes later ("hidden")."""
    for case in [*SCHEDULES, "late rank"]:
        for row in results[case]:
            if case != "two modules":  # each has a logger of its own
                sent = row["step"]
                compute_end = next(end for phase, _, end in sent["spans"] if phase == "backward")
                envelope = max(*sent["done"], compute_end) - min(sent["launch"])
                assert near(envelope, row["logged"]["backward_comm_time"]), (case, row)


def test_a_gap_is_communication_to_ddps_own_logger_but_not_to_us(results: Rows) -> None:
    """The first bucket's collective is over after 5 ms, the second one's begins 95 ms later and is all exposed."""
    for row in results["gap"]:
        logged, (first, second) = row["logged"], row["comm"]
        gap, measured = second[0] - first[1], figures(probe_step(row))
        assert gap > 80 * MS
        assert near(measured.comm_ns, logged["backward_comm_time"] - gap)
        hidden = measured.comm_ns - measured.exposed_ns
        assert near(hidden, logged["backward_compute_comm_overlap_time"] - gap)
        assert hidden / measured.comm_ns < 0.4
        assert logged["backward_compute_comm_overlap_time"] / logged["backward_comm_time"] > 0.6


def test_gradients_arrive_when_a_hook_of_the_scripts_own_says(results: Rows) -> None:
    """Layers are 15 ms apart, so an offset, or the times of another parameter, would show."""
    for source in ("DDP's statistics", "Python hooks"):
        for row in results[f"hooks, by {source}"]:
            own, probed = row["own"], row["probed"]
            assert len(own) == 8
            assert probed.keys() == own.keys()
            assert all(abs(probed[name] - own[name]) < TOLERANCE for name in own), source


@pytest.mark.parametrize("ns", [WRONG, -WRONG], ids=["late", "early"])
@pytest.mark.parametrize(
    ("stamp", "test"),
    [
        ("launch", test_every_bucket_is_stamped_where_it_was_launched_and_done),
        ("launch", test_the_envelope_of_a_step_is_what_ddps_own_logger_says),
        ("done", test_every_bucket_is_stamped_where_it_was_launched_and_done),
        ("done", test_a_gap_is_communication_to_ddps_own_logger_but_not_to_us),
        ("ready", test_a_bucket_is_ready_when_its_last_gradient_has_come),
        ("forward begin", test_forward_and_backward_are_where_the_script_saw_them),
        ("forward end", test_forward_and_backward_are_where_the_script_saw_them),
        ("backward begin", test_forward_and_backward_are_where_the_script_saw_them),
        ("backward end", test_forward_and_backward_are_where_the_script_saw_them),
        ("backward end", test_communication_and_overlap),
        ("a late rank's launch", test_a_late_rank_is_late_by_what_it_slept),
        ("a wait's begin", test_collectives_and_waits_of_fsdp2),
        ("a wait's end", test_collectives_and_waits_of_fsdp2),
        ("launch", test_collectives_and_waits_of_fsdp2),
        ("a gradient", test_gradients_arrive_when_a_hook_of_the_scripts_own_says),
    ],
)
def test_a_wrong_stamp_is_noticed(results: Rows, stamp: str, test: Callable[[Rows], None], ns: int) -> None:
    """The proof that the tests above can fail."""
    rows = deepcopy(results)
    for case in rows.values():
        for rank, row in enumerate(case):
            shift(row, rank, stamp, ns)
    with pytest.raises(AssertionError):
        test(rows)


def shift(row: Row, rank: int, stamp: str, ns: int) -> None:
    """Makes one kind of stamp of a row wrong."""
    step = row["step"]
    if stamp in ("launch", "done", "ready"):
        step[stamp] = [None if at is None else at + ns for at in step[stamp]]
    elif stamp == "a late rank's launch":
        if rank == 1:
            step["launch"] = [at + ns for at in step["launch"]]
    elif stamp.startswith("a wait's"):
        edge = "wait_" + stamp.rpartition(" ")[2]
        step[edge] = [at + ns for at in step[edge]]
    elif stamp == "a gradient":
        if "probed" in row:
            row["probed"][min(row["probed"])] += ns
    else:
        phase, edge = stamp.split()
        for span in step["spans"]:
            if span[0] == phase:
                span[("begin", "end").index(edge) + 1] += ns
