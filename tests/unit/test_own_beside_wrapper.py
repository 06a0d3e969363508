"""The job's own collectives beside DDP's buckets: which are of a step, and what they change of the rest of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ddpwatch.analysis.groups import numbered_groups
from ddpwatch.analysis.step import (
    bucket_keys,
    buffer_waits,
    comm_of,
    figures,
    first_compute,
    has_buckets,
    without_own,
)
from ddpwatch.probe import own_beside_wrapper
from ddpwatch.probe.event_log import EventLog
from ddpwatch.probe.guard import Guard
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.own_beside_wrapper import CollectivesBeside
from ddpwatch.probe.record import BucketRecord, StepRecord
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.wire.messages import OWN_COLLECTIVES, Step
from tests.support.probe import FixedSchedule

EXPERTS = 7


class Seen:
    """As `OwnCollectiveProbe`; `issue` is what the job does."""

    def __init__(self, context: ProbeContext, log: EventLog, *_: Any, beside: bool) -> None:
        self.log, self.on, self.complete = log, False, False

    def see(self) -> None:
        pass

    close = meet_groups = see

    def turn(self, on: bool) -> None:
        self.on = self.complete = on

    def issue(self) -> int:
        at = time.monotonic_ns()
        if self.on:
            self.log.add_event("collective", at, own(at))
        return at


def own(launch: int, done: int | None = None, waits: bool = False) -> BucketRecord:
    entry = BucketRecord(OWN_COLLECTIVES, 3, 64, launch)
    entry.op, entry.group, entry.done, entry.seq = "all_to_all", EXPERTS, done, 41
    if waits:
        entry.wait_begin, entry.wait_end = launch, done
    return entry


def bucket(launch: int, done: int) -> BucketRecord:
    entry = BucketRecord(0, 0, 64, launch)
    entry.done, entry.seq = done, 9
    return entry


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> CollectivesBeside:
    monkeypatch.setattr(own_beside_wrapper, "OwnCollectiveProbe", Seen)
    context = ProbeContext(StepRecorder(lambda record: None), Guard(lambda *_: None), lambda message: None)
    return CollectivesBeside(context, lambda own_ns: None)


def test_a_step_has_what_was_issued_in_it_if_all_of_that_was_seen(seeing: CollectivesBeside) -> None:
    job: Any = seeing._collectives
    start = job.issue()
    at = time.monotonic_ns()
    seeing.turn(True, at)
    first = job.issue()
    assert seeing.take_issued(start, first) == []  # something may have been issued before
    assert [entry.launch for entry in seeing.take_issued(at, first + 1)] == [first]
    second, third = job.issue(), job.issue()
    seeing.turn(True, third)  # where the step after this one begins, as far as is known
    assert [entry.launch for entry in seeing.take_issued(second, third)] == [second]
    seeing.turn(False, third)
    seeing.turn(True, third + 1)
    assert seeing.take_issued(third, time.monotonic_ns()) == []


class Log:
    """Own collectives as the recorder asks for them."""

    def __init__(self) -> None:
        self.turned: list[bool] = []
        self.issued: list[BucketRecord] = []

    def turn(self, on: bool, at: int) -> None:
        self.turned.append(on)
        self.at = at

    def take_issued(self, start: int, end: int) -> list[BucketRecord]:
        return [entry for entry in self.issued if start <= entry.launch < end]


def recorded(
    light: bool, issued: list[BucketRecord], reduced: bool = True
) -> tuple[list[StepRecord], Log, StepRecorder]:
    """Two steps of 10 ns of each phase. The second one is light or not."""
    records: list[StepRecord] = []
    clock = iter(range(0, 10_000, 10))
    recorder = StepRecorder(records.append, lambda: next(clock))
    recorder.sampling = FixedSchedule(light=lambda step: light and step == 1)
    recorder.own = log = Log()
    log.issued = issued
    for _ in range(2):
        recorder.forward_begin()
        recorder.forward_end()
        recorder.backward_begin()
        recorder.backward_compute_end()
        recorder.backward_end(reduced)
        recorder.optimizer_begin()
        recorder.optimizer_end()
    recorder.finish()
    return records, log, recorder


def test_own_collectives_are_seen_from_the_end_of_the_step_before_in_full_steps_only() -> None:
    _, log, _ = recorded(light=False, issued=[])
    assert log.turned == [True, True, True, True]  # of each step: where its forward starts, and at its end for the next
    records, log, _ = recorded(light=True, issued=[own(at) for at in range(0, 200, 5)])
    assert log.turned == [True, False, True]
    full, light = records
    assert [one.launch for one in full.buckets] == list(range(full.start, full.end, 5))
    assert light.buckets == []


@pytest.mark.parametrize("syncs", [True, False])
def test_own_collectives_of_a_full_step_after_bare_ones_are_seen_from_its_start(syncs: bool) -> None:
    """Local SGD synchronises nothing, and averages before its forward: in most full steps, that was not seen."""
    clock = iter(range(0, 100_000, 10))
    recorder = StepRecorder(lambda record: None, lambda: next(clock))
    recorder.sampling = FixedSchedule(bare=lambda step: 2 <= step < 8)
    recorder.own = log = Log()
    for step in range(8):
        if not recorder.forward_goes_by(syncs):
            recorder.forward_begin(syncs)
        recorder.forward_end()
        recorder.backward_begin()
        recorder.backward_compute_end()
        recorder.backward_end(syncs)
        recorder.optimizer_begin()
        recorder.optimizer_end()
        assert log.turned[-1] is (step < 2 or step == 7), step


@pytest.mark.parametrize("reduced", [True, False])
def test_steps_are_matched_by_own_collectives_only_where_there_are_no_others(reduced: bool) -> None:
    records, log, _ = recorded(light=True, issued=[own(at) for at in range(0, 200, 5)], reduced=reduced)
    assert log.turned == [True, False, True]
    assert [record.first_seq for record in records] == [None if reduced else 41, None]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_where_ranks_wait_for_each_other_within_the_forward_no_step_is_light(phase: str) -> None:
    records, _, _ = recorded(light=False, issued=[])
    at = next(start for name, start, _ in records[1].spans if name == phase)
    _, _, recorder = recorded(light=False, issued=[own(at)])
    assert recorder.sampling is not None
    assert recorder.sampling._light is (phase == "backward")


@pytest.mark.parametrize("waits", [False, True])
def test_where_an_optimizer_waits_for_its_own_collectives_no_step_is_light(waits: bool) -> None:
    """It would take the wait for its work."""
    records, _, _ = recorded(light=False, issued=[])
    at = next(start for name, start, _ in records[1].spans if name == "optimizer")
    _, _, recorder = recorded(light=False, issued=[own(at, at + 5, waits=waits)])
    assert recorder.sampling is not None
    assert recorder.sampling._light is not waits


def message() -> Step:
    """Buffers until 4, an all-to-all from 10 to 14 that is waited for, one that is not, a bucket from 30 to 45."""
    record = StepRecord(1, 1000)
    at = 1000
    record.spans = [
        ("forward", at + 2, at + 2), ("sync", at + 2, at + 4), ("forward", at + 4, at + 20),
        ("backward", at + 20, at + 40), ("sync", at + 40, at + 46), ("optimizer", at + 50, at + 60),
    ]  # fmt: skip
    record.end, record.reductions, record.first_seq = at + 60, 1, 9
    record.buckets = [bucket(at + 30, at + 45), own(at + 10, at + 14, waits=True), own(at + 25)]
    return record.message(0, 0)


def test_its_waits_are_cut_out_of_the_forward_and_ddp_s_stay() -> None:
    step = message()
    assert [(span.phase, span.start, span.end) for span in step.spans] == [
        ("forward", 2, 2), ("sync", 2, 4), ("forward", 4, 10), ("sync", 10, 14), ("forward", 14, 20),
        ("backward", 20, 40), ("sync", 40, 46), ("optimizer", 50, 60),
    ]  # fmt: skip
    assert buffer_waits(step) == [(2, 4)]


def test_what_is_exposed_is_what_no_forward_and_no_backward_hides() -> None:
    """Nobody knows when DDP waits for a bucket. What is not known to be done is left out."""
    step = message()
    assert comm_of(step) == [(2, 4), (10, 14), (30, 45)]
    found = figures(step)
    assert found.exposed == [(2, 4), (10, 14), (40, 45)]
    assert (found.exposed_ns, found.overlap) == (11, 10 / 21)
    assert sum(found.phases_ns.values()) == step.duration_ns
    assert found.phases_ns["forward"] == 12


def test_buckets_are_what_they_are_without_them() -> None:
    step = message()
    assert has_buckets(step)
    assert numbered_groups(step) == [0]
    own_keys = [key for key in bucket_keys(step) if key[0] == OWN_COLLECTIVES]
    assert [key[4] for key in own_keys] == ["all_to_all"] * 2
    assert bucket_keys(step).mixed
    assert (first_compute(step), first_compute(step, own=True)) == (20, 2)
    plain = without_own(step)
    assert (plain.comm_op, plain.comm_wait_begin, plain.comm_bytes) == ([], [], [64])
    assert [key for key in bucket_keys(step) if key not in own_keys] == list(bucket_keys(plain))
