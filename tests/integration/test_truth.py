"""Timings against schedules known in closed form, stamped by the script itself, and against DDP's own logger.

Every test here reads the rows of one job. Other load can come between two stamps of a step, but not of most steps: so
what is compared is the median over a case's steps. The last test gives them rows with a wrong stamp, and they fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import chain
from statistics import median
from typing import Any

import pytest

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.step import figures
from ddpwatch.common.intervals import intersect, total, union
from ddpwatch.wire.messages import Span, Step
from tests.support.jobs import SCRIPTS, Job

pytestmark = [pytest.mark.xdist_group("truth"), pytest.mark.seconds(30)]  # one job for all
MS = 1_000_000
TOLERANCE = 5 * MS
WRONG = 10 * MS

Seen = dict[str, Any]  # of one step
Row = list[Seen]  # of one rank
Rows = dict[str, list[Row]]  # by case


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Every case's rows, from one job."""
    path = tmp_path_factory.mktemp("truth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(path))
        patch.setenv("DDPWATCH_DETAIL", "full")  # every step in full
        with Job(SCRIPTS / "truth.py", log=path / "log") as job:
            assert job.wait() == 0, job.output()
        return dict(json.loads(line[7:]) for line in job.output().splitlines() if line.startswith("RESULT "))


def probe_step(seen: Seen, rank: int = 0) -> Step:
    sent = seen["step"]
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


def typical(row: Iterable[Seen], times: Callable[[Seen], Iterable[float]]) -> list[float]:
    """Each of a step's times, as it is in the median of a case's steps."""
    return [median(of_all) for of_all in zip(*map(times, row), strict=True)]


def at_once(row: Row, stamps: Callable[[Seen], Iterable[tuple[float, float]]]) -> bool:
    """Whether two stamps of the same moment typically agree, for all such pairs of a step."""
    return all(abs(apart) < TOLERANCE for apart in typical(row, lambda seen: [a - b for a, b in stamps(seen)]))


def near(row: Iterable[Seen], measured: Callable[[Seen], float | None], expected: Callable[[Seen], float]) -> bool:
    """Whether what is measured of a step is typically what is expected of it."""
    [apart] = typical(row, lambda seen: [known(measured(seen)) - expected(seen)])
    return abs(apart) <= max(TOLERANCE, 0.05 * median(map(expected, row)))


def known(ns: float | None) -> float:
    assert ns is not None
    return ns


def of_step(name: str) -> Callable[[Seen], float | None]:
    """One of our figures of a step."""
    return lambda seen: getattr(figures(probe_step(seen)), name)


def communicated(seen: Seen) -> int:
    return total(union(map(tuple, seen["comm"])))


def exposed(seen: Seen) -> int:
    comm, compute = union(map(tuple, seen["comm"])), union(map(tuple, seen["compute"]))
    return total(comm) - total(intersect(comm, compute))


SHARDED = ("sharded, blocking", "sharded, prefetched")
SCHEDULES = ("hidden", "exposed", "half", "out of order", "many", "two modules", "gap")


def test_communication_and_overlap(results: Rows) -> None:
    for case in SCHEDULES:
        for row in results[case]:
            assert near(row, of_step("comm_ns"), communicated), case
            assert near(row, of_step("exposed_ns"), exposed), case
            [apart] = typical(row, lambda seen: [overlap(seen) - 1 + exposed(seen) / communicated(seen)])
            assert abs(apart) <= TOLERANCE / median(map(communicated, row)), case


def overlap(seen: Seen) -> float:
    return figures(probe_step(seen)).overlap or 0.0


def test_the_schedules_are_what_their_names_say(results: Rows) -> None:
    """In closed form: all hidden; all exposed; half; the rest in between."""
    overlapped = {case: median(map(overlap, results[case][0])) for case in SCHEDULES}
    assert overlapped["hidden"] > 0.9
    assert overlapped["exposed"] < 0.1
    assert 0.25 < overlapped["half"] < 0.75
    assert all(len(seen["comm"]) == 12 for seen in results["many"][0])
    done = typical(results["out of order"][0], lambda seen: [end - seen["comm"][0][0] for _, end in seen["comm"]])
    assert done != sorted(done)
    # Four gradients 20 ms apart: the second module's buckets are launched at 20 and 40 ms and take 35; the first's at
    # 60 and 80, and take 50. The backward computes for 100 ms, so communication lasts from 20 to 130, 30 of it exposed.
    for seen in results["two modules"][0]:
        assert seen["step"]["module"] == sorted(seen["step"]["module"], reverse=True)
    assert overlapped["two modules"] == pytest.approx(80 / 110, abs=0.1)


def test_forward_and_backward_are_where_the_script_saw_them(results: Rows) -> None:
    for case in SCHEDULES:
        for row in results[case]:
            assert at_once(row, edges), case


def edges(seen: Seen) -> Iterable[tuple[int, int]]:
    """Ours, and the script's."""
    for phase, (begin, end) in zip(("forward", "backward"), seen["compute"], strict=True):
        spans = [span[1:] for span in seen["step"]["spans"] if span[0] == phase]  # forwards: of each module
        yield seen["step"]["start_ns"] + spans[0][0], begin
        yield seen["step"]["start_ns"] + spans[-1][1], end


def test_every_bucket_is_stamped_where_it_was_launched_and_done(results: Rows) -> None:
    for case in SCHEDULES:
        for row in results[case]:
            assert at_once(row, launches_and_ends), case


def launches_and_ends(seen: Seen) -> Iterable[tuple[int, int]]:
    """Ours, and the script's."""
    sent = seen["step"]
    for ours, own in zip(sorted(zip(sent["launch"], sent["done"], strict=True)), seen["comm"], strict=True):
        yield from zip((sent["start_ns"] + at for at in ours), own, strict=True)


def test_a_bucket_is_ready_when_its_last_gradient_has_come(results: Rows) -> None:
    """Here each bucket is launched as soon as it is ready: the reducer's own ready times must agree with that."""
    for case, rows in results.items():
        for row in () if case in SHARDED else rows:
            assert all(seen["step"]["ready"] for seen in row), case
            assert all(launch >= ready for seen in row for ready, launch in readiness(seen)), case
            assert at_once(row, readiness), case


def readiness(seen: Seen) -> Iterable[tuple[int, int]]:
    return zip(seen["step"]["ready"], seen["step"]["launch"], strict=True)


def test_a_late_rank_is_late_by_what_it_slept(results: Rows) -> None:
    """Rank 1 sleeps longer before its first gradient; the other waits for it, at every bucket."""
    steps = [both_ranks(*both) for both in zip(*results["late rank"], strict=True)]
    assert near(steps, lambda step: step["across"].late_ns(1), lambda step: step["slept"])
    assert near(steps, lambda step: step["across"].wait_ns(0), lambda step: step["slept"])
    buckets = [list(step["across"].skew.buckets.values()) for step in steps]
    assert all(len(of_one) == 3 for of_one in buckets)
    assert all(bucket.last_rank == 1 for of_one in buckets for bucket in of_one)
    transfers = typical(steps, lambda step: [known(one.transfer) for one in step["across"].skew.buckets.values()])
    assert max(transfers) < median(step["slept"] for step in steps) / 2


def both_ranks(*seen: Seen) -> Seen:
    """One step of both ranks, and by how much the second one's gradients came later."""
    across = StepAcrossRanks(0)
    for rank, one in enumerate(seen):
        across.add_step(probe_step(one, rank=rank))
    # A layer is a bucket. Of its gradients, which are noted in the order of their arrival, the last one is kept.
    punctual, late = ({name.partition(".")[0]: at for name, at in one["gradients"].items()} for one in seen)
    return {"across": across, "slept": max(late[layer] - punctual[layer] for layer in punctual)}


def test_collectives_and_waits_of_fsdp2(results: Rows) -> None:
    for case in SHARDED:
        for row in results[case]:
            assert near(row, of_step("comm_ns"), communicated), case
            assert near(row, of_step("exposed_ns"), waited_for), case
            assert at_once(row, launches_and_waits), case


def waited_for(seen: Seen) -> int:
    return total(intersect(union(map(tuple, seen["comm"])), union(map(tuple, seen["waits"]))))


def launches_and_waits(seen: Seen) -> Iterable[tuple[int, int]]:
    """Ours, and the script's."""
    sent = seen["step"]
    for ours, own in zip(sorted(zip(sent["wait_begin"], sent["wait_end"], strict=True)), seen["waits"], strict=True):
        yield from zip((sent["start_ns"] + at for at in ours), own, strict=True)
    for launched, (own_launch, _) in zip(sorted(sent["launch"]), seen["comm"], strict=True):
        yield sent["start_ns"] + launched, own_launch


def test_schedules_of_fsdp2_in_closed_form(results: Rows) -> None:
    """Two layers. Blocking: four gathers of 30 ms and two scatters of 20 are exposed.

    Prefetched: the first gather of the forward, the first of the backward and the scatters are exposed; the other two
    gathers take less than a layer's 50 ms.
    """
    for seen in chain(*results["sharded, blocking"]):
        assert (seen["step"]["op"].count("all_gather"), seen["step"]["op"].count("reduce_scatter")) == (4, 2)
        assert figures(probe_step(seen)).overlap == 0
        assert figures(probe_step(seen)).exposed_ns >= (4 * 30 + 2 * 20) * MS  # other load can only delay it
    for row in results["sharded, prefetched"]:
        assert median(map(overlap, row)) == pytest.approx(60 / 160, abs=0.1)


def test_the_envelope_of_a_step_is_what_ddps_own_logger_says(results: Rows) -> None:
    """First launch to last done; DDP's own lasts to the end of the backward where that comes later ("hidden")."""
    for case in [*SCHEDULES, "late rank"]:
        for row in results[case]:
            if case != "two modules":  # each has a logger of its own
                assert near(row, envelope, logged("backward_comm_time")), case


def envelope(seen: Seen) -> int:
    sent = seen["step"]
    compute_end = next(end for phase, _, end in sent["spans"] if phase == "backward")
    return max(*sent["done"], compute_end) - min(sent["launch"])


def logged(time: str, without: Callable[[Seen], int] = lambda seen: 0) -> Callable[[Seen], float]:
    """A time that DDP has logged of a step."""
    return lambda seen: seen["logged"][time] - without(seen)


def test_a_gap_is_communication_to_ddps_own_logger_but_not_to_us(results: Rows) -> None:
    """The first bucket's collective is over after 5 ms, the second one's begins 95 ms later and is all exposed."""
    both, overlapping = "backward_comm_time", "backward_compute_comm_overlap_time"
    for row in results["gap"]:
        assert min(map(gap, row)) > 80 * MS
        assert near(row, of_step("comm_ns"), logged(both, without=gap))
        assert near(row, hidden, logged(overlapping, without=gap))
        assert median(map(overlap, row)) < 0.4
        assert median(seen["logged"][overlapping] / seen["logged"][both] for seen in row) > 0.6


def gap(seen: Seen) -> int:
    """Between two collectives."""
    (_, done), (launch, _) = seen["comm"]
    return launch - done


def hidden(seen: Seen) -> int:
    measured = figures(probe_step(seen))
    return measured.comm_ns - measured.exposed_ns


def test_gradients_arrive_when_a_hook_of_the_scripts_own_says(results: Rows) -> None:
    """Layers are 15 ms apart, so an offset, or the times of another parameter, would show."""
    for source in ("DDP's statistics", "Python hooks"):
        for row in results[f"hooks, by {source}"]:
            for seen in row:
                assert len(seen["own"]) == 8
                assert seen["probed"].keys() == seen["own"].keys()
            assert at_once(row, lambda seen: [(seen["probed"][name], at) for name, at in seen["own"].items()]), source


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
            for seen in row:
                shift(seen, rank, stamp, ns)
    with pytest.raises(AssertionError):
        test(rows)


def shift(seen: Seen, rank: int, stamp: str, ns: int) -> None:
    """Makes one kind of stamp of a step wrong."""
    step = seen["step"]
    if stamp in ("launch", "done", "ready"):
        step[stamp] = [None if at is None else at + ns for at in step[stamp]]
    elif stamp == "a late rank's launch":
        if rank == 1:
            step["launch"] = [at + ns for at in step["launch"]]
    elif stamp.startswith("a wait's"):
        edge = "wait_" + stamp.rpartition(" ")[2]
        step[edge] = [at + ns for at in step[edge]]
    elif stamp == "a gradient":
        if "probed" in seen:
            seen["probed"][min(seen["probed"])] += ns
    else:
        phase, edge = stamp.split()
        for span in step["spans"]:
            if span[0] == phase:
                span[("begin", "end").index(edge) + 1] += ns
