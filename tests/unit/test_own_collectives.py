"""What tables, reports and exports have of collectives that a job's own code issues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpwatch.analysis.buckets import BucketSummary, BucketTable
from ddpwatch.analysis.groups import Groups, Role
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.errors import UsageError
from ddpwatch.export.writers import export
from ddpwatch.metrics.figures import Meter
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.files import write_html
from ddpwatch.report.text import render_report
from ddpwatch.viewer.state import RunState
from ddpwatch.whatif.recorded import recorded_of
from ddpwatch.wire.messages import Group, Message
from tests.support import chrome_trace
from tests.support.dashboards import ended_recording
from tests.support.frames import MS, hello, state_of
from tests.support.own_collectives import LATE_MS, NBYTES, TRANSFER_MS, Issued, experts, mesh, pipeline, run_of


def rows_of(messages: Iterator[Message]) -> tuple[list[BucketSummary], RunState]:
    state, table = state_of([*messages]), BucketTable()
    while not table.update(state.recent()):
        pass
    return table.rows(state.layouts), state


def row_at(rows: list[BucketSummary], place: str) -> BucketSummary:
    (found,) = [row for row in rows if row.name == place]
    return found


def test_the_costliest_place_comes_first_and_says_who_is_last() -> None:
    rows, _ = rows_of(experts())
    first = rows[0]
    assert (first.name, first.use, first.role, first.per_step) == ("moe.py:35", "all_to_all", Role("ep", 2), 1)
    assert (first.wait, first.transfer) == (LATE_MS * MS, TRANSFER_MS * MS)
    assert (first.last_ranks, first.last_share) == ((1,), 1.0)
    assert first.exposed == (LATE_MS / 2 + TRANSFER_MS) * MS  # of two ranks, of which one waits


def test_several_collectives_of_a_place_are_one_row() -> None:
    rows, _ = rows_of(experts())
    found = row_at(rows, "train.py:88")
    assert (found.role, found.per_step, found.nbytes) == (Role("world", 2), 3, 3 * NBYTES)
    assert (found.wait, found.transfer, found.exposed) == (0, 3 * TRANSFER_MS * MS, 3 * TRANSFER_MS * MS)
    assert found.busbw == pytest.approx(NBYTES / (TRANSFER_MS / 1e3))  # 2(n-1)/n of it


def test_a_barrier_has_no_bytes_and_no_bandwidth() -> None:
    rows, _ = rows_of(experts())
    assert (row_at(rows, "train.py:90").nbytes, row_at(rows, "train.py:90").busbw) == (None, None)


def test_groups_of_one_role_are_one_row() -> None:
    rows, _ = rows_of(mesh())
    assert {(row.name, row.role, row.per_step) for row in rows} == {
        ("layers.py:12", Role("tp", 2), 2),
        ("train.py:40", Role("dp", 2), 1),
    }
    assert row_at(rows, "layers.py:12").last_ranks == (3,)
    assert row_at(rows, "layers.py:12").wait == LATE_MS * MS


def test_of_sends_and_receives_only_counts_and_bytes_are_known() -> None:
    rows, state = rows_of(pipeline())
    assert {(row.use, row.role, row.per_step, row.nbytes) for row in rows} == {
        (use, Role("pp", 2), 2, 2 * NBYTES) for use in ("send", "recv")
    }
    for row in rows:
        assert (row.wait, row.transfer, row.exposed, row.busbw, row.last_ranks) == (None, None, None, None, ())
    assert all(across.late_ns(0) is None for across in state.recent())  # a send is not the other rank's send


@pytest.mark.parametrize("replicated", [False, True], ids=["pipelines", "and their gradients averaged"])
@pytest.mark.parametrize(
    ("late", "whose"),
    [
        ({3, 1}, ["rank 1's pipeline stage", "rank 3's pipeline stage"]),
        ({3}, ["rank 3"]),
    ],
    ids=["all of a stage", "one of a stage"],
)
def test_a_slow_stage_has_more_to_do_but_a_rank_slower_than_others_of_its_stage_has_not(
    late: set[int], whose: list[str], replicated: bool
) -> None:
    def issued(rank: int) -> list[Issued]:
        gradients: Issued = ("train.py:40", "all_reduce", 7 + rank % 2, 60, 0)
        received: Issued = ("schedules _batch_p2p", "recv", 5 + rank // 2, 10, 4 if rank in late else 4 + LATE_MS)
        return [received, gradients] if replicated else [received]

    groups = {5: ("pp", (0, 1)), 6: ("pp", (2, 3)), 7: ("dp", (0, 2)), 8: ("dp", (1, 3))}
    builder = ReportBuilder()
    for message in run_of({0: ("all ranks", range(4)), **groups}, 4, 40, issued):
        builder.apply_message(message)
    said = [incident for incident in builder.report().incidents if incident.kind == "straggler"]
    assert sorted(incident.message.partition(" is late")[0] for incident in said) == whose
    assert {incident.severity for incident in said} == {"warning"}
    assert [incident.next_step.startswith("give the pipeline") for incident in said] == [len(late) > 1] * len(late)


@pytest.mark.parametrize(
    ("job", "expected"),
    [(experts, "ep 2"), (mesh, "dp 2 × tp 2"), (pipeline, "pp 2")],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_the_report_says_how_the_job_is_parallel(job: Callable[[], Iterator[Message]], expected: str) -> None:
    builder = ReportBuilder()
    for message in job():
        builder.apply_message(message)
    report = builder.report()
    assert report.run.parallelism == expected
    text = render_report(report)
    assert f"({expected}, gloo" in text
    assert "Collectives by the place" in text
    assert [row.kind for row in report.collectives] == ["call"] * len(report.collectives)
    assert {(row.role, row.group_size) for row in report.collectives} <= {
        (group.role, len(group.ranks)) for group in report.groups
    }


def test_ranks_may_issue_different_numbers_of_collectives() -> None:
    def issued(rank: int) -> list[Issued]:
        return [("train.py:1", "all_reduce", 0, 60 + turn, 0) for turn in range(2 + rank)]

    builder = ReportBuilder()
    for message in run_of({0: ("all ranks", (0, 1))}, 2, 40, issued):
        builder.apply_message(message)
    assert "repeated_reduction" not in {incident.kind for incident in builder.report().incidents}


def groups_of(world: int, *groups: tuple[str, list[int]]) -> Groups:
    found = Groups()
    found.apply_message(hello(0, world))
    for number, (kind, ranks) in enumerate(groups):
        found.apply_message(Group(rank=ranks[0], id=number, ranks=ranks, kind=kind))
    return found


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([("data parallel", [0, 1, 2, 3])], ""),  # plain DDP: the number of ranks says it
        ([("all ranks", [0, 1, 2, 3])], ""),
        ([("sharding", [0, 1]), ("sharding", [2, 3]), ("replication", [0, 2])], "replicate 2 × shard 2"),
        ([("all ranks", [0, 1, 2, 3]), ("own", [0, 1]), ("own", [2, 3])], "3 groups"),
        ([("all ranks", [0, 1, 2, 3]), ("world", [0, 1, 2, 3]), ("own", [0, 1, 2, 3])], ""),
        ([("all ranks", [0, 1, 2, 3]), ("tp", [0, 1])], "tp 2"),
        ([("data parallel", [0, 1]), ("tp", [0, 1])], "dp 2, tp 2"),  # these do not make 8 ranks
        ([("pp", [0, 1]), ("dp", [0, 2]), ("dp_pp", [0, 1, 2, 3]), ("model", [0, 1])], "pp 2 × dp 2"),
    ],
)
def test_parallelism_is_what_groups_say(groups: list[tuple[str, list[int]]], expected: str) -> None:
    world = 8 if expected == "dp 2, tp 2" else 4
    assert groups_of(world, *groups).parallelism() == expected


def test_metrics_have_operations_by_the_role_of_their_groups() -> None:
    _, state = rows_of(experts())
    values = Meter().read(state)
    waits = {sample.labels: sample.value for sample in values["collective_wait"]}
    assert waits["ep 2", "all_to_all"] == pytest.approx(LATE_MS / 1e3)
    assert set(waits) == {("ep 2", "all_to_all"), ("world 2", "all_reduce"), ("world 2", "barrier")}
    assert {sample.labels[1] for sample in values["bus_bandwidth"]} == {"moe.py:31", "moe.py:35", "train.py:88"}


def test_what_if_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="this job issues its collectives itself"):
        recorded_of(experts())


def test_a_trace_has_a_track_for_each_role(tmp_path: Path) -> None:
    export(Recording(ended_recording(tmp_path / "run.mcap", mesh())), "chrome", tmp_path / "trace.json", Selection())
    events = chrome_trace.load(tmp_path / "trace.json")
    names = chrome_trace.lane_names(events, rank=0)
    assert {"communication in dp 2", "communication in tp 2"} <= set(names)
    spans = [event for event in events if event.get("cat") == "communication" and event["pid"] == 0]
    assert {event["name"] for event in spans} == {"all-reduce layers.py:12", "all-reduce train.py:40"}
    assert len({event["tid"] for event in spans}) == 2


def test_a_page_names_operations_and_roles(tmp_path: Path) -> None:
    write_html(ended_recording(tmp_path / "run.mcap", mesh()), tmp_path / "report.html", Selection())
    page = (tmp_path / "report.html").read_text()
    assert "all-reduce in tp 2" in page
    assert "Collectives by the place that issues them" in page
