"""Seeing collectives: process groups, comm hooks."""

from __future__ import annotations

import functools
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import _reducer_allreduce_and_upcast_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ddpwatch.analysis.step import backward_starts, figures
from ddpwatch.probe import calls, comm_hooks
from ddpwatch.probe.ddp import DdpProbe
from ddpwatch.probe.ddp_collectives import GroupHooks, _registered, _take_hooks_out, nbytes_of
from ddpwatch.probe.ddp_timed_group import TimedGroup, _timed_groups
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.sampling.schedule import SamplingSchedule
from tests.support.guards import noting
from tests.support.probe import LAYERS, NAP_S, Watched, assert_launches_lie_between_the_naps, gloo_group

__all__ = ["gloo_group"]
HAS_HOOKS = GroupHooks.supported(dist.ProcessGroup)
has_hooks = pytest.mark.skipif(not HAS_HOOKS, reason="process groups have no hooks before torch 2.14")


@pytest.mark.skipif(HAS_HOOKS, reason="the process group's hooks see it")
def test_a_comm_hook_that_was_there_before_is_left_alone() -> None:
    watched = Watched(prepare=lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook))
    steps = watched.train(4)
    assert watched.probe.foreign_hook == "fp16_compress_hook"
    assert not watched.probe.timed
    assert [step.status for step in steps] == ["warmup", "ok", "ok", "ok"]
    assert steps[3].comm_done == [None] * LAYERS
    backward = next(span for span in steps[3].spans if span.phase == "backward")
    assert steps[3].comm_launch[3] - backward.start > 2 * NAP_S * 1e9
    assert_launches_lie_between_the_naps(steps[3], watched, late_ns=watched.longest_forward_ns)


def test_the_comm_hook_of_mixed_precision_is_seen_through_the_reducer() -> None:
    """DDP's own cannot run on a CPU: this one has its name, and also lets the reducer all-reduce."""

    def hook(ddp: DistributedDataParallel, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp.reducer._run_allreduce_hook(bucket).wait()
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced

    hook.__annotations__.clear()  # DDP refuses them as texts
    hook.__name__ = hook.__qualname__ = _reducer_allreduce_and_upcast_hook.__name__
    watched = Watched(prepare=lambda ddp: ddp.register_comm_hook(ddp, hook))
    steps = watched.train(4)
    assert (watched.probe.foreign_hook, watched.probe.timed) == ("", True)
    assert all(len(step.comm_done) == LAYERS and None not in step.comm_done for step in steps[1:])


@pytest.fixture
def no_calls_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Python < 3.12."""
    comm_hooks._observers.clear()
    comm_hooks._end_with_the_last()
    for name, value in {"_tool": None, "_seen": {}, "_codes": {}, "_TOOL_IDS": ()}.items():
        monkeypatch.setattr(calls, name, value)


@pytest.fixture(params=["by its group's hooks", "by its calls", "by a wrapper"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How a comm hook is seen: by the first of these that torch and Python have."""
    if request.param == "by its group's hooks" and not HAS_HOOKS:
        pytest.skip("process groups have no hooks before torch 2.14")
    if request.param == "by its calls" and sys.version_info < (3, 12):
        pytest.skip("calls are seen on Python 3.12 and newer")
    if request.param == "by a wrapper":
        monkeypatch.setattr(GroupHooks, "supported", staticmethod(lambda group: False))
    if request.param != "by its calls":
        request.getfixturevalue("no_calls_are_seen")
    gc.collect()
    comm_hooks._observers.clear()  # of other tests' modules, which their hooks keep
    comm_hooks._end_with_the_last()
    original = DistributedDataParallel.register_comm_hook
    yield request.param
    DistributedDataParallel.register_comm_hook = original  # type: ignore[method-assign]


def test_a_comm_hook_that_comes_later_is_seen_and_shown_as_it_was_given(way: str) -> None:
    watched = Watched()
    watched.ddp.register_comm_hook(None, fp16_compress_hook)
    assert watched.ddp._comm_hooks == [(fp16_compress_hook, None)]
    steps = watched.train(4)
    assert all(done is not None for step in steps for done in step.comm_done)
    assert steps[3].comm_bytes[0] == 4 * (64 + 8)  # of gradients, not on the wire
    assert [(bucket.nbytes, len(bucket.params)) for bucket in watched.layouts[-1].buckets] == [
        (4 * (64 + 8), 2)
    ] * LAYERS
    assert watched.layouts[-1].comm_hook == "fp16_compress_hook"
    watched.probe.close()
    assert comm_hooks._registrations is None


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are seen on Python 3.12 and newer")
@pytest.mark.parametrize("way", ["by its calls"], indirect=True)
def test_modules_that_share_the_code_of_a_comm_hook(way: str) -> None:
    """Each sees its own buckets; and the code is no longer seen once they are not."""
    first, second, plain = Watched(), Watched(), DistributedDataParallel(nn.Linear(4, 4))
    for ddp in (first.ddp, second.ddp, plain):
        ddp.register_comm_hook(None, fp16_compress_hook)
    assert all(len(step.comm_done) == LAYERS and None not in step.comm_done for step in first.train(3)[1:])
    plain(torch.ones(2, 4)).sum().backward()
    assert second.train(1)[0].comm_bytes == first.records[0].message(0, 0).comm_bytes
    code = id(fp16_compress_hook.__code__)
    before = calls._seen[code]
    for watched in (first, second):
        watched.probe.close()
    assert len(before) - len(calls._seen.get(code, ())) == 2


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are seen on Python 3.12 and newer")
@pytest.mark.parametrize("way", ["by its calls"], indirect=True)
def test_a_comm_hook_costs_nothing_in_a_bare_step(way: str) -> None:
    """Nothing calls back there; the next watched step has its buckets."""
    watched = Watched()
    watched.ddp.register_comm_hook(None, fp16_compress_hook)
    tool, code = calls._tool, fp16_compress_hook.__code__
    schedule = SamplingSchedule()
    schedule.is_light = lambda step: False  # type: ignore[method-assign]
    watched.recorder.use(sampling=schedule)
    watched.train(3)
    schedule.is_bare = lambda step: True  # type: ignore[method-assign]
    watched.train(3)
    assert sys.monitoring.get_local_events(tool, code) == 0  # type: ignore[attr-defined]
    schedule.is_bare = lambda step: False  # type: ignore[method-assign]
    assert all(len(step.comm_done) == LAYERS for step in watched.train(3)[-2:])
    watched.probe.close()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are seen on Python 3.12 and newer")
@pytest.mark.parametrize("way", ["by its calls"], indirect=True)
def test_a_comm_hook_whose_calls_cannot_be_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorator's code has no bucket: the step is watched, without its collectives where its group has no hooks."""
    monkeypatch.setattr(GroupHooks, "supported", staticmethod(lambda group: False))

    @functools.wraps(fp16_compress_hook)
    def decorated(*arguments: Any) -> Any:
        return fp16_compress_hook(*arguments)

    watched = Watched()
    watched.ddp.register_comm_hook(None, decorated)
    assert [step.status for step in watched.train(3)] == ["warmup", "ok", "ok"]
    assert watched.probe.foreign_hook == "fp16_compress_hook"
    watched.probe.close()


def test_a_built_in_comm_hook_is_seen() -> None:
    watched = Watched()
    watched.ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert all(len(step.comm_done) == LAYERS and None not in step.comm_done for step in watched.train(4)[1:])


def test_a_module_that_is_given_another_group_is_seen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    other = dist.new_group([0])
    watched.ddp._update_process_group(other)
    steps = watched.train(3)
    assert all(None not in step.comm_done for step in steps)
    assert [group.id == 0 for group in watched.groups] == [True, False]
    assert [view.inner for view in _timed_groups[watched.ddp]] == [other]  # the group before can be let go


def test_a_comm_hook_sees_sparse_gradients() -> None:
    """Their size is that of their values."""
    ddp = DistributedDataParallel(nn.EmbeddingBag(10, 4, sparse=True))
    records: list[StepRecord] = []
    errors: list[Exception] = []
    recorder = StepRecorder(records.append)
    probe = DdpProbe(ddp, ProbeContext(recorder, noting(errors), lambda layout: None))

    def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP does not take annotations that are strings
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    recorder.finish()
    assert errors == []
    assert [bucket.nbytes for record in records for bucket in record.buckets] == [4 * 4 * 4] * 2
    probe.close()


def test_a_comm_hook_that_returns_no_future_gets_ddps_own_error() -> None:
    watched = Watched()

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return bucket.buffer()

    watched.ddp.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="callback must return"):
        watched.ddp(torch.ones(2, 8)).sum().backward()
    assert watched.errors == []


def test_an_error_of_the_collective_is_the_one_that_ddp_would_raise() -> None:
    """It passes through the probe's Python on its way."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist.group.WORLD, name)

        def allreduce(self, *_: Any) -> None:
            raise dist.DistBackendError("the wire is cut")

    quiet = SimpleNamespace(before_launch=lambda: 0, guard=noting([]))
    with pytest.raises(dist.DistBackendError, match="the wire is cut"):
        dist.ProcessGroup.allreduce(TimedGroup(Broken(), quiet), [torch.ones(1)], dist.AllreduceOptions())  # type: ignore[arg-type]


class Observer:
    """Takes what a group's hooks see."""

    def __init__(self, before: Callable[[], int] = lambda: 1) -> None:
        self.before_launch = before
        self.is_reducing = True
        self.launched: list[tuple[int | None, int, int]] = []
        self.works: list[dist.Work] = []
        self.errors: list[Exception] = []
        self.guard = noting(self.errors)

    def after_launch(self, index: int | None, nbytes: int, at: int, pending: Any) -> None:
        self.launched.append((index, nbytes, at))
        self.works.append(pending)

    def on_comm_hook(self) -> None:
        raise AssertionError


def hooks_left(hooks: list[GroupHooks]) -> bool:
    """Whether a group still has the hooks, of which the list has the last other reference."""
    left = weakref.ref(hooks.pop())
    return left() is not None


@has_hooks
def test_a_groups_own_hooks_see_its_all_reduces() -> None:
    group = dist.new_group([0])
    stamps = iter([11, 12, 0])
    observer = Observer(lambda: next(stamps))
    hooks = [GroupHooks(group, observer)]
    dist.all_reduce(torch.ones(8), group=group)
    dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(2), group=group)  # the observer does not want it
    dist.all_reduce(torch.ones(2, dtype=torch.int32), group=group)  # which parameters were used
    dist.all_gather([torch.ones(2)], torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2))  # in another group
    hooks[0].close()
    dist.all_reduce(torch.ones(2), group=group)
    assert (observer.launched, observer.errors) == ([(None, 32, 11), (None, 16, 12)], [])
    for work, ones in zip(observer.works, (8, 4), strict=True):
        work.wait()
        assert work.get_future().value()[0].tolist() == [1.0] * ones
    assert not hooks_left(hooks)


@has_hooks
@pytest.mark.parametrize("method", ["before_launch", "after_launch"])
def test_an_error_in_a_process_groups_hook_does_not_reach_the_job(method: str) -> None:
    def fail(*_: Any) -> int:
        raise ValueError("ours")

    observer = Observer()
    setattr(observer, method, fail)
    hooks = GroupHooks(dist.group.WORLD, observer)
    dist.all_reduce(torch.ones(1))
    hooks.close()
    assert [str(error) for error in observer.errors] == ["ours"]


@has_hooks
def test_a_users_hooks_on_the_group_stay() -> None:
    seen: list[str] = []
    group: Any = dist.new_group([0])
    for number in (0, 1, id(seen)):
        group.register_pre_hook(number, lambda args: seen.append("before"))
        group.register_post_hook(number, lambda args: seen.append("after"))
    hooks, observer = [], Observer()
    for closes in (False, True):
        hooks.append(GroupHooks(group, observer))
        dist.all_reduce(torch.ones(1), group=group)
        if closes:
            while hooks:
                hooks.pop().close()
        dist.all_reduce(torch.ones(1), group=group)
    assert seen == 4 * [*3 * ["before"], *3 * ["after"]]
    assert len(observer.launched) == 2 + 2


@has_hooks
def test_a_groups_hooks_go_with_the_module_and_when_the_group_is_destroyed() -> None:
    group, observer = dist.new_group([0]), Observer()
    of_dead = [GroupHooks(group, Observer())]
    hooks = [GroupHooks(group, observer)]
    assert not hooks_left(of_dead)
    dist.destroy_process_group(group)
    hooks[0].close()
    assert not hooks_left(hooks)


@has_hooks
@pytest.mark.parametrize("where", ["within a hook", "while the group is busy"])
def test_a_groups_hooks_stay_and_do_nothing_where_torch_may_be_going_through_them(where: str) -> None:
    """It would go on with one that is gone. A signal handler may close at any time."""
    group = dist.new_group([0])
    within = where == "within a hook"
    observer = Observer(lambda: hooks[0].close() or 1 if within else 1)  # type: ignore[func-returns-value]
    hooks = [GroupHooks(group, observer)]
    if not within:
        hooks[0].close(busy=True)
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    assert (observer.launched, observer.errors) == ([], [])
    left = weakref.ref(hooks.pop())
    assert left() is not None
    _take_hooks_out()  # at exit
    assert left() is None


def test_bytes_are_those_of_the_values_and_what_a_job_overrides_does_not_see_them_read() -> None:
    class Refusing(TorchFunctionMode):
        def __torch_function__(self, function: Any, *_: Any) -> Any:
            raise AssertionError(function)

    values = torch.eye(4)
    with Refusing():
        assert nbytes_of(values) == 64
    assert nbytes_of(values.to_sparse()) == 16
    assert nbytes_of(values.to_mkldnn()) == 0  # no backend takes it


def own_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotation in quotes
    state.append(sys._getframe(1).f_code.co_name)
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


@has_hooks
@pytest.mark.usefixtures("no_calls_are_seen")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_comm_hook_runs_unwrapped_where_process_groups_have_hooks(when: str) -> None:
    callers: list[str] = []

    def register(ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(callers, own_hook)

    watched = Watched(prepare=register if when == "before" else lambda ddp: None)
    if when == "after":
        register(watched.ddp)
    steps = watched.train(3)
    assert "ddpwatch_timing" not in callers
    assert (watched.probe.foreign_hook, watched.probe.timed) == ("", True)
    assert steps[-1].comm_label == list(range(LAYERS))
    assert steps[-1].comm_bytes == [4 * (64 + 8)] * LAYERS
    assert None not in steps[-1].comm_done
    hooks = [watched.probe._group_hooks]
    watched.probe.close()
    watched.probe.close()
    watched.probe._group_hooks = None
    assert not hooks_left(hooks)  # type: ignore[arg-type]


def test_a_comm_hook_that_waits_itself_is_no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hides such a collective, though it lies within the backward."""
    monkeypatch.setattr("ddpwatch.probe.recorder.WAITED_NS", 0)

    def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP does not take annotations that are strings
        dist.all_reduce(bucket.buffer())
        (future := torch.futures.Future[torch.Tensor]()).set_result(bucket.buffer())
        return future

    watched = Watched()
    watched.ddp.register_comm_hook(None, hook)
    step = watched.train(3)[-1]
    waits = [span for span in step.spans if span.phase == "sync"]
    assert len(waits) == LAYERS + 1
    assert len(backward_starts(step)) == 1
    assert (figures(step).exposed_ns or 0) >= sum(wait.end - wait.start for wait in waits[:LAYERS])
    watched.probe.close()


@has_hooks
@pytest.mark.usefixtures("no_calls_are_seen")
@pytest.mark.parametrize("other_hook", [True, False])
def test_modules_that_share_a_group_see_their_own_collectives(other_hook: bool) -> None:
    """And none that the script issues between backwards."""
    watched, other = Watched(), Watched()
    other.probe.close()
    in_one_process = ProbeContext(watched.recorder, watched.guard, other.publish, module=1, param_base=200)
    other.probe = DdpProbe(other.ddp, in_one_process)
    watched.ddp.register_comm_hook([], own_hook)
    if other_hook:
        other.ddp.register_comm_hook([], own_hook)
    for _ in range(3):
        for one in (watched, other):
            one.ddp(torch.ones(2, 8)).sum().backward()
            dist.all_reduce(torch.ones(1))
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    watched.recorder.finish()
    for one in (watched, other):
        one.probe.close()
    assert watched.errors == []
    assert [bucket.module for bucket in watched.records[-1].buckets] == [*LAYERS * [0], *LAYERS * [1]]


@has_hooks
@pytest.mark.usefixtures("no_calls_are_seen")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("refused", ["register_pre_hook", "register_post_hook"])
def test_a_comm_hook_is_registered_where_the_groups_hooks_are_not(
    when: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches are derived, as on an older torch; only completions are missing."""

    gc.collect()  # modules of other tests

    def refuse(*_: Any) -> None:
        raise TypeError("another number of arguments")

    def register(ddp: DistributedDataParallel) -> None:
        monkeypatch.setattr(dist.ProcessGroup, refused, refuse)
        ddp.register_comm_hook([], own_hook)

    watched = Watched(prepare=register if when == "before" else lambda ddp: None)
    if when == "after":
        register(watched.ddp)
    assert watched.guard.off == {"collectives"}
    watched.errors.clear()
    steps = watched.train(3)
    assert (watched.probe.foreign_hook, watched.probe.timed) == ("own_hook", False)
    assert [step.status for step in steps] == ["warmup", "ok", "ok"]
    assert steps[-1].comm_done == [None] * LAYERS
    assert all(hooks._observer() not in (watched.probe, None) for hooks in _registered[dist.group.WORLD])
    watched.probe.close()


def test_the_groups_backend_stays_bound_to_its_device() -> None:
    inner = dist.ProcessGroup(0, 1)
    inner.bound_device_id = torch.device("cuda:0")
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    assert TimedGroup(inner, None).bound_device_id == torch.device("cuda:0")


def test_no_collective_runs_in_the_base_class() -> None:
    """In the base class torch would hold the GIL and wait for a lock, whose owner may be waiting for the GIL."""
    base = dist.ProcessGroup
    collectives = {
        name for name in dir(base) if re.search("-> .*Work$", getattr(base, name).__doc__ or "", re.MULTILINE)
    }
    assert len(collectives) > 15
    assert collectives <= vars(TimedGroup).keys()
