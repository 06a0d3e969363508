"""The hooks on a DDP module, in a job of one rank: what they see, what they leave alone, what they leave behind."""

from __future__ import annotations

import io
import pickle
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddpwatch.errors import DdpwatchError
from ddpwatch.messages import Layout, Mark, Step
from ddpwatch.probe import collectives
from ddpwatch.probe.activity import ActivityMonitor
from ddpwatch.probe.bucket_layout import bucket_layout
from ddpwatch.probe.collectives import GroupHooks, TimedGroup, drain
from ddpwatch.probe.hooks import HOOKS_PERIOD, DdpProbe
from ddpwatch.probe.recorder import MOST_REDUCTIONS, BucketRecord, StepRecord, StepRecorder
from ddpwatch.probe.session import ProbeSession
from ddpwatch.sampling.schedule import SamplingSchedule, is_sampled

MS = 1_000_000
LAYERS = 4
NAP_S = 0.02


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    drain()
    dist.destroy_process_group()


class Nap(torch.autograd.Function):
    """Sleeps in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_S)
        return gradient


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        napped: torch.Tensor = Nap.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return napped


def never(step: int) -> bool:
    return False


class Given(SamplingSchedule):
    """The kinds of steps are given."""

    def __init__(self, shadow: Callable[[int], bool] = never, unwatched: Callable[[int], bool] = never) -> None:
        super().__init__()
        self.is_shadow = shadow  # type: ignore[method-assign]
        self.is_unwatched = unwatched  # type: ignore[method-assign]


class Watched:
    """A DDP module with a probe on it; every second step from the fourth on is a shadow, where wanted."""

    def __init__(
        self,
        shadows: bool = False,
        prepare: Callable[[DistributedDataParallel], None] = lambda ddp: None,
        **options: Any,
    ) -> None:
        stack = nn.Sequential(*[Layer(8, 8) for _ in range(LAYERS)])
        self.ddp = DistributedDataParallel(stack, **{"bucket_cap_mb": 0.0002, **options})
        prepare(self.ddp)
        self.records: list[StepRecord] = []
        self.layouts: list[Layout] = []
        self.errors: list[Exception] = []
        self.recorder = StepRecorder(self.records.append)
        if shadows:
            self.recorder.sampling = Given(shadow=lambda step: step >= 4 and step % 2 == 1)
        self.probe = DdpProbe(self.ddp, 0, 100, self.recorder, self.layouts.append, self.errors.append)

    def train(self, steps: int) -> list[Step]:
        optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        for _ in range(steps):
            self.ddp(torch.ones(2, 8)).sum().backward()
            self.recorder.optimizer_begin()
            optimizer.step()
            self.recorder.optimizer_end()
            optimizer.zero_grad()
        self.recorder.finish()
        drain()
        assert self.errors == []
        return [record.message(0, 0) for record in self.records]


@pytest.fixture(scope="module")
def mixed() -> tuple[list[Step], Watched]:
    """Twelve steps, four of them shadows."""
    watched = Watched(shadows=True)
    return watched.train(12), watched


def test_a_shadow_step_tells_its_launches_without_having_seen_them(mixed: tuple[list[Step], Watched]) -> None:
    """The layers nap in the backward, so launches lie a nap apart; from DDP's own ready times as from our stamps."""
    steps, _ = mixed
    shadows = [step for step in steps if step.status == "shadow"]
    assert [step.step for step in shadows] == [5, 7, 9, 11]
    assert {bool(step.hook_param) for step in shadows} == {True, False}
    full = next(step for step in steps if step.step == 10)
    for shadow in shadows:
        assert shadow.bucket_index == full.bucket_index == list(range(LAYERS))
        assert shadow.bucket_bytes == full.bucket_bytes
        assert shadow.bucket_done == [None] * LAYERS
        assert len(shadow.hook_param) == (2 * LAYERS if is_sampled(shadow.step, HOOKS_PERIOD) else 0)
        backward = next(span for span in shadow.spans if span.phase == "backward")
        for position, launch in enumerate(shadow.bucket_launch):
            napped = launch - backward.start
            assert NAP_S * (position + 1) * 1e9 <= napped < NAP_S * (position + 1) * 1e9 * 1.5 + 5 * MS


def test_a_full_step_sees_every_bucket(mixed: tuple[list[Step], Watched]) -> None:
    steps, _ = mixed
    for step in (step for step in steps if step.status == "ok"):
        assert step.bucket_index == list(range(LAYERS))
        assert all(
            done is not None and done >= at for at, done in zip(step.bucket_launch, step.bucket_done, strict=True)
        )
        assert len(step.hook_param) == 2 * LAYERS
        assert min(step.hook_param) == 100


def test_ready_times_are_known_once_ddp_tells_what_is_in_its_buckets(mixed: tuple[list[Step], Watched]) -> None:
    """It rebuilds them in the second iteration and notes them in the third."""
    steps, watched = mixed
    known = [all(at is not None for at in step.bucket_ready) for step in steps]
    assert known == [True, False, *[True] * 10]
    assert [len(layout.buckets) for layout in watched.layouts] == [1, LAYERS, LAYERS]
    names = [[watched.layouts[-1].params[i] for i in bucket.params] for bucket in watched.layouts[-1].buckets]
    assert [sorted(row) for row in names] == [[f"{i}.bias", f"{i}.weight"] for i in reversed(range(LAYERS))]


def test_the_buckets_of_a_module_that_is_never_rebuilt_are_known() -> None:
    watched = Watched(find_unused_parameters=True, bucket_cap_mb=0.0005)
    (step, *_) = watched.train(2)
    assert sorted(i for bucket in bucket_layout(watched.ddp) for i in bucket.params) == list(range(2 * LAYERS))
    assert [
        bucket.nbytes for bucket in bucket_layout(watched.ddp)
    ] == step.bucket_bytes  # not which were used: integers
    assert all(at is not None for at in step.bucket_ready)


def test_a_comm_hook_that_was_there_before_is_left_alone() -> None:
    watched = Watched(prepare=lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook))
    steps = watched.train(4)
    assert watched.probe.foreign_hook == "fp16_compress_hook"
    assert not watched.probe.timed
    assert [step.status for step in steps] == ["warmup", "ok", "ok", "ok"]
    assert steps[3].bucket_done == [None] * LAYERS
    backward = next(span for span in steps[3].spans if span.phase == "backward")
    assert steps[3].bucket_launch[0] - backward.start < 2 * NAP_S * 1e9 < steps[3].bucket_launch[3] - backward.start


def test_a_comm_hook_that_comes_later_is_seen_and_shown_as_it_was_given() -> None:
    watched = Watched()
    watched.ddp.register_comm_hook(None, fp16_compress_hook)
    assert watched.ddp._comm_hooks == [(fp16_compress_hook, None)]
    steps = watched.train(4)
    assert all(done is not None for step in steps for done in step.bucket_done)
    assert steps[3].bucket_bytes[0] == 4 * (64 + 8)  # of gradients, not on the wire


def test_a_built_in_comm_hook_is_seen() -> None:
    watched = Watched()
    watched.ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert all(len(step.bucket_done) == LAYERS and None not in step.bucket_done for step in watched.train(4)[1:])


def test_a_module_that_is_given_another_group_is_seen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    other = dist.new_group([0])
    watched.ddp._update_process_group(other)
    steps = watched.train(3)
    assert all(None not in step.bucket_done for step in steps)


def test_a_job_without_an_optimizer_ends_every_step_with_its_backward() -> None:
    """Also a shadow step, and one whose comm hook cannot be seen: nothing may pile up."""
    for watched in (
        Watched(shadows=True),
        Watched(shadows=True, prepare=lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook)),
    ):
        for _ in range(10):
            watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.recorder.finish()
        assert [record.status for record in watched.records] == ["warmup", *["ok"] * 4, *["shadow", "ok"] * 2, "shadow"]


def test_a_job_whose_optimizer_stops_for_good_goes_on_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # no naps
    watched = Watched()
    watched.train(1)
    for _ in range(2 * MOST_REDUCTIONS):
        watched.ddp(torch.ones(2, 8)).mean().backward()
    assert watched.recorder.current is not None
    assert len(watched.recorder.current.buckets) <= MOST_REDUCTIONS * LAYERS
    assert len(watched.records) >= MOST_REDUCTIONS


def test_a_module_can_be_watched_again() -> None:
    watched = Watched()
    watched.train(3)
    watched.probe.close()
    again = DdpProbe(watched.ddp, 0, 0, watched.recorder, watched.layouts.append, watched.errors.append)
    assert [len(step.bucket_done) for step in watched.train(3)[-3:]] == [LAYERS] * 3
    again.close()


def test_two_modules_whose_forwards_lie_in_another_step_than_their_backwards() -> None:
    """As in a GAN: the generator's forward comes before the discriminator's step. Each is seen or derived, always."""
    generator = Watched(shadows=True)
    recorder = generator.recorder
    discriminator = DistributedDataParallel(Layer(8, 8), bucket_cap_mb=0.0002)
    probe = DdpProbe(discriminator, 1, 200, recorder, generator.layouts.append, generator.errors.append)
    for _ in range(10):
        made = generator.ddp(torch.ones(2, 8))
        discriminator(made.detach()).sum().backward()
        recorder.optimizer_begin()
        recorder.optimizer_end()
        discriminator(made).sum().backward()
        recorder.optimizer_begin()
        recorder.optimizer_end()
    recorder.finish()
    drain()
    steps = [record.message(0, 0) for record in generator.records]
    probe.close()
    assert generator.errors == []
    backwards = [sum(span.phase == "backward" for span in step.spans) for step in steps]
    assert sum(step.bucket_module.count(0) for step in steps) >= 9 * LAYERS
    assert sum(backwards) == 20
    assert all((None in step.bucket_done) == (step.status == "shadow") for step in steps if step.bucket_index)


class Hooked(Layer):
    """Has a hook on its own output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return out


def test_hooks_on_an_output_live_beside_ours() -> None:
    """The module's own, which was there before, and the user's, one of them taken off again."""
    watched = Watched()
    watched.ddp.module.append(Hooked(8, 8))  # DDP does not know its parameters, and need not
    seen: list[torch.Tensor] = []
    for _ in range(3):
        for ddp in (watched.ddp, watched.ddp.module):
            out = ddp(torch.ones(2, 8))
            out.register_hook(seen.append)
            out.register_hook(lambda gradient: seen.clear()).remove()
            out.sum().backward()
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    watched.recorder.finish()
    assert len(seen) == 6
    assert [sum(name == "backward" for name, _, _ in record.spans) for record in watched.records] == [1, 1, 1]


def test_a_thread_of_the_group_keeps_its_python_state() -> None:
    """Else it makes one for each callback, in which nothing of the last one is left."""
    kept: dict[int, list[bool]] = {}
    done = threading.Semaphore(0)

    def call(entry: BucketRecord) -> None:
        kept.setdefault(threading.get_native_id(), []).append(hasattr(collectives._here, "kept"))
        done.release()

    def calls() -> list[list[bool]]:
        """Of each thread but this one: who is done before it was asked calls back at once, here."""
        return [calls for thread, calls in kept.items() if thread != threading.get_native_id()]

    for _ in range(5000):
        future = dist.all_reduce(torch.ones(1 << 16), async_op=True).get_future()  # type: ignore[union-attr]
        future.add_done_callback(collectives.Callback(call, BucketRecord(0, 0, 0, 0)))
        assert done.acquire(timeout=10)
        if max(map(len, calls()), default=0) > 10:
            break
    drain()
    assert max(map(len, calls())) > 10
    assert all(all(later) for _, *later in calls())


def test_a_comm_hook_sees_sparse_gradients() -> None:
    """Their bytes are those of their values."""
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


def test_nothing_is_seen_after_the_end() -> None:
    watched = Watched()
    watched.train(2)
    count = len(watched.records)
    watched.probe.close()
    watched.train(2)
    assert len(watched.records) == count


def test_an_error_of_the_collective_is_the_one_that_ddp_would_raise() -> None:
    """It passes through our Python on its way."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist.group.WORLD, name)

        def allreduce(self, *_: Any) -> None:
            raise dist.DistBackendError("the wire is cut")

    quiet = SimpleNamespace(called=lambda: 0, failed=lambda error: None)
    with pytest.raises(dist.DistBackendError, match="the wire is cut"):
        dist.ProcessGroup.allreduce(TimedGroup(Broken(), quiet), [torch.ones(1)], dist.AllreduceOptions())  # type: ignore[arg-type]


def test_an_unwatched_step_is_left_alone() -> None:
    watched = Watched()
    watched.recorder.sampling = Given(unwatched=lambda step: step in (3, 5))
    hooked, ours = [], []
    for _ in range(7):
        output = watched.ddp(torch.ones(2, 8))
        hooked.append(bool(output._backward_hooks))
        output.sum().backward()
        ours.append(watched.probe._observing)
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    watched.recorder.finish()
    drain()
    assert watched.errors == []
    assert hooked == ours == [step not in (3, 5) for step in range(7)]
    steps = [record.message(0, 0) for record in watched.records]
    assert [step.status for step in steps] == ["warmup", "ok", "ok", "unwatched", "ok", "unwatched", "ok"]
    assert all(step.bucket_index for step in steps if step.status != "unwatched")


def test_the_moment_at_which_a_backward_waits_is_told() -> None:
    """Once for each that reduces, with DDP's statistics read by then; not of an unwatched step."""
    watched = Watched()
    watched.recorder.sampling = Given(shadow=lambda step: step == 2, unwatched=lambda step: step == 3)
    told: list[tuple[int, str, bool]] = []
    watched.recorder.lull = lambda: told.append(
        (watched.recorder.steps, watched.recorder.phase, bool(watched.probe._stats))
    )
    for _ in range(5):
        with watched.ddp.no_sync():
            watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    drain()
    assert watched.errors == []
    assert told == [(step, "sync", True) for step in (0, 1, 2, 4)]


class FutureGroup:
    """Process groups as torch 2.14 is to have them: hooks around each collective."""

    def __init__(self) -> None:
        self.before: list[Callable[[Any], None]] = []
        self.after: list[Callable[[Any], None]] = []

    def register_pre_hook(self, hook: Callable[[Any], None]) -> Any:
        self.before.append(hook)
        return SimpleNamespace(remove=lambda: self.before.remove(hook))

    def register_post_hook(self, hook: Callable[[Any], None]) -> Any:
        self.after.append(hook)
        return SimpleNamespace(remove=lambda: self.after.remove(hook))

    def collective(
        self, op_id: int, tensor: torch.Tensor, name: str = "HookOpName.all_reduce"
    ) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        for hook in list(self.before):
            hook(SimpleNamespace(op_id=op_id, name=name, input_tensors=[tensor]))
        for hook in list(self.after):
            hook(SimpleNamespace(op_id=op_id, work=SimpleNamespace(get_future=lambda: future)))
        return future


def test_the_process_groups_own_hooks_are_used_where_torch_has_them() -> None:
    group, seen, done = FutureGroup(), [], []

    def issued(index: int | None, nbytes: int, at: int, future: torch.futures.Future[torch.Tensor]) -> None:
        seen.append((index, nbytes, at))
        future.add_done_callback(lambda _: done.append(at))

    stamps = iter([11, 12, 0])
    hooks = GroupHooks(group, SimpleNamespace(called=lambda: next(stamps), issued=issued))
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


def test_an_error_in_a_process_groups_hook_stays_ours() -> None:
    group, errors = FutureGroup(), []

    def issued(*_: Any) -> None:
        raise ValueError("ours")

    GroupHooks(group, SimpleNamespace(called=lambda: 1, issued=issued, failed=errors.append))
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
    assert steps[-1].bucket_index == list(range(LAYERS))
    assert None not in steps[-1].bucket_done
    watched.probe.close()
    assert (group.before, group.after) == ([], [])


def method_of(group: FutureGroup, name: str) -> Callable[..., Any]:
    """The stand-in's method as one of every process group."""
    return lambda self, hook: getattr(group, name)(hook)


class Tempered(nn.Module):
    """Returns a parameter beside its output, as CLIP does with its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.scale


def test_a_parameter_among_the_outputs_gathers_no_hooks() -> None:
    ddp = DistributedDataParallel(Tempered())
    probe = DdpProbe(ddp, 0, 0, StepRecorder(lambda record: None), lambda layout: None, pytest.fail)
    for _ in range(3):
        output, scale = ddp(torch.ones(2, 8))
        (output.sum() * scale).backward()
    assert not ddp.module.scale._backward_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of hooks that are not saved
        torch.save(ddp(torch.ones(2, 8)), io.BytesIO())
    probe.close()


def test_the_groups_backend_stays_bound_to_its_device() -> None:
    inner = dist.ProcessGroup(0, 1)
    inner.bound_device_id = torch.device("cuda:0")
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    assert TimedGroup(inner, None).bound_device_id == torch.device("cuda:0")


def test_one_gpu_is_watched_in_a_process() -> None:
    def module(*devices: int) -> Any:
        gpus = [torch.device("cuda", index) for index in devices]
        params = [SimpleNamespace(device=gpu) for gpu in gpus]
        return SimpleNamespace(device=gpus[0], module=nn.Linear(1, 1), parameters=lambda: params)

    session: Any = SimpleNamespace(_gpu=None)
    ProbeSession._check_gpu(session, module(1, 1))
    with pytest.raises(DdpwatchError, match="computes on cuda:0, while cuda:1 is watched"):
        ProbeSession._check_gpu(session, module(0))
    with pytest.raises(DdpwatchError, match="computes on cuda:2, while cuda:1 is watched"):
        ProbeSession._check_gpu(session, module(1, 2))


class Slow(Dataset[torch.Tensor]):
    """Its second item takes a while."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            time.sleep(NAP_S)
        if index == 3:
            raise IndexError
        return torch.ones(1)


def test_what_happens_outside_the_steps_is_marked(tmp_path: Any) -> None:
    marks: list[Mark] = []
    saved: list[int] = []
    untouched = torch.save
    outside = ActivityMonitor(7, marks.append, lambda: saved.append(1))
    assert len(list(DataLoader(Slow()))) == 3
    torch.save({}, tmp_path / "checkpoint")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    torch._dynamo.reset()  # forgets our callbacks
    outside.close()
    torch.save({}, tmp_path / "checkpoint")
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    assert [(mark.rank, mark.kind) for mark in marks] == [(7, "data"), (7, "save"), (7, "compile")]
    assert marks[0].end_ns is not None
    assert marks[0].end_ns - marks[0].start_ns >= NAP_S * 1e9
    assert saved == [1]
    assert torch.save is untouched


def test_a_validation_belongs_to_no_step() -> None:
    """The step after it begins where it ended."""
    watched, seen = Watched(), []
    watched.recorder.on_validation = lambda begin, end: seen.append((begin, end))
    optimizer = torch.optim.SGD(watched.ddp.parameters(), lr=0.1)
    for step in range(3):
        watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.recorder.optimizer_begin()
        optimizer.step()
        watched.recorder.optimizer_end()
        if step == 1:
            with torch.no_grad():
                watched.ddp(torch.ones(2, 8))
                time.sleep(NAP_S)
                watched.ddp(torch.ones(2, 8))
    watched.recorder.finish()
    first, second, third = watched.records
    ((begin, end),) = seen
    assert first.end == second.start
    assert second.end <= begin
    assert end - begin >= NAP_S * 1e9
    assert third.start == end
    assert second.cpu_ns is None  # it holds the validation's
    assert third.cpu_ns is not None


def test_a_bucket_record_costs_no_dictionary() -> None:
    assert not hasattr(BucketRecord(0, 0, 1, 2), "__dict__")


def test_no_collective_runs_in_the_base_class() -> None:
    """There torch would hold the GIL and wait for a lock, whose owner may be waiting for the GIL."""
    base = dist.ProcessGroup
    collectives = {
        name for name in dir(base) if re.search("-> .*Work$", getattr(base, name).__doc__ or "", re.MULTILINE)
    }
    assert len(collectives) > 15
    assert collectives <= vars(TimedGroup).keys()
