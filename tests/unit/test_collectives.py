"""Seeing collectives: process groups, comm hooks, completion callbacks."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import _reducer_allreduce_and_upcast_hook
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.probe import completion
from ddpwatch.probe.collectives import GroupHooks
from ddpwatch.probe.completion import drain
from ddpwatch.probe.hooks import DdpProbe
from ddpwatch.probe.process_group import TimedGroup, _timed_groups
from ddpwatch.probe.record import BucketRecord, StepRecord
from ddpwatch.probe.recorder import StepRecorder
from tests.support.probe import LAYERS, NAP_S, FutureGroup, Watched, assert_launches_lie_between_the_naps, gloo_group

__all__ = ["gloo_group"]


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


def test_a_comm_hook_that_comes_later_is_seen_and_shown_as_it_was_given() -> None:
    watched = Watched()
    watched.ddp.register_comm_hook(None, fp16_compress_hook)
    assert watched.ddp._comm_hooks == [(fp16_compress_hook, None)]
    steps = watched.train(4)
    assert all(done is not None for step in steps for done in step.comm_done)
    assert steps[3].comm_bytes[0] == 4 * (64 + 8)  # of gradients, not on the wire
    assert watched.layouts[-1].comm_hook == "fp16_compress_hook"


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


def test_a_thread_of_the_group_keeps_its_python_state() -> None:
    """Otherwise each callback gets a new one, without the attributes that the last one set."""
    kept: dict[int, list[bool]] = {}
    done = threading.Semaphore(0)

    def call(entry: BucketRecord) -> None:
        kept.setdefault(threading.get_native_id(), []).append(hasattr(completion._thread_state, "kept"))
        done.release()

    def calls() -> list[list[bool]]:
        """Of each thread but this one: a future that is done already calls back at once, here."""
        return [calls for thread, calls in kept.items() if thread != threading.get_native_id()]

    for _ in range(5000):
        future = dist.all_reduce(torch.ones(1 << 16), async_op=True).get_future()  # type: ignore[union-attr]
        future.add_done_callback(completion.Callback(call, BucketRecord(0, 0, 0, 0)))
        assert done.acquire(timeout=60)
        if max(map(len, calls()), default=0) > 10:
            break
    drain()
    assert max(map(len, calls())) > 10
    assert all(all(later) for _, *later in calls())


def test_a_comm_hook_sees_sparse_gradients() -> None:
    """Their size is that of their values."""
    ddp = DistributedDataParallel(nn.EmbeddingBag(10, 4, sparse=True))
    records: list[StepRecord] = []
    errors: list[Exception] = []
    recorder = StepRecorder(records.append)
    probe = DdpProbe(ddp, 0, 0, recorder, lambda layout: None, errors.append)

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

    quiet = SimpleNamespace(before_launch=lambda: 0, on_error=lambda error: None)
    with pytest.raises(dist.DistBackendError, match="the wire is cut"):
        dist.ProcessGroup.allreduce(TimedGroup(Broken(), quiet), [torch.ones(1)], dist.AllreduceOptions())  # type: ignore[arg-type]


def test_the_process_groups_own_hooks_are_used_where_torch_has_them() -> None:
    group, seen, done = FutureGroup(), [], []

    def after_launch(index: int | None, nbytes: int, at: int, future: Callable[[], Any]) -> None:
        seen.append((index, nbytes, at))
        future().add_done_callback(lambda _: done.append(at))

    stamps = iter([11, 12, 0])
    hooks = GroupHooks(group, SimpleNamespace(before_launch=lambda: next(stamps), after_launch=after_launch))
    first, second = group.collective(1, torch.ones(8)), group.collective(2, torch.ones(4))
    second.set_result(torch.ones(4))
    first.set_result(torch.ones(8))
    group.collective(3, torch.ones(2))  # the observer did not want it
    group.collective(5, torch.ones(2), "HookOpName.all_gather")
    group.collective(6, torch.ones(2, dtype=torch.int32))  # which parameters were used
    hooks.close()
    group.collective(4, torch.ones(2))
    assert seen == [(None, 32, 11), (None, 16, 12)]
    assert done == [12, 11]
    assert GroupHooks.supported(group)
    assert not GroupHooks.supported(object())


def test_an_error_in_a_process_groups_hook_does_not_reach_the_job() -> None:
    group, errors = FutureGroup(), []

    def after_launch(*_: Any) -> None:
        raise ValueError("ours")

    GroupHooks(group, SimpleNamespace(before_launch=lambda: 1, after_launch=after_launch, on_error=errors.append))
    group.collective(1, torch.ones(1))
    assert [str(error) for error in errors] == ["ours"]


def test_a_comm_hook_runs_unwrapped_where_process_groups_have_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FutureGroup()
    for name in ("register_pre_hook", "register_post_hook"):
        monkeypatch.setattr(dist.ProcessGroup, name, method_of(group, name), raising=False)
    callers: list[str] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotation in quotes
        callers.append(sys._getframe(1).f_code.co_name)
        group.collective(bucket.index(), bucket.buffer()).set_result(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    watched = Watched()
    watched.ddp.register_comm_hook(None, hook)
    steps = watched.train(3)
    assert "ddpwatch_timing" not in callers
    assert steps[-1].comm_label == list(range(LAYERS))
    assert None not in steps[-1].comm_done
    watched.probe.close()
    assert (group.before, group.after) == ([], [])


def method_of(group: FutureGroup, name: str) -> Callable[..., Any]:
    """A method of the stand-in, to be patched into every process group."""
    return lambda self, hook: getattr(group, name)(hook)


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
