"""The recorder on an injected clock: hooks become steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from ddpwatch.analysis.step import figures
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import HELD_NS, MAX_BACKWARDS, MAX_FORWARDS, STRETCH_NS, StepRecorder
from ddpwatch.run.blackbox import read
from ddpwatch.sampling.schedule import SamplingSchedule
from ddpwatch.wire.messages import Step
from tests.support.probe import FixedSchedule


class Script:
    """A recorder with a clock that the test sets."""

    def __init__(self, sampling: SamplingSchedule | None = None) -> None:
        self.now = 1000
        self.records: list[StepRecord] = []
        self.validations: list[tuple[int, int]] = []
        self.recorder = StepRecorder(
            self.records.append,
            clock=lambda: self.now,
            on_validation=lambda start, end: self.validations.append((start, end)),
        )
        self.recorder.use(sampling=sampling)

    def after(self, ns: int) -> StepRecorder:
        self.now += ns
        return self.recorder

    def forward(self, ns: int = 10, *, buffers: bool = False) -> None:
        self.after(1).forward_begin()
        if buffers:
            self.recorder.buffers_synced()
        self.after(ns).forward_end()

    def backward(self, *, synced: bool = True) -> None:
        """100 ns of compute; two buckets, the second done 30 ns after the compute ends."""
        self.after(1).backward_begin()
        first = self.after(40).bucket_launch(0, 0, 64) if synced else None
        second = self.after(50).bucket_launch(0, 1, 32) if synced else None
        if first and second:
            self.recorder.bucket_done(first)
        self.after(10).backward_compute_end()
        self.now += 30
        if second:
            self.recorder.bucket_done(second)
        self.after(2).backward_end()

    def optimize(self, ns: int = 20) -> None:
        self.after(3).optimizer_begin()
        self.after(ns).optimizer_end()

    def messages(self) -> list[Step]:
        return [record.message(0, 0) for record in self.records]


def test_a_step_has_phases_and_buckets() -> None:
    script = Script()
    for _ in range(2):
        script.forward()
        script.backward()
        script.optimize()
    script.recorder.finish()
    first, second = script.messages()
    assert [(span.phase, span.end - span.start) for span in second.spans] == [
        ("forward", 10),
        ("backward", 100),
        ("sync", 32),
        ("optimizer", 20),
    ]
    assert first.start_ns + first.duration_ns == second.start_ns
    assert (second.comm_label, second.comm_launch, second.comm_done) == ([0, 1], [52, 102], [102, 142])
    parts = figures(second)
    assert parts.exposed_ns == 30
    assert parts.comm_ns == 90
    assert parts.overlap == 60 / 90
    assert sum(parts.phases_ns.values()) == second.duration_ns


@pytest.mark.parametrize("bare", [False, True])
def test_what_comes_after_an_optimizer_is_of_the_next_step(bare: bool, tmp_path: Path) -> None:
    """Heartbeats, goodbyes and the black box number a step as its record does."""
    script = Script(FixedSchedule(bare=lambda _: bare))
    script.recorder.box.open(tmp_path / "box")
    seen = []
    for follow in (lambda: None, script.forward, script.backward, script.optimize, script.forward):
        follow()
        last = read(tmp_path / "box")
        assert last is not None
        assert (last.step, last.slot, last.phase) == (script.recorder.step, script.recorder.slot, script.recorder.phase)
        seen.append(last.step)
    assert seen == [0, 0, 0, 1, 1]


def test_accumulation_is_one_step_and_its_gaps_are_between() -> None:
    script = Script()
    script.forward()
    script.backward(synced=False)
    script.now += 500
    script.forward()
    script.backward()
    script.optimize()
    script.recorder.finish()
    (step,) = script.messages()
    assert step.micro_steps == 2
    assert [span.phase for span in step.spans].count("backward") == 2
    assert figures(step).phases_ns["between"] == 501
    assert step.comm_label == [0, 1]


class Loader:
    """A DataLoader's iterator, whose ``next`` takes as long as the test says."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._reference = weakref.ref(self)

    def wait(self, ns: int) -> None:
        start = self._script.now
        self._script.now += ns
        self._script.recorder.data_wait(self._reference, start, self._script.now)


def phases_of(script: Script) -> list[tuple[int | None, int]]:
    """Of each step: data, between."""
    script.recorder.finish()
    found = [figures(step).phases_ns for step in script.messages()]
    return [(phases.get("data"), phases["between"]) for phases in found]


def train(script: Script, wait: Callable[[], None] = lambda: None, bookkeeping_ns: int = 0) -> None:
    wait()
    script.now += bookkeeping_ns
    script.forward()
    script.backward()
    script.optimize()


def test_what_the_loop_waits_in_the_dataloader_is_data_and_its_own_work_is_between() -> None:
    script = Script()
    loader = Loader(script)
    train(script, lambda: loader.wait(3))
    train(script, lambda: loader.wait(30), bookkeeping_ns=500)
    train(script, lambda: loader.wait(0), bookkeeping_ns=48)
    assert phases_of(script)[1:] == [
        (30, 501),
        (0, 49),
    ]  # a batch that comes at once is a wait of 0, not an unknown one


def test_without_a_dataloader_nobody_knows_what_a_gap_is() -> None:
    script = Script()
    train(script)
    train(script, bookkeeping_ns=48)
    assert phases_of(script)[1:] == [(None, 49)]


def test_a_loop_uses_a_dataloader_as_long_as_its_iterator_lives() -> None:
    """Two steps for each batch; then batches that were loaded once, and stay in memory."""
    script = Script()
    loader = Loader(script)
    for batch in range(4):
        train(script, partial(loader.wait, 30) if batch % 2 == 0 else lambda: None)
    del loader
    train(script)
    assert phases_of(script)[1:] == [(0, 1), (30, 1), (0, 1), (None, 1)]


def test_each_micro_step_waits_for_its_own_batch() -> None:
    script = Script()
    loader = Loader(script)
    train(script, lambda: loader.wait(1))
    loader.wait(20)
    script.forward()
    script.backward(synced=False)
    loader.wait(30)
    train(script)
    assert phases_of(script)[1:] == [(50, 2)]


def test_the_batches_of_a_validation_are_not_those_of_the_training() -> None:
    script = Script()
    loader = Loader(script)
    train(script, lambda: loader.wait(1))
    validation = Loader(script)
    validation.wait(200)
    begin = script.now
    for _ in range(3):
        script.recorder.validation_begin(in_eval=True)
        script.after(5).validation_end()
        validation.wait(200)
    end = script.now
    train(script, lambda: loader.wait(7), bookkeeping_ns=10)
    train(script)
    assert phases_of(script)[1:] == [(7, 11), (0, 1)]
    assert script.validations == [(begin, end)]


def test_a_forward_without_gradients_in_training_mode_takes_no_wait_from_its_step() -> None:
    """The second one in a row makes it a validation."""
    script = Script()
    loader = Loader(script)
    for forwards in (0, 1, 0, 2):
        loader.wait(20)
        for _ in range(forwards):
            script.recorder.validation_begin(in_eval=False)
            script.after(5).validation_end()
        train(script)
    assert [data for data, _ in phases_of(script)][1:] == [20, 20, 0]
    assert [end - begin for begin, end in script.validations] == [10]


def test_a_bare_step_has_no_waits_and_the_next_one_only_its_own() -> None:
    script = Script(FixedSchedule(bare=lambda step: step == 1))
    loader = Loader(script)
    for wait in (1, 20, 30):
        train(script, partial(loader.wait, wait))
    script.recorder.finish()
    assert [step.data and step.data[0][1] - step.data[0][0] for step in script.messages()] == [1, None, 30]


def test_two_optimizers_end_one_step() -> None:
    script = Script()
    script.forward()
    script.backward()
    script.optimize()
    script.optimize()
    assert script.records == []
    script.forward()
    (step,) = script.messages()
    assert [span.phase for span in step.spans].count("optimizer") == 2


def test_a_nested_optimizer_counts_once() -> None:
    script = Script()
    script.forward()
    script.backward()
    script.after(1).optimizer_begin()
    script.after(1).optimizer_begin()
    script.after(5).optimizer_end()
    script.after(1).optimizer_end()
    script.recorder.finish()
    assert [span.phase for span in script.messages()[0].spans].count("optimizer") == 1


def test_a_closure_may_run_the_step_inside_the_optimizer() -> None:
    script = Script()
    for _ in range(2):
        script.after(1).optimizer_begin()
        script.forward()
        script.backward()
        script.after(1).optimizer_end()
    script.recorder.finish()
    assert [step.status for step in script.messages()] == ["ok", "ok"]


def test_an_exception_in_the_backward_aborts_the_step() -> None:
    script = Script()
    script.forward()
    script.after(1).backward_begin()
    script.after(5).bucket_launch(0, 0, 64)
    script.now += 100  # the exception leaves the backward here, and the script goes on to its next batch
    script.forward()
    script.backward()
    script.optimize()
    script.recorder.finish()
    assert [step.status for step in script.messages()] == ["aborted", "ok"]
    assert script.messages()[0].comm_done == [None]


def test_an_exception_in_the_forward_aborts_the_step() -> None:
    script = Script()
    script.after(1).forward_begin()
    script.forward()
    script.backward()
    script.optimize()
    script.recorder.finish()
    assert [step.status for step in script.messages()] == ["aborted", "ok"]


@pytest.mark.parametrize("make", [lambda: Script(), lambda: Script(EverySecond()), lambda: in_a_stretch()])
def test_an_optimizer_that_raises_spoils_no_later_step(
    make: Callable[[], Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, say: the script goes on, and its next optimizer ends the step. Also a bare one."""
    script = make()
    pass_steps(script, 1)
    before = script.recorder.steps
    with monkeypatch.context() as patch:
        patch.setattr(script, "optimize", script.recorder.optimizer_begin)
        pass_steps(script, 1)
    pass_steps(script, 4)
    script.recorder.finish()
    assert script.recorder.steps == before + 5


def test_without_an_optimizer_a_synced_backward_ends_the_step() -> None:
    script = Script()
    for _ in range(3):
        script.forward()
        script.backward()
    script.recorder.finish()
    assert len(script.records) == 3


@pytest.mark.parametrize("count", [2, 100])
def test_backwards_that_all_reduce_are_one_step_once_an_optimizer_has_stepped(count: int) -> None:
    script = Script()
    for _ in range(3):
        for _ in range(count):
            script.forward()
            script.backward()
        script.optimize()
    script.recorder.finish()
    assert script.recorder.steps == 3
    for number, (before, step) in enumerate(pairwise(script.messages()), 1):
        assert (step.step, step.micro_steps, len(step.comm_label)) == (number, count, 2 * count)
        assert step.start_ns == before.start_ns + before.duration_ns
        assert sum(figures(step).phases_ns.values()) == step.duration_ns
    assert [record.slot for record in script.records] == [0, 1, 2]
    assert script.messages()[0].micro_steps == count


def test_a_closure_that_the_first_optimizer_calls_often_is_one_step() -> None:
    script = Script()
    for _ in range(2):
        script.after(3).optimizer_begin()
        for _ in range(4):
            script.forward()
            script.backward()
        script.after(20).optimizer_end()
    script.recorder.finish()
    first, second = script.messages()
    assert [(step.step, step.micro_steps) for step in (first, second)] == [(0, 4), (1, 4)]
    assert [span.phase for span in second.spans if span.phase != "sync"] == [
        "optimizer", *["forward", "backward"] * 4, "optimizer",
    ]  # fmt: skip


def test_what_no_optimizer_ends_are_steps_after_a_while_and_not_any_more_once_one_steps() -> None:
    script = Script()

    def reduce(count: int) -> list[int]:
        for _ in range(count):
            script.forward()
            script.backward()
        return [record.step for record in script.records]

    assert reduce(3) == []
    script.now += HELD_NS
    assert reduce(2) == [0, 1, 2, 3]
    assert reduce(1) == [0, 1, 2, 3, 4]
    script.optimize()
    assert reduce(2) == [0, 1, 2, 3, 4, 5]
    script.optimize()
    script.recorder.finish()
    assert [(record.step, record.backwards) for record in script.records] == [*((n, 1) for n in range(6)), (6, 2)]
    assert [record.slot for record in script.records][-2:] == [5, 1]  # as on ranks whose optimizer stepped just before


def test_another_model_s_optimizer_joins_nothing_of_the_one_before() -> None:
    script = Script()
    for _ in range(3):
        script.forward()
        script.backward()
    script.recorder.release_held()
    train(script)
    script.recorder.finish()
    assert [(step.step, step.micro_steps) for step in script.messages()] == [(0, 1), (1, 1), (2, 2)]


def test_a_forward_without_a_backward_stays_in_the_step() -> None:
    script = Script()
    script.forward()
    script.forward()
    script.backward()
    script.optimize()
    script.recorder.finish()
    assert [step.micro_steps for step in script.messages()] == [1]


@pytest.mark.parametrize("buffers", [False, True])
def test_an_evaluation_with_gradients_on_is_no_part_of_a_step_and_does_not_grow(buffers: bool) -> None:
    script = Script()
    script.forward()
    script.backward()
    script.optimize()
    start = script.now
    for _ in range(3 * MAX_FORWARDS):
        script.forward(buffers=buffers)
        assert len(script.recorder.current.spans) <= (3 if buffers else 1) * MAX_FORWARDS  # type: ignore[union-attr]
    assert script.validations == []
    script.backward()
    script.optimize()
    script.recorder.finish()
    _, second = script.messages()
    (validation,) = script.validations
    assert validation[0] == start
    assert validation[1] == second.start_ns
    assert second.duration_ns < MAX_FORWARDS * 11 + 200
    assert second.duration_ns == sum(figures(second).phases_ns.values())


def test_a_reduction_whose_buckets_were_not_seen_is_one() -> None:
    """So a light step on a GPU is compared with the full ones beside it, and not called unsynced."""
    script = Script()
    script.forward()
    script.after(1).backward_begin()
    script.after(5).backward_compute_end()
    script.after(5).backward_end(reduced=True)
    script.optimize()
    script.recorder.finish()
    (step,) = script.messages()
    assert (step.synced, step.comm_label) == (True, [])


class EverySecond(SamplingSchedule):
    """Every second step is bare."""

    def is_bare(self, step: int) -> bool:
        return step % 2 == 1


def test_a_bare_step_has_a_start_and_an_end() -> None:
    script = Script(EverySecond())
    for _ in range(4):
        for synced in (False, True):  # micro-batches
            script.forward()
            script.backward(synced=synced)
        script.optimize()
    script.recorder.finish()
    steps = script.messages()
    assert [step.status for step in steps] == ["ok", "unwatched", "ok", "unwatched"]
    assert len({step.duration_ns for step in steps[1:]}) == 1  # the first has no optimizer before it
    for step in steps[1::2]:
        assert (step.spans, step.comm_label, step.hook_param, step.micro_steps) == ([], [], [], 0)


def test_without_an_optimizer_every_step_is_watched() -> None:
    """Nothing would show where a bare one ends."""
    script = Script(EverySecond())
    for _ in range(4):
        script.forward()
        script.backward()
    script.recorder.finish()
    assert [step.status for step in script.messages()] == ["ok"] * 4


def test_a_bare_step_that_no_optimizer_ends_is_given_up() -> None:
    script = Script(EverySecond())
    script.forward()
    script.backward()
    script.optimize()
    for _ in range(MAX_FORWARDS + 3):
        script.forward()
        script.backward()
    script.recorder.finish()
    steps = script.messages()
    assert [step.status for step in steps[:2]] == ["ok", "aborted"]
    assert len(steps) == 5
    assert {step.status for step in steps[2:]} == {"ok"}


def test_hooks_outside_a_step_are_no_error() -> None:
    script = Script()
    assert script.recorder.bucket_launch(0, 0, 1) is None  # Join's light steps reduce without a forward
    script.recorder.backward_end()
    script.recorder.optimizer_end()
    script.recorder.hook_fired(3)
    script.recorder.finish()
    assert script.records == []


def test_an_unmeasured_completion_is_none_not_zero() -> None:
    script = Script()
    script.forward()
    script.after(1).backward_begin()
    script.after(1).bucket_launch(0, 0, 64)
    script.after(1).backward_compute_end()
    script.after(1).backward_end()
    script.optimize()
    script.recorder.finish()
    step = script.messages()[0]
    assert step.comm_done == [None]
    measured = figures(step)
    assert (measured.comm_ns, measured.exposed_ns, measured.overlap) == (None, None, None)


def test_buckets_that_are_launched_at_the_same_moment_keep_their_order() -> None:
    """Two alike, of two backwards of one step on a coarse clock, one of them not measured."""
    script = Script()
    script.forward()
    script.after(1).backward_begin()
    for done in (False, True):
        bucket = script.recorder.bucket_launch(0, 0, 64)
        if done:
            script.recorder.bucket_done(bucket)
    script.after(10).backward_compute_end()
    script.after(2).backward_end()
    script.recorder.finish()
    (step,) = script.messages()
    assert step.comm_launch == [11, 11]
    assert step.comm_done == [None, 11]


def test_a_wait_inside_the_backward_is_no_compute() -> None:
    script = Script()
    script.forward()
    script.after(1).backward_begin()
    bucket = script.after(10).bucket_launch(0, 0, 64)
    script.recorder.wait_begin()
    script.now += 30
    assert bucket is not None
    script.recorder.bucket_done(bucket)
    script.recorder.wait_end()
    script.after(5).backward_compute_end()
    script.recorder.backward_end()
    script.optimize()
    script.recorder.finish()
    step = script.messages()[0]
    assert step.micro_steps == 1
    assert figures(step).exposed_ns == 30
    assert figures(step).phases_ns["backward"] == 15


def test_a_step_whose_hook_handed_every_bucket_back_is_not_reduced() -> None:
    script = Script()
    for idle in (True, False):
        script.forward()
        script.backward()
        for bucket in script.recorder.current.buckets:  # type: ignore[union-attr]
            bucket.idle = idle
        script.optimize()
    script.recorder.finish()
    assert [step.reduced for step in script.messages()] == [False, True]


def test_a_skipped_batch_does_not_change_what_the_ranks_choose() -> None:
    """One rank takes a step without its peers, the other does not count that batch. After it they choose alike."""
    taking, leaving = Script(), Script()
    for batch in range(6):
        if batch != 2:
            leaving.forward()
            leaving.backward()
            leaving.optimize()
        taking.forward()
        taking.backward(synced=batch != 2)
        taking.optimize()
    taking.recorder.finish()
    leaving.recorder.finish()
    assert [(record.step, record.slot) for record in taking.records] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4)]
    assert [(record.step, record.slot) for record in leaving.records] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]


class OneIn64(SamplingSchedule):
    """Light steps; from step 32 on, one in 64 is watched. Notes what it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.watched.value = 64
        self.learnt: list[tuple[str, int]] = []

    def is_light(self, step: int) -> bool:
        return True

    def learn(self, level: str, own_ns: int, step_ns: int) -> None:
        self.learnt.append((level, step_ns))


def pass_steps(script: Script, steps: int, micro_steps: int = 1, unsynced: Collection[int] = ()) -> None:
    """As the probe's hooks do it; also steps that synchronise nothing."""
    for step in range(steps):
        for number in range(micro_steps):
            syncs = number == micro_steps - 1 and step not in unsynced
            if not script.after(1).forward_goes_by(syncs):
                script.recorder.forward_begin(syncs)
            script.after(10).forward_end()
            if script.recorder.phase:
                script.backward(synced=syncs)
            script.now += step
        script.optimize()


def steps_of(script: Script) -> list[Step]:
    return [message for record in script.records for message in record.messages(0, 0)]


@pytest.mark.parametrize("unsynced", [(), (100,), (45, 100, 101, 102, 180)])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_steps_of_a_stretch_are_as_if_each_had_a_record(micro_steps: int, unsynced: tuple[int, ...]) -> None:
    stretches, alone = Script(schedule := OneIn64()), Script(other := OneIn64())
    alone.recorder.forward_goes_by = lambda syncs: False  # type: ignore[method-assign, assignment]
    for script in (stretches, alone):
        script.recorder.epoch = 3
        pass_steps(script, 300, micro_steps, unsynced)
        script.recorder.finish()
    assert len(stretches.records) < len(alone.records) / 4
    for one, two in zip(steps_of(stretches), steps_of(alone), strict=True):
        assert (one.step, one.status, one.epoch) == (two.step, two.status, two.epoch)
        assert (one.start_ns, one.duration_ns) == (two.start_ns, two.duration_ns)
        assert (one.cpu_ns is None, one.synced, one.spans) == (two.cpu_ns is None, two.synced, two.spans)
    assert schedule.learnt == other.learnt
    slots = {record.step: record.slot for record in alone.records}
    assert all(slots[record.step] == record.slot for record in stretches.records)
    assert stretches.recorder.steps == alone.recorder.steps == 300


def in_a_stretch() -> Script:
    """A job between two steps of a stretch."""
    script = Script(OneIn64())
    script.recorder.epoch = 3
    pass_steps(script, 42)
    while script.recorder.current is None or not script.recorder.current.ends:
        pass_steps(script, 1)
    return script


def test_a_stretch_ends_when_steps_become_long() -> None:
    script = in_a_stretch()
    script.now += STRETCH_NS
    assert not script.recorder.forward_goes_by()


def test_a_validation_between_two_steps_of_a_stretch_belongs_to_neither_and_a_save_to_the_second() -> None:
    def validated(recorder: StepRecorder) -> None:
        recorder.validation_begin(in_eval=True)
        recorder.validation_end()

    for activity, outside in ((StepRecorder.saved, 0), (validated, 500)):
        script = in_a_stretch()
        count, before = script.recorder.steps, script.now
        script.now += 500
        activity(script.recorder)
        pass_steps(script, 2)
        script.recorder.finish()
        last, after = steps_of(script)[count : count + 2]
        assert last.start_ns + last.duration_ns == before
        assert after.start_ns == before + outside
        assert after.cpu_ns is None


def test_an_exception_or_the_end_loses_no_finished_step_of_a_stretch() -> None:
    for end, status in ((StepRecorder.abort, ["aborted"]), (StepRecorder.finish, [])):
        script = in_a_stretch()
        count = script.recorder.steps
        assert script.after(1).forward_goes_by()
        end(script.recorder)
        assert [step.step for step in steps_of(script)] == list(range(count + 1 + len(status)))
        assert [step.status for step in steps_of(script)[count:]] == ["unwatched", *status]
        assert {step.epoch for step in steps_of(script)} == {3}


def test_the_batches_of_a_stretch_are_not_those_of_the_watched_step_after_it() -> None:
    script = in_a_stretch()
    loader = weakref.ref(script)
    while not script.recorder.phase or script.recorder.phase == "input":
        script.recorder.data_wait(loader, script.now, script.now + 7)
        start = script.now
        if not script.after(7).forward_goes_by():
            script.recorder.forward_begin()
            if script.recorder.phase == "forward":
                break
        script.optimize()
    assert script.recorder.current is not None
    assert script.recorder.current.data == [(start, start + 7)]


def test_backwards_that_reduce_nothing_and_that_nothing_ends_do_not_grow() -> None:
    """As of a sampler that takes gradients of the module's output, fed by a DataLoader."""
    script = Script()
    for _ in range(3 * MAX_BACKWARDS):
        script.recorder.data_wait(_of_script, script.now, script.now + 1)
        script.forward()
        script.backward(synced=False)
    record = script.recorder.current
    assert record is not None
    assert len(record.spans) <= 5 * MAX_BACKWARDS
    assert len(record.data or []) <= MAX_BACKWARDS + 1


def _of_script() -> None:
    """A reference to a DataLoader's iterator."""


def test_many_micro_batches_are_one_bare_step() -> None:
    script = Script(EverySecond())
    for _ in range(4):
        for last in [False] * MAX_FORWARDS + [True]:
            script.forward()
            script.backward(synced=last)
        script.optimize()
    script.recorder.finish()
    assert [step.status for step in script.messages()] == ["ok", "unwatched", "ok", "unwatched"]


@pytest.mark.parametrize(("third_us", "own_us"), [(9_005, 5), (30, 30)])
def test_a_rank_that_loses_its_core_as_it_reads_its_cpu_time_pays_nothing_for_watching(
    third_us: int, own_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third read takes longer than the others, within the hook that starts the third step; 30 µs it may cost."""
    now = [0]
    reads = iter([5, 5, third_us, 5, 5, 5])

    def cpu_time() -> int:
        now[0] += 1000 * next(reads)
        return now[0]

    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    records: list[StepRecord] = []
    recorder = StepRecorder(records.append, lambda: now[0], cpu_clock=cpu_time)
    for _ in range(5):
        entered = now[0]
        recorder.forward_begin()
        recorder.charge(now[0] - entered)
        recorder.forward_end()
        recorder.backward_begin()
        recorder.backward_compute_end()
        recorder.backward_end(reduced=True)
        recorder.optimizer_begin()
        recorder.optimizer_end()
    assert [record.own_ns for record in records] == [5_000, 5_000, 1000 * own_us, 5_000]
