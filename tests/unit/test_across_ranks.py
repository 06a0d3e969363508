"""Columns over ranks against the plain definition of late, wait and transfer."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.across_ranks import METRICS, StepAcrossRanks
from ddpwatch.analysis.buckets import BucketTable, bucket_steps
from ddpwatch.analysis.groups import NO_ROLE, Role
from ddpwatch.analysis.kept_steps import StepLimit
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.analysis.step import comm_of
from ddpwatch.export.tables import collective_rows
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import decode, encode
from tests.support.frames import MS, bare, hello, layout, light, run, state_of, step

offsets = st.lists(st.integers(0, 40), min_size=2, max_size=2)


def view_of(steps):
    view = StepAcrossRanks(0, comparable=True)
    for one in steps:
        view.add_step(one)
    return view


def plain_skew(steps):
    """By bucket, in launch order of the lowest rank: launch per rank, and transfer; as in docs/metrics.md."""
    launches, dones = {}, {}
    for one in sorted(steps, key=lambda one: one.rank):
        for index, launch, done in zip(one.comm_label, one.comm_launch, one.comm_done, strict=True):
            launches.setdefault((0, index, 0, 0, ""), {})[one.rank] = one.start_ns + launch
            dones.setdefault((0, index, 0, 0, ""), []).append(None if done is None else one.start_ns + done)
    common = [key for key, per_rank in launches.items() if len(per_rank) == len(steps) > 1]
    transfers = {key: None if None in dones[key] else max(dones[key]) - max(launches[key].values()) for key in common}
    return {key: launches[key] for key in common}, transfers


def shifted(rank, late, missing):
    """A rank whose buckets are launched that much later, without the last one if so wanted."""
    one = step(rank, 0)
    launch = [at + extra * MS for at, extra in zip(one.comm_launch, late, strict=True)]
    changed = msgspec.structs.replace(one, comm_launch=launch, comm_done=[at + 5 * MS for at in launch])
    if not missing:
        return changed
    columns = ("module", "label", "bytes", "ready", "launch", "done")
    return msgspec.structs.replace(changed, **{f"comm_{c}": getattr(changed, f"comm_{c}")[:1] for c in columns})


@given(st.lists(st.tuples(offsets, st.booleans(), st.booleans()), min_size=1, max_size=5), st.randoms())
def test_skew_is_that_of_the_definition(ranks, shuffle):
    steps = [shifted(rank, late, missing) for rank, (late, missing, _) in enumerate(ranks)]
    for one, (_, _, unmeasured) in zip(steps, ranks, strict=True):
        one.comm_done[0] = None if unmeasured else one.comm_done[0]
    shuffled = list(steps)
    shuffle.shuffle(shuffled)
    view = view_of(shuffled)
    plain, transfers = plain_skew(steps)
    for rank in range(len(steps)):
        late = [launches[rank] - min(launches.values()) for launches in plain.values()]
        wait = [max(launches.values()) - launches[rank] for launches in plain.values()]
        assert view.late_ns(rank) == max(late, default=None)
        assert view.wait_ns(rank) == max(wait, default=None)
    assert list(view.skew.buckets) == list(plain)
    assert [bucket.transfer for bucket in view.skew.buckets.values()] == list(transfers.values())
    assert all(plain[key][bucket.last_rank] == bucket.last for key, bucket in view.skew.buckets.items())


def test_a_packed_step_is_the_same_step():
    view = view_of([step(0), step(1, late_ms=7)])
    before = (dict(view.ranks), dict(view.figures), view.skew)
    view.pack()
    view.forget_facts()
    assert (dict(view.ranks), dict(view.figures), view.skew) == before


def test_a_packed_step_is_kept_as_it_was_sent():
    """Nothing is encoded again, but for a step that came otherwise, or was changed since."""
    state = RunState()
    state.apply_message(hello(0, 3), 0)
    frames = [encode(step(rank)) for rank in range(3)]
    for frame in frames[:2]:
        state.apply_message(decode(frame), 0, frame)
    state.apply_message(decode(frames[2]), 0)
    state.steps[0].pack()
    kept = state.steps[0]._frames
    assert kept[0] is frames[0]
    assert kept[1] is frames[1]
    assert kept[2] == frames[2]


def test_a_step_sent_again_replaces_the_earlier_one():
    view = view_of([step(0), step(1, status="aborted", duration_ns=900 * MS)])
    assert not view.counted
    view.pack()
    view.add_step(step(1))
    assert (len(view), view.counted, view.longest_ns) == (2, True, 100 * MS)


def test_a_collective_that_waits_for_its_stream_communicates_from_its_start_on():
    """On a GPU: both were launched at 40 ms, the second started when the first was done. Lateness is the launch's."""
    columns = {"comm_launch": [40 * MS, 40 * MS], "comm_ready": [40 * MS, 40 * MS], "comm_start": [40 * MS, 75 * MS]}
    ranks = [step(0, **columns, comm_done=[75 * MS, 90 * MS])]
    ranks.append(step(1, **{**columns, "comm_launch": [40 * MS, 47 * MS]}, comm_done=[75 * MS, 90 * MS]))
    view = view_of(ranks)
    assert view.late_ns(1) == 7 * MS
    assert [bucket.transfer for bucket in view.skew.buckets.values()] == [35 * MS, 15 * MS]
    assert view.facts_of(0).exposed == (0, 10 * MS)  # the backward computes up to 80 ms
    apart = step(0, comm_launch=[40 * MS, 70 * MS], comm_start=[50 * MS, None], comm_done=[60 * MS, 90 * MS])
    assert comm_of(apart) == [(50 * MS, 60 * MS), (70 * MS, 90 * MS)]


def test_rows_survive_and_follow_a_late_frame():
    view = view_of([step(0), step(1, late_ms=7)])
    view.forget_facts()
    assert list(view.row("late")) == [0, 7 * MS]
    view.add_step(step(2, late_ms=9))
    assert list(view.row("late")) == [0, 7 * MS, 9 * MS]
    unmeasured = view_of([step(0, comm_done=[None, None])])
    assert all(math.isnan(unmeasured.row(metric)[0]) for metric in METRICS if metric not in ("step", "data", "between"))


def test_a_large_job_keeps_fewer_steps_and_packs_the_old_ones(monkeypatch):
    world, kept, decoded = 128, StepLimit(512, 8192, 2), StepLimit(512, 256, 2)
    monkeypatch.setattr("ddpwatch.analysis.kept_steps.KEPT", kept)
    monkeypatch.setattr("ddpwatch.analysis.kept_steps.DECODED", decoded)
    state = RunState()
    for rank in range(world):
        state.apply_message(hello(rank, world), 1)
    for number in range(kept.of(world) + 3):
        for rank in range(world):
            state.apply_message(step(rank, number), 2)
    assert len(state.steps) == kept.of(world) == 64
    assert 0 < sum(not view._packed for view in state.steps.values()) <= decoded.of(world) == 2


class TestBuckets:
    def test_one_step(self):
        rows = bucket_steps(view_of([step(0), step(1, late_ms=10)]))
        last = rows[0, 1, "", NO_ROLE]
        assert (last.launch, last.wait, last.last_rank) == (44 * MS, 10 * MS, 1)  # 70 and 80, from 31 on
        assert (last.transfer, last.exposed) == (20 * MS, 10 * MS)
        assert last.busbw == pytest.approx((4 << 20) / 0.02)

    @pytest.mark.parametrize("world", [2, 4, 8])
    @pytest.mark.parametrize(("op", "times"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
    def test_busbw_by_operation(self, op, times, world):
        """As nccl-tests: times 2(n-1)/n for an all-reduce, (n-1)/n otherwise. 4 MiB travel for 20 ms."""
        ranks = view_of([msgspec.structs.replace(step(rank), comm_op=[op, op]) for rank in range(world)])
        (row,) = [row for (_, index, *_), row in bucket_steps(ranks).items() if index == 1]
        assert row.busbw == pytest.approx((4 << 20) / 0.02 * times * (world - 1) / world)
        assert {found.busbw_gbps for found in collective_rows(ranks) if found.bucket == 1} == {row.busbw / 1e9}

    def test_the_table_is_filled_a_few_steps_at_a_time(self, monkeypatch):
        monkeypatch.setattr("ddpwatch.analysis.buckets.WORK_PER_CALL", 10)
        state = state_of(run(20))
        views = state.recent()
        table = BucketTable()
        assert not table.update(views)
        assert len(table.steps) == 5
        while not table.update(views):
            pass
        assert [row.steps for row in table.rows(state.layouts)] == [19, 19]
        assert [row.last_share for row in table.rows(state.layouts)] == [1.0, 1.0]

    def test_steps_that_are_gone_are_forgotten(self):
        views = state_of(run(20)).recent()
        table = BucketTable()
        table.update(views)
        table.update(views[-3:])
        assert sorted(table.steps) == [17, 18, 19]
        assert [number for number, _ in table.history((0, 1, "", Role("", 2)))] == [17, 18, 19]

    def test_launches_are_of_the_steps_that_know_when_they_were_done(self):
        """Most steps launched 60 ms later, and nobody knows when these were done."""
        stamps = [110 * MS, 130 * MS]
        steps = [
            light(rank, number, comm_ready=stamps, comm_launch=stamps) if number % 4 else step(rank, number)
            for number in range(1, 41)
            for rank in range(2)
        ]
        frames = [hello(0), hello(1), layout(0), layout(1), *steps]
        table, state, builder = BucketTable(), state_of(frames), ReportBuilder()
        assert table.update(state.recent())
        rows = [(row.ready, row.launch, row.done) for row in table.rows(state.layouts)]
        assert rows == [(19 * MS, 19 * MS, 29 * MS), (39 * MS, 39 * MS, 59 * MS)]
        for frame in frames:
            builder.apply_message(frame)
        for row, ns in zip(builder.report().collectives, rows, strict=True):
            assert (row.ready_ms_p50, row.launch_ms_p50, row.done_ms_p50) == tuple(at / MS for at in ns)


def test_of_a_bare_step_only_the_length_is_known():
    view = view_of([bare(0, 7), bare(1, 7)])
    view.forget_facts()
    known = {metric for metric in METRICS if not all(math.isnan(value) for value in view.row(metric))}
    assert known == {"step"}
    assert not view.counted
