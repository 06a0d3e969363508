"""Figures of steps, ranks and runs against schedules worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.attachments import ATTACHED_STEPS, AttachmentBuilder
from ddpwatch.analysis.buckets import bus_bandwidths
from ddpwatch.analysis.findings import findings
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.analysis.run import steps_across_ranks
from ddpwatch.analysis.step import PHASES, claims_of, figures, split
from ddpwatch.common.text import clean, counted, percent, size
from ddpwatch.report.build import report_of
from ddpwatch.report.text import render_report
from ddpwatch.tui.models.overview import rank_status
from ddpwatch.wire.messages import NO_LONGER_WATCHED, BucketLayout, Bye, Group, Hello, Layout, Span, Step
from tests.support import frames
from tests.support.runs import hello_of, record, run_of, step_of

MS = 1_000_000


def make_step(
    rank: int = 0,
    number: int = 1,
    buckets: list[tuple[float, float | None]] | None = None,
    late_ms: float = 0,
    status: str = "ok",
    data: list[tuple[float, float]] | None = None,
) -> Step:
    """100 ms: 5 before the forward, 20 forward, 50 backward from 25, optimizer from 90. Buckets: launch, done in ms."""
    rows = [(40.0, 60.0), (70.0, 85.0)] if buckets is None else buckets
    return Step(
        rank=rank,
        step=number,
        status=status,
        start_ns=number * 100 * MS + int(late_ms * MS),
        duration_ns=100 * MS,
        spans=[
            Span("forward", 5 * MS, 25 * MS),
            Span("backward", 25 * MS, 75 * MS),
            Span("sync", 75 * MS, 86 * MS),
            Span("optimizer", 90 * MS, 100 * MS),
        ],
        comm_module=[0] * len(rows),
        comm_label=list(range(len(rows))),
        comm_bytes=[1000] * len(rows),
        comm_ready=[int(launch * MS) for launch, _ in rows],
        comm_launch=[int(launch * MS) for launch, _ in rows],
        comm_done=[None if done is None else int(done * MS) for _, done in rows],
        own_ns=MS // 10,
        data=None if data is None else [(int(start * MS), int(end * MS)) for start, end in data],
    )


@pytest.mark.parametrize(
    ("buckets", "comm", "exposed", "overlap"),
    [
        ([(40, 60)], 20, 0, 1.0),  # hidden
        ([(75, 85)], 10, 10, 0.0),  # exposed
        ([(65, 85)], 20, 10, 0.5),  # half
        ([(40, 60), (70, 85)], 35, 10, 25 / 35),
        ([(40, 80), (50, 60)], 40, 5, 35 / 40),  # overlapping, done out of order
        ([(70, 85), (72, 83)], 15, 10, 5 / 15),
    ],
)
def test_overlap_in_closed_form(
    buckets: list[tuple[float, float]], comm: float, exposed: float, overlap: float
) -> None:
    result = figures(make_step(buckets=buckets))
    assert result.comm_ns == comm * MS
    assert result.exposed_ns == exposed * MS
    assert result.overlap == pytest.approx(overlap)


def test_no_communication_has_no_overlap() -> None:
    result = figures(make_step(buckets=[]))
    assert (result.comm_ns, result.exposed_ns, result.overlap) == (0, 0, None)


def test_the_phases_of_a_step() -> None:
    phases = {name: ns / MS for name, ns in figures(make_step(data=[(1, 3), (2, 4)])).phases_ns.items()}
    assert phases == {
        "data": 3, "between": 2, "forward": 20, "backward": 50, "exposed_comm": 10, "optimizer": 10, "other": 5
    }  # fmt: skip


def test_where_no_wait_for_data_can_be_seen_all_of_the_gap_is_between() -> None:
    phases = figures(make_step()).phases_ns
    assert "data" not in phases
    assert phases["between"] == 5 * MS
    assert figures(make_step(data=[])).phases_ns["data"] == 0


def test_an_optimizer_that_calls_forward_and_backward_ends_the_gap_as_a_forward_does() -> None:
    """As Lightning's: what lay between its steps was in the rest."""
    step, usual = make_step(), figures(make_step()).phases_ns
    step.spans = [Span("optimizer", 3 * MS, 5 * MS), *step.spans]
    assert figures(step).phases_ns == {**usual, "between": 3 * MS, "optimizer": usual["optimizer"] + 2 * MS}


def test_a_wait_that_costs_the_step_nothing_is_not_counted() -> None:
    """The host waits while the GPU still computes: before the step's start there, or in its forward."""
    phases = figures(make_step(data=[(-20, 1), (10, 12)])).phases_ns
    assert (phases["data"], phases["between"], phases["forward"]) == (1 * MS, 4 * MS, 20 * MS)


def test_phases_add_up_with_waits_wherever_they_are() -> None:
    for start in range(-10, 110, 3):
        result = figures(make_step(data=[(start, start + 7)]))
        assert sum(result.phases_ns.values()) == 100 * MS


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["forward", "backward", "sync", "optimizer"]), st.integers(0, 90), st.integers(0, 90)
        ),
        max_size=8,
    ),
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=6),
)
def test_phases_add_up_whatever_the_spans(spans: list[tuple[str, int, int]], buckets: list[tuple[int, int]]) -> None:
    step = make_step(buckets=[(a / MS, b / MS) for a, b in buckets])
    step.duration_ns = 100
    step.spans = [Span(phase, a, b) for phase, a, b in spans]  # type: ignore[arg-type]
    result = figures(step)
    assert sum(result.phases_ns.values()) == 100
    assert all(ns >= 0 for ns in result.phases_ns.values())
    assert result.phases_ns["exposed_comm"] == result.exposed_ns


@given(
    st.lists(
        st.tuples(st.sampled_from(["forward", "backward", "sync", "optimizer"]), st.integers(0, 3), st.integers(0, 12)),
        max_size=8,
    ),
    st.lists(st.tuples(st.integers(0, 80), st.one_of(st.none(), st.integers(0, 80))), max_size=4),
    st.one_of(st.none(), st.lists(st.tuples(st.integers(-5, 20), st.integers(0, 25)), max_size=2)),
    st.booleans(),
)
def test_spans_in_turn_are_read_as_any_others(
    spans: list[tuple[str, int, int]],
    buckets: list[tuple[int, int | None]],
    data: list[tuple[int, int]] | None,
    says_its_waits: bool,
) -> None:
    """They are split in one pass; what the phases claim gives the same."""
    step = make_step(buckets=[(a / MS, None if b is None else b / MS) for a, b in buckets])
    at, step.spans, step.data = 0, [], data
    for phase, gap, length in spans:
        step.spans.append(Span(phase, at + gap, at + gap + length))  # type: ignore[arg-type]
        at += gap + length
    step.duration_ns = at + 3
    step.comm_wait_begin = [at for at, _ in buckets] if says_its_waits else []
    result, claims = figures(step), claims_of(step)
    assert result.exposed == claims["exposed_comm"]
    assert list(result.phases_ns.items()) == list(split(step.duration_ns, claims).items())


def across_ranks(*steps: Step) -> StepAcrossRanks:
    across = StepAcrossRanks(steps[0].step)
    for step in steps:
        across.add_step(step)
    return across


def test_lateness_waiting_and_transfer() -> None:
    """Rank 1 runs 30 ms behind; both finish together, 5 ms after its launch."""
    early = make_step(0, buckets=[(40, 75), (70, 105)])
    late = make_step(1, buckets=[(40, 45), (70, 75)], late_ms=30)
    across = across_ranks(early, late)
    buckets = list(across.skew.buckets.values())
    assert [bucket.transfer for bucket in buckets] == [5 * MS, 5 * MS]
    assert [bucket.last_rank for bucket in buckets] == [1, 1]
    assert (across.late_ns(0), across.late_ns(1)) == (0, 30 * MS)
    assert (across.wait_ns(0), across.wait_ns(1)) == (30 * MS, 0)
    assert bus_bandwidths(across)[0, 0, 0, 0, ""] == pytest.approx(1000 / 0.005 * 2 * (2 - 1) / 2)


def test_a_bucket_reduced_twice_in_a_step_is_compared_turn_by_turn() -> None:
    twice = make_step(0, buckets=[(40, 45), (60, 65)])
    twice.comm_label = [0, 0]
    other = make_step(1, buckets=[(41, 45), (63, 65)])
    other.comm_label = [0, 0]
    compared = across_ranks(twice, other).skew.buckets
    late = {key: (bucket.last_rank, (bucket.last - bucket.first) / MS) for key, bucket in compared.items()}
    assert late == {(0, 0, 0, 0, ""): (1, 1), (0, 0, 1, 0, ""): (1, 3)}


def run(late_ms: float = 0, steps: int = 20) -> ReportBuilder:
    builder = ReportBuilder()
    for rank in (0, 1):
        builder.apply_message(
            Hello(run_id="run", rank=rank, world_size=2, host="node", pid=1, module="GPT", backend="gloo")
        )
    builder.apply_message(
        Layout(rank=0, params=["w", "b", "v"], buckets=[BucketLayout(0, 1000, [2]), BucketLayout(1, 1000, [0, 1])])
    )
    for number in range(steps):
        builder.apply_message(make_step(0, number, status="warmup" if number == 0 else "ok"))
        builder.apply_message(make_step(1, number, late_ms=late_ms, status="warmup" if number == 0 else "ok"))
    return builder


def test_the_report_of_a_run() -> None:
    made = run(late_ms=30).report()
    report = made.as_json()
    assert report["steps"] == {
        "count": 20,
        "warmup": 1,
        "aborted": 0,
        "shadow": 0,
        "unwatched": 0,
        "unreduced": 0,
        "averaged": 19,
        "watched": 19,
        "full": 19,
        "step_ms": 100,
        "step_ms_p50": 100,
        "step_ms_p90": 100,
    }
    assert report["phases_ms"] == pytest.approx(
        {"data": None, "between": 5, "forward": 20, "backward": 50, "exposed_comm": 10, "optimizer": 10, "other": 5}
    )
    assert report["overlap"] == pytest.approx(
        {
            "ratio": 25 / 35, "ratio_reach": 0, "comm_ms": 35, "exposed_ms": 10, "exposed_reach_ms": 0,
            "waiting_ms": 5, "transfer_ms": 5, "unsplit_ms": 0,
        }
    )  # fmt: skip
    assert [(row["late_ms_p50"], row["wait_ms_p50"]) for row in report["ranks"]] == [(0, 30), (30, 0)]
    assert [row["params"] for row in report["collectives"]] == [["v"], ["w", "b"]]
    assert [row["ready_ms_p50"] for row in report["collectives"]] == [15, 45]
    assert [row["exposed_ms_p50"] for row in report["collectives"]] == [0, 10]
    assert [(row["last_rank"], row["last_share"]) for row in report["collectives"]] == [(1, 1.0), (1, 1.0)]
    assert [finding.kind for finding in findings(made)] == ["straggler"]
    assert "rank 1 is late by 30 ms in each step" in render_report(made)


def test_gradients_that_are_not_reduced_are_said() -> None:
    builder = run()
    for rank in (0, 1):
        step = make_step(rank, 50)
        step.reduced = False
        builder.apply_message(step)
    found = findings(builder.report())
    assert [(finding.kind, finding.severity) for finding in found] == [
        ("not_reduced", "error"),
        ("exposed_comm", "warning"),
    ]


def test_a_rank_that_the_collector_never_heard_of_is_named(tmp_path: Path) -> None:
    """A rank may end before it finds the collector."""
    heard = ((message, received) for message, received in run_of(ranks=3) if getattr(message, "rank", 0) != 1)
    report = report_of(record(tmp_path / "run.mcap", heard))
    (missing,) = [finding for finding in findings(report) if finding.kind == "missing_ranks"]
    assert missing.message.startswith("the collector never heard of rank 1,")
    assert "missing_ranks" not in [finding.kind for finding in findings(report_of(record(tmp_path / "all.mcap")))]


def test_an_even_run_has_no_straggler() -> None:
    report = run().report()
    assert [finding.kind for finding in findings(report)] == ["exposed_comm"]


def test_a_run_without_a_second_rank_has_dashes_not_zeros() -> None:
    builder = ReportBuilder()
    builder.apply_message(make_step(0, buckets=[]))
    report = builder.report()
    row = report.ranks[0]
    assert (row.late_ms_p50, row.overlap, row.overlap_p50) == (None, None, None)
    assert set(report.overlap.as_json().values()) == {None}  # one step is too few
    assert " –" in render_report(report)


def test_the_newest_steps_do_without_a_rank_that_has_ended() -> None:
    """As of another group: the header stood still from then on."""
    alone = [frames.step(0, number) for number in range(20, 40)]
    both = list(frames.run(20))
    assert frames.state_of([*both, *alone]).recent()[-1].step == 19
    found = frames.state_of([*both, frames.bye(1), *alone]).recent()
    assert [across.step for across in found] == list(range(1, 40))


def test_a_rank_that_skipped_steps_has_not_ended_before_its_newest_one() -> None:
    """It counts fewer steps than the others: by its own count, it seemed to have ended before it skipped one."""
    skipped, messages = {5, 38}, list(frames.run(0))
    columns = ("comm_module", "comm_label", "comm_bytes", "comm_ready", "comm_launch", "comm_done")
    for number in range(40):
        own = number - sum(at < number for at in skipped)
        lead = _numbered(frames.step(0, number))
        if number in skipped:
            messages.append(frames.step(0, number, synced=False, **{column: [] for column in columns}))
        else:
            messages += [lead, msgspec.structs.replace(lead, rank=1, step=own)]
    state = frames.state_of([*messages, frames.bye(1)])
    assert state.steps[39].members == {0, 1}
    assert state.steps[38].members == {0}
    assert state.steps[38].counted
    assert 38 not in [across.step for across in state.recent()]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_newest_steps_do_without_a_rank_that_is_no_longer_watched(rank: int) -> None:
    """Rank 0 is the lead, to whose steps the other's are matched."""
    both = [_numbered(step) for number in range(20) for step in (frames.step(0, number), frames.step(1, number))]
    alone = [_numbered(frames.step(1 - rank, number)) for number in range(20, 40)]
    silent = frames.beat(rank, 20, "", activity=NO_LONGER_WATCHED)
    state = frames.state_of([*frames.run(0), *both, silent, *alone])
    assert state.recent()[-1].step == 39
    newest = state.newest_step()
    assert newest is not None
    assert newest.step == 39
    assert rank_status(state, state.ranks[rank]) == ("no longer watched", "warn")
    steps = list(steps_across_ranks([*both, silent, *alone]))
    assert steps[-1].step == 39


def _numbered(step: Step) -> Step:
    """The same, with sequence numbers of its collectives."""
    count = len(step.comm_label)
    return msgspec.structs.replace(step, comm_first_seq=1 + step.step * count, comm_seq=list(range(count)))


def test_what_a_recording_says_of_its_newest_steps_rests_on_full_ones_that_are_older() -> None:
    closing = AttachmentBuilder()
    closing.apply_message(hello_of(0, 1))
    for number in range(1, 1 + 2 * ATTACHED_STEPS):
        step = step_of(0, number)
        if number > 64:
            step.status, step.comm_done = "shadow", [None, None]
        closing.apply_message(step)
    found = json.loads(closing.documents()["findings.json"])
    assert found["steps"] == [ATTACHED_STEPS + 1, 2 * ATTACHED_STEPS]
    assert found["overlap"]["ratio"] == pytest.approx(0.75, abs=0.001)


def test_what_a_recording_says_of_lost_time_is_that_of_its_newest_steps() -> None:
    closing = AttachmentBuilder()
    for rank in (0, 1):
        closing.apply_message(hello_of(rank, 2))
    for number in range(3000):
        for rank in (0, 1):
            step = step_of(rank, number)
            if number % 64:
                step.status, step.comm_done = "shadow", [None, None]
            closing.apply_message(step)
    found = json.loads(closing.documents()["incidents.json"])
    accounts = {(row["account"], row["phase"]): row["share"] for row in found["lost"]["accounts"]}
    assert ("other", "unseen") not in accounts
    assert found["lost"]["rank_seconds"] == pytest.approx(2 * 0.11 * ATTACHED_STEPS / 2, rel=0.01)


def test_what_a_recording_says_of_a_group_that_is_not_the_default_one() -> None:
    closing = AttachmentBuilder()
    for rank in (0, 1):
        closing.apply_message(hello_of(rank, 4))
        closing.apply_message(Group(rank=rank, id=7, ranks=[0, 1]))
    for number in range(60):
        for rank in (0, 1):
            step = step_of(rank, number)
            step.comm_group = [7, 7]
            closing.apply_message(step)
    found = json.loads(closing.documents()["incidents.json"])
    assert {row["account"] for row in found["lost"]["accounts"]} >= {"transfer"}
    assert "exposed" not in {row["account"] for row in found["lost"]["accounts"]}


def test_an_empty_run_has_a_report() -> None:
    report = ReportBuilder().report()
    assert report.phases_ms == dict.fromkeys(PHASES)
    assert "nothing stands out" not in render_report(report)


def test_ranks_missing_from_a_step_do_not_stop_the_report() -> None:
    builder = run()
    for number in range(100, 103):
        builder.apply_message(make_step(0, number))  # rank 1 is gone
    builder.apply_message(
        Bye(rank=1, by="collector", reason="killed", detail="SIGKILL", signal=9, at_ns=1, step=100, phase="sync")
    )
    report = builder.report()
    assert [row.steps for row in report.ranks] == [23, 20]
    assert findings(report)[0].message == "rank 1 was killed (SIGKILL) at step 100 waiting for buckets"


@pytest.mark.parametrize(
    "hostile", ["\x1b[31mred", "bell\a", "over\rwrite", "\u202eevil", "zero\u200bwidth", "a\u2028b"]
)
def test_names_cannot_control_the_terminal(hostile: str) -> None:
    shown = clean(hostile)
    assert shown.isprintable()
    assert not set(shown) & set("\x1b\a\r\u202e\u200b\u2028")


def test_figures_have_units() -> None:
    assert (size(None), size(512), size(26_214_400)) == ("–", "512 B", "25.0 MiB")
    assert (percent(None), percent(0.125, 1)) == ("–", "12.5 %")


def test_an_unresolved_step_has_no_figures() -> None:
    """The GPU's times did not come: in reports it counts as a step, in no statistic, and not in the cost."""
    empty = {name: [] for name in ("spans", "hook_param", "hook_ns", "comm_module", "comm_label", "comm_bytes")}
    empty |= {name: [] for name in ("comm_ready", "comm_launch", "comm_done")}
    report = ReportBuilder()
    for number in range(20):
        changes = {"status": "unresolved", "duration_ns": 0, "cpu_ns": 5, **empty} if number % 2 else {}
        report.apply_message(frames.step(0, number, **changes))
    built = report.report()
    assert built.as_json()["steps"]["unresolved"] == 10
    assert built.steps.step_ms_p50 == built.steps.step_ms_p90 == 100.0
    assert "10 unresolved" in render_report(built)


def test_one_rank_is_no_ranks() -> None:
    assert [counted(number, "rank") for number in (None, 0, 1, 2)] == ["– ranks", "0 ranks", "1 rank", "2 ranks"]
