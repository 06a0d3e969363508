"""FSDP2's waits: cut out of the phases on the sender thread, and on a GPU stamped with events (simulated here)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpwatch.analysis.step import bucket_keys
from ddpwatch.probe.record import BucketRecord, StepRecord, without
from ddpwatch.probe.recorder import MAX_COLLECTIVES, StepRecorder
from tests.support.guards import noting

pytestmark = pytest.mark.xdist_group("sharded waits")


def collective(launch: int, done: int | None, wait: int | None, end: int | None = None) -> BucketRecord:
    entry = BucketRecord(0, 0, 8, launch)
    entry.op, entry.done, entry.wait_begin, entry.wait_end = "all_gather", done, wait, end
    return entry


def test_waits_are_cut_out_of_the_phases() -> None:
    spans = without([(10, 20), (35, 45)], [("forward", 5, 30), ("backward", 30, 50), ("sync", 50, 50)])
    assert spans == [
        ("forward", 5, 10), ("sync", 10, 20), ("forward", 20, 30), ("backward", 30, 35), ("sync", 35, 45),
        ("backward", 45, 50),
    ]  # fmt: skip


def test_a_gpu_waits_until_the_collective_is_done() -> None:
    assert collective(0, done=30, wait=20).wait == (20, 30)
    assert collective(0, done=30, wait=40).wait == (40, 40)  # it was hidden
    assert collective(0, done=None, wait=40).wait is None


def test_columns_of_waits_are_empty_without_any() -> None:
    record = StepRecord(0, 100)
    record.buckets = [collective(110, 130, None)]
    assert record.message(0, 0).comm_wait_begin == []
    record.buckets = [collective(110, 130, 120), collective(112, 140, None)]
    sent = record.message(0, 0)
    assert (sent.comm_wait_begin, sent.comm_wait_end) == ([20, None], [30, None])
    assert [(span.phase, span.start, span.end) for span in sent.spans] == [("sync", 20, 30)]


def test_all_reduces_of_parameter_groups_are_not_buckets() -> None:
    """``replicate`` issues nothing else."""
    record = StepRecord(0, 100)
    record.buckets = [BucketRecord(0, 0, 8, 110)]  # of DDP
    assert record.message(0, 0).comm_op == []
    record.buckets[0].wait_begin, record.buckets[0].done = 110, 130
    sent = record.message(0, 0)
    assert (sent.comm_op, [key[-1] for key in bucket_keys(sent)]) == (["all_reduce"], ["all_reduce"])


def a_probe() -> Any:
    """On a GPU, without a model."""
    now = iter(range(0, 1000, 10))
    from ddpwatch.probe.fsdp import FsdpProbe  # slow to import: by one worker only

    probe: Any = object.__new__(FsdpProbe)
    probe.active, probe._recorder, probe.guard = True, StepRecorder(lambda record: None, lambda: next(now)), noting([])
    probe._blocking, probe._validating, probe._groups, probe._module = False, False, [], 0
    probe._model = lambda: None
    probe._early, probe._gathering, probe._reducing, probe._awaits_backward = [], {}, [], False
    return probe


def issue_early(probe: Any) -> BucketRecord:
    """A gather by ``unshard``, outside forward and backward."""
    probe._id_of = lambda group: 0
    gather: BucketRecord = probe.launch("all_gather", 0, torch.ones(2), SimpleNamespace())
    probe.finished(gather)
    return gather


def one_step(probe: Any, by_hand: bool) -> None:
    """With a backward that reduces, and an optimizer of torch's or none."""
    recorder = probe._recorder
    recorder.forward_begin()
    recorder.forward_end()
    recorder.backward_begin()
    recorder.backward_compute_end()
    recorder.backward_end(reduced=True)
    if not by_hand:
        recorder.optimizer_begin()
        recorder.optimizer_end()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gather_between_two_steps_belongs_to_the_next_forward(by_hand: bool) -> None:
    """Also where the job updates its parameters without an optimizer of torch's. The forward waits for it."""
    probe = a_probe()
    one_step(probe, by_hand)
    gather = issue_early(probe)
    probe._forward_begin(None, ())
    assert probe._recorder.current.slot == 1
    assert probe._recorder.current.buckets == [gather]
    probe._waits_for(probe._gathering.pop(0, None))
    assert gather.wait_begin is not None


def test_what_is_reduced_after_the_last_backward_belongs_to_its_step() -> None:
    """A pipeline's schedule reduces once it has gone through all micro-batches."""
    probe = a_probe()
    one_step(probe, by_hand=True)
    probe._id_of = lambda group: 0
    reduced = probe.launch("reduce_scatter", 0, torch.ones(2), SimpleNamespace())
    assert probe._recorder.current.buckets == [reduced]
    assert probe._early == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gather_for_a_validation_belongs_to_no_step(by_hand: bool) -> None:
    probe = a_probe()
    one_step(probe, by_hand)
    issue_early(probe)
    with torch.no_grad():
        probe._forward_begin(None, ())
    probe._forward_end(None, (), None)
    probe._forward_begin(None, ())
    assert probe._recorder.current.slot == 1
    assert probe._recorder.current.buckets == []


@pytest.mark.parametrize("found_in_its_first_forward", [False, True])
def test_forwards_that_pass_by_the_hooks_pile_up_nothing(found_in_its_first_forward: bool) -> None:
    """Such as those of a submodule alone: no step ends, or none ever starts."""
    from ddpwatch.probe.fsdp import MAX_EARLY

    probe, now = a_probe(), itertools.count()
    records: list[StepRecord] = []
    probe._recorder = StepRecorder(records.append, lambda: next(now))
    if found_in_its_first_forward:
        probe._forward_begin(None, ())
    for _ in range(MAX_COLLECTIVES + MAX_EARLY + 2):
        issue_early(probe)
    assert len(probe._early) == MAX_EARLY
    assert probe._recorder.current is None
    assert [(record.status, record.buckets) for record in records] == [("aborted", [])] * found_in_its_first_forward


@pytest.mark.parametrize("context", [{"reduce_scatter_max_input_buffers": 1}, {}], ids=["new", "old"])
def test_on_a_gpu_the_compute_stream_is_stamped_before_it_waits(context: dict[str, int]) -> None:
    """FSDP2 waits for a gather before it uses it, for a reduce-scatter before the next one, or at the end.

    Older torch always keeps the memory of one reduce-scatter.
    """
    probe = a_probe()
    recorder = probe._recorder
    calls: list[str] = []
    names = ("wait_for_unshard", "post_backward", "finalize_backward")
    group: Any = SimpleNamespace(comm_ctx=SimpleNamespace(**context))
    for name in names:
        setattr(group, name, lambda name=name: calls.append(name))
    probe._groups = [lambda: group]
    probe._stamp_waits(0, group)
    recorder.forward_begin()
    gather, first, second = (collective(0, None, None) for _ in range(3))
    first.op = second.op = "reduce_scatter"
    probe.finished(gather)
    group.wait_for_unshard()
    probe.finished(first)
    group.post_backward()
    probe.finished(second)
    group.finalize_backward()
    assert calls == list(names)
    stamps = [gather.done, gather.wait_begin, first.done, first.wait_begin, second.done, second.wait_begin]
    assert None not in stamps
    assert stamps == sorted(stamps)  # type: ignore[type-var]
