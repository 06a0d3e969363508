"""The hooks on a DDP module, in a job of one rank: what they see, what they leave alone, what they leave behind."""

from __future__ import annotations

import io
import itertools
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpwatch.analysis.step import buffer_waits
from ddpwatch.probe import calls
from ddpwatch.probe import recorder as recorder_module
from ddpwatch.probe.autograd import is_compiling_frames, optimizer_hook
from ddpwatch.probe.bucket_layout import bucket_layout
from ddpwatch.probe.ddp import DdpProbe
from ddpwatch.probe.derive import HOOKS_PERIOD
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.record import BucketRecord
from ddpwatch.probe.recorder import MAX_REDUCTIONS, StepRecorder
from ddpwatch.sampling.schedule import is_sampled
from ddpwatch.wire.messages import Step
from tests.support.guards import noting
from tests.support.probe import (
    LAYERS,
    NAP_S,
    FixedSchedule,
    Layer,
    Watched,
    assert_launches_lie_between_the_naps,
    gloo_group,
    light_steps,
)

__all__ = ["gloo_group"]


@pytest.fixture(scope="module")
def mixed() -> tuple[list[Step], Watched]:
    """Twelve steps, four of them light steps."""
    watched = Watched(light_steps())
    return watched.train(12), watched


def test_a_light_step_has_launches_that_nobody_saw(mixed: tuple[list[Step], Watched]) -> None:
    """The layers nap in the backward, so launches lie a nap apart; from DDP's own ready times as from stamps."""
    steps, watched = mixed
    early_ns = watched.longest_forward_ns
    late_ns = watched.longest_forward_ns + watched.longest_lag_ns
    light_steps = [step for step in steps if step.status == "shadow"]
    assert [step.step for step in light_steps] == [5, 7, 9, 11]
    assert {bool(step.hook_param) for step in light_steps} == {True, False}
    full = next(step for step in steps if step.step == 10)
    for light in light_steps:
        assert light.comm_label == full.comm_label == list(range(LAYERS))
        assert light.comm_bytes == full.comm_bytes
        assert light.comm_done == [None] * LAYERS
        assert len(light.hook_param) == (2 * LAYERS if is_sampled(light.step, HOOKS_PERIOD) else 0)
        backward = next(span for span in light.spans if span.phase == "backward")
        for position, launch in enumerate(light.comm_launch):
            assert NAP_S * (position + 1) * 1e9 <= launch - backward.start + early_ns
        assert_launches_lie_between_the_naps(light, watched, early_ns, late_ns)


def test_collectives_are_counted_alike_whether_they_are_seen_or_derived(mixed: tuple[list[Step], Watched]) -> None:
    steps, watched = mixed
    assert [(group.id, group.ranks, group.backend) for group in watched.groups] == [(0, [0], "gloo")]
    assert all(step.comm_seq == list(range(LAYERS)) and step.comm_group == [] for step in steps[1:])
    firsts = [step.comm_first_seq or 0 for step in steps[1:]]
    assert [after - before for before, after in itertools.pairwise(firsts)] == [LAYERS] * (len(firsts) - 1)


def test_a_full_step_sees_every_bucket(mixed: tuple[list[Step], Watched]) -> None:
    steps, watched = mixed
    for step in (step for step in steps if step.status == "ok"):
        assert step.comm_label == list(range(LAYERS))
        assert all(done is not None and done >= at for at, done in zip(step.comm_launch, step.comm_done, strict=True))
        assert len(step.hook_param) == 2 * LAYERS
        assert min(step.hook_param) == 100
        assert_launches_lie_between_the_naps(step, watched)


def test_ready_times_are_known_once_ddp_logs_what_is_in_its_buckets(mixed: tuple[list[Step], Watched]) -> None:
    """It rebuilds them in the second iteration and logs them in the third."""
    steps, watched = mixed
    known = [all(at is not None for at in step.comm_ready) for step in steps]
    assert known == [True, False, *[True] * 10]
    assert [len(layout.buckets) for layout in watched.layouts] == [1, LAYERS, LAYERS]
    names = [[watched.layouts[-1].params[i] for i in bucket.params] for bucket in watched.layouts[-1].buckets]
    assert [sorted(row) for row in names] == [[f"{i}.bias", f"{i}.weight"] for i in reversed(range(LAYERS))]


def test_layouts_say_how_large_parameters_are(mixed: tuple[list[Step], Watched]) -> None:
    _, watched = mixed
    for layout in watched.layouts:
        for bucket in layout.buckets:
            assert sum(layout.param_bytes[i] for i in bucket.params) in (bucket.nbytes, 0)
        assert set(layout.param_kind) == {"float32 cpu"}
        rows = dict(zip(layout.params, layout.param_rows, strict=True))
        assert rows["0.bias"] == 0
        assert rows["0.weight"] == watched.ddp.module[0].weight.shape[0]


def test_the_buckets_of_a_module_that_is_never_rebuilt_are_known() -> None:
    watched = Watched(find_unused_parameters=True, bucket_cap_mb=0.0005)
    (step, *_) = watched.train(2)
    assert sorted(i for bucket in bucket_layout(watched.ddp) for i in bucket.params) == list(range(2 * LAYERS))
    assert [bucket.nbytes for bucket in bucket_layout(watched.ddp)] == step.comm_bytes  # not which were used: integers
    assert all(at is not None for at in step.comm_ready)


class Looked(nn.Module):
    """An embedding with sparse gradients, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(64, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.embedding(positions))
        return out


def test_sparse_gradients_change_no_layout() -> None:
    """They have as many bytes as a batch has positions."""
    watched = Watched(module=Looked())
    for positions in range(1, 15):
        watched.ddp(torch.arange(positions)).sum().backward()
    watched.recorder.finish()
    watched.completions.stop()
    assert watched.errors == []
    assert len({tuple(record.message(0, 0).comm_bytes) for record in watched.records}) > 10
    assert len(watched.layouts) < 5
    found = [{watched.layouts[-1].params[i] for i in bucket.params} for bucket in watched.layouts[-1].buckets]
    assert sorted(map(sorted, found)) == [["embedding.weight"], ["layer.bias", "layer.weight"]]


def test_a_job_without_an_optimizer_ends_every_step_with_its_backward() -> None:
    """Also a light step, and one whose comm hook cannot be seen: nothing may pile up."""
    for watched in (
        Watched(light_steps()),
        Watched(light_steps(), prepare=lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook)),
    ):
        for _ in range(10):
            watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.recorder.finish()
        assert [record.status for record in watched.records] == ["warmup", *["ok"] * 4, *["shadow", "ok"] * 2, "shadow"]
        watched.probe.close()  # hooks on the process group, where it has such, would see other tests' collectives


def test_a_job_whose_optimizer_stops_for_good_goes_on_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # no naps
    watched = Watched()
    watched.train(1)
    for _ in range(2 * MAX_REDUCTIONS):
        watched.ddp(torch.ones(2, 8)).mean().backward()
    assert watched.recorder.current is not None
    assert len(watched.recorder.current.buckets) <= MAX_REDUCTIONS * LAYERS
    assert len(watched.records) >= MAX_REDUCTIONS


def test_a_module_can_be_watched_again() -> None:
    watched = Watched()
    watched.train(3)
    watched.probe.close()
    again = DdpProbe(watched.ddp, watched.context(param_base=0))
    assert [len(step.comm_done) for step in watched.train(3)[-3:]] == [LAYERS] * 3
    again.close()


def test_two_modules_whose_forwards_lie_in_another_step_than_their_backwards() -> None:
    """As in a GAN: the generator's forward comes before the discriminator's step. Each backward is seen or derived."""
    generator = Watched(light_steps())
    recorder = generator.recorder
    discriminator = DistributedDataParallel(Layer(8, 8), bucket_cap_mb=0.0002)
    probe = DdpProbe(discriminator, generator.context(1, 200))
    for _ in range(10):
        made = generator.ddp(torch.ones(2, 8))
        discriminator(made.detach()).sum().backward()
        recorder.optimizer_begin()
        recorder.optimizer_end()
        discriminator(made).sum().backward()
        recorder.optimizer_begin()
        recorder.optimizer_end()
    recorder.finish()
    generator.completions.stop()
    steps = [record.message(0, 0) for record in generator.records]
    probe.close()
    assert generator.errors == []
    backwards = [sum(span.phase == "backward" for span in step.spans) for step in steps]
    assert sum(step.comm_module.count(0) for step in steps) >= 9 * LAYERS
    assert sum(backwards) == 20
    assert all((None in step.comm_done) == (step.status == "shadow") for step in steps if step.comm_label)


def test_a_gradient_of_the_input_alone_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As adversarial training and gradient penalties take it; also in a light step, whose launches nobody sees."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # no naps
    watched = Watched(light_steps())
    for _ in range(10):
        inputs = torch.ones(2, 8, requires_grad=True)
        torch.autograd.grad(watched.ddp(inputs).sum(), inputs)
        watched.ddp(inputs.detach()).sum().backward()
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    watched.recorder.finish()
    watched.completions.stop()
    assert watched.errors == []
    steps = [record.message(0, 0) for record in watched.records]
    assert [record.reductions for record in watched.records] == [1] * 10
    assert [step.comm_label for step in steps[2:]] == [list(range(LAYERS))] * 8
    assert all(step.comm_seq == list(range(LAYERS)) for step in steps[2:])


class Around(nn.Module):
    """A DDP module and a layer, as TorchRec makes them: the DDP module around both leaves the inner one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = DistributedDataParallel(nn.Linear(8, 8)), nn.Linear(8, 8)
        self._ddp_params_and_buffers_to_ignore = [f"inner.module.{name}" for name in ("weight", "bias")]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.inner(inputs))
        return out


def test_a_module_inside_another_takes_part_in_its_steps() -> None:
    around = Around()
    watched = Watched(light_steps(), module=around)
    inner = DdpProbe(around.inner, watched.context(1, 200))
    steps = watched.train(8)
    inner.close()
    assert [step.status for step in steps] == ["warmup", *["ok"] * 4, "shadow", "ok", "shadow"]
    for step in steps:
        assert sorted(step.comm_module) == [0, 1]
        (forward,) = (span for span in step.spans if span.phase == "forward")
        launches = [launch for launch, ready in zip(step.comm_launch, step.comm_ready, strict=True) if ready]
        assert all(launch >= forward.end for launch in launches)


class Hooked(Layer):
    """Has a hook on its own output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return out


def test_hooks_on_an_output_live_beside_the_probes() -> None:
    """The module's own, registered before, and the user's, of which one is removed again."""
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


def test_nothing_is_seen_after_the_end() -> None:
    watched = Watched()
    watched.train(2)
    count = len(watched.records)
    watched.probe.close()
    watched.train(2)
    assert len(watched.records) == count


def test_a_bare_step_is_left_alone() -> None:
    watched = Watched(FixedSchedule(bare=lambda step: step in (3, 5)))
    hooked, timed = [], []
    for _ in range(7):
        output = watched.ddp(torch.ones(2, 8))
        hooked.append(bool(output._backward_hooks))
        output.sum().backward()
        assert watched.probe.reducer_group is not None
        timed.append(watched.probe.reducer_group.timed)
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    watched.recorder.finish()
    watched.completions.stop()
    assert watched.errors == []
    assert hooked == timed == [step not in (3, 5) for step in range(7)]
    steps = [record.message(0, 0) for record in watched.records]
    assert [step.status for step in steps] == ["warmup", "ok", "ok", "unwatched", "ok", "unwatched", "ok"]
    assert all(step.comm_label for step in steps if step.status != "unwatched")


class OneIn64(FixedSchedule):
    """From the third step on, one in 64 is watched."""

    def __init__(self) -> None:
        super().__init__(bare=lambda step: step > 2)
        self.watched.limit(64)
        self.watched.value = 64


def calls_of(function: Callable[[], object]) -> list[str]:
    """The Python functions of ddpwatch's that run meanwhile, on this thread."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/ddpwatch/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return names


@pytest.fixture
def by_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the interpreter shows no calls."""
    for name, value in {"_tool": None, "_seen": {}, "_codes": {}, "_TOOL_IDS": ()}.items():
        monkeypatch.setattr(calls, name, value)


@pytest.mark.usefixtures("by_hooks")
def test_next_to_nothing_runs_in_a_stretch_of_bare_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs there costs several times what it does, in cold caches, and in a fast job most steps are such."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # no naps
    watched = Watched(OneIn64())
    recorder = watched.recorder
    monkeypatch.setattr(recorder_module, "STRETCH_NS", 1 << 62)

    def step() -> None:
        watched.ddp(torch.ones(2, 8)).sum().backward()
        recorder.optimizer_begin()
        recorder.optimizer_end()

    seen = {number: calls_of(step) for number in range(60)}
    recorder.finish()
    assert watched.errors == []
    quiet = [number for number, names in seen.items() if not {"forward_begin", "_expect_next"} & {*names}]
    assert len(quiet) >= 40
    assert all(len(seen[number]) <= 8 for number in quiet)
    steps = [message for record in watched.records for message in record.messages(0, 0)]
    assert [(step.step, step.status) for step in steps[3:]] == [(number, "unwatched") for number in range(3, 60)]
    assert all(step.own_ns > 0 for step in steps)


def test_a_validation_in_a_stretch_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # no naps
    monkeypatch.setattr(recorder_module, "STRETCH_NS", 1 << 62)
    validations: list[tuple[int, int]] = []
    watched = Watched(OneIn64(), on_validation=lambda start, end: validations.append((start, end)))
    for number in range(60):
        watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
        if number % 10 == 9:
            watched.ddp.eval()
            with torch.no_grad():
                watched.ddp(torch.ones(2, 8))
            watched.ddp.train()
    watched.recorder.finish()
    assert watched.errors == []
    assert watched.recorder.steps == 60
    steps = [message for record in watched.records for message in record.messages(0, 0)]
    for start, end in validations:
        assert not any(step.start_ns < end and start < step.start_ns + step.duration_ns for step in steps)
    assert len(validations) == 5


@pytest.mark.parametrize("way", ["by hooks", "by calls"])
def test_a_forward_that_waits_for_buffers_says_so(
    way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """And leaves no hook on the module inside, where torch.compile or a copy would meet it."""
    if way == "by hooks":
        request.getfixturevalue("by_hooks")
    elif sys.version_info < (3, 12):
        pytest.skip("calls are seen on Python 3.12 and newer")
    broadcast, seen, hooked = dist._broadcast_coalesced, [], []  # type: ignore[attr-defined]

    def noted(*arguments: object) -> None:
        start = time.monotonic_ns()
        hooked.append(len(watched.ddp.module._forward_pre_hooks))
        broadcast(*arguments)
        seen.append((start, time.monotonic_ns()))

    watched = Watched(FixedSchedule(lambda step: step == 3, lambda step: step == 4), last=nn.BatchNorm1d(8))
    monkeypatch.setattr(dist, "_broadcast_coalesced", noted)
    steps = watched.train(6)
    assert [step.status for step in steps] == ["warmup", "ok", "ok", "shadow", "unwatched", "ok"]
    assert hooked == [way == "by hooks" and step.status != "unwatched" for step in steps]
    assert way == "by hooks" or not watched.ddp._forward_pre_hooks
    assert not watched.ddp.module._forward_pre_hooks
    for step, (start, end) in zip(steps, seen, strict=True):
        if step.status == "unwatched":
            continue
        [(since, until)] = buffer_waits(step)
        assert step.start_ns + since <= start <= end <= step.start_ns + until
        assert [span.phase for span in step.spans[:3]] == ["forward", "sync", "forward"]


@pytest.mark.usefixtures("by_hooks")
def test_a_module_that_is_compiled_or_scripted_gets_no_hook() -> None:
    assert not is_compiling_frames()
    assert torch.compile(is_compiling_frames, backend="eager")()
    watched = Watched(last=nn.BatchNorm1d(8))
    inner = watched.ddp.module
    inner._compiled_call_impl = inner._call_impl  # as `inner.compile()` sets it
    assert not any(buffer_waits(step) for step in watched.train(3))
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):  # the latter from some torch on
        script = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    scripted = Watched(module=script)
    assert not any(buffer_waits(step) for step in scripted.train(3))


class OwnOptimizer(torch.optim.Optimizer):
    """Follows the gradient. Unlike torch's, it breaks no graph itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"])


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # Python 3.13.0
@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_an_optimizers_hooks_break_no_graph(register: Any) -> None:
    called: list[torch.optim.Optimizer] = []
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = OwnOptimizer([param])
    handle = register(optimizer_hook(called.append))
    try:
        torch.compile(optimizer.step, fullgraph=True, backend="eager")()
        assert called == []
        optimizer.step()
        assert called == [optimizer]
    finally:
        handle.remove()
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
    assert param.tolist() == pytest.approx([0.8, 0.8])


@pytest.mark.usefixtures("by_hooks")
def test_a_hook_inside_does_not_outlive_a_forward_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no network")

    watched = Watched(last=nn.BatchNorm1d(8))
    with monkeypatch.context() as patched:
        patched.setattr(dist, "_broadcast_coalesced", fail)
        with pytest.raises(RuntimeError, match="no network"):
            watched.ddp(torch.ones(2, 8))
    assert watched.ddp.module._forward_pre_hooks
    with torch.no_grad():
        watched.ddp(torch.ones(2, 8))
    assert not watched.ddp.module._forward_pre_hooks
    assert watched.errors == []


def test_on_wait_is_called_when_a_backward_is_about_to_wait() -> None:
    """Once for each that reduces, with DDP's statistics read by then; not in a bare step."""
    waits: list[tuple[int, str, bool]] = []

    def on_wait() -> None:
        waits.append((watched.recorder.steps, watched.recorder.phase, bool(watched.probe._stats)))

    sampling = FixedSchedule(light=lambda step: step == 2, bare=lambda step: step == 3)
    watched = Watched(sampling, on_wait=on_wait)
    for _ in range(5):
        with watched.ddp.no_sync():
            watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    watched.completions.stop()
    assert watched.errors == []
    assert waits == [(step, "sync", True) for step in (0, 1, 2, 4)]


class Tempered(nn.Module):
    """Returns a parameter beside its output, as CLIP does with its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.scale


def test_a_parameter_among_the_outputs_gathers_no_hooks() -> None:
    ddp, errors = DistributedDataParallel(Tempered()), []
    probe = DdpProbe(ddp, ProbeContext(StepRecorder(lambda record: None), noting(errors), lambda layout: None))
    for _ in range(3):
        output, scale = ddp(torch.ones(2, 8))
        (output.sum() * scale).backward()
    assert not ddp.module.scale._backward_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of hooks that are not saved
        torch.save(ddp(torch.ones(2, 8)), io.BytesIO())
    probe.close()
    assert errors == []


def test_a_forward_without_gradients_in_training_mode_is_part_of_its_step() -> None:
    """It makes pseudo-labels, or a generator's images."""
    seen: list[tuple[int, int]] = []
    watched = Watched(on_validation=lambda start, end: seen.append((start, end)))
    for _ in range(4):
        with torch.no_grad():
            watched.ddp(torch.ones(2, 8))
        watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    watched.recorder.finish()
    assert seen == []
    assert len(watched.records) == 4
    for before, after in pairwise(watched.records):
        assert after.start == before.end


def test_a_validation_belongs_to_no_step() -> None:
    """The step after it starts where it ended."""
    seen: list[tuple[int, int]] = []
    watched = Watched(on_validation=lambda start, end: seen.append((start, end)))
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
    ((start, end),) = seen
    assert first.end == second.start
    assert second.end <= start
    assert end - start >= NAP_S * 1e9
    assert third.start == end
    assert second.cpu_ns is None  # it holds the validation's
    assert third.cpu_ns is not None


def test_a_bucket_record_costs_no_dictionary() -> None:
    assert not hasattr(BucketRecord(0, 0, 1, 2), "__dict__")


def test_a_group_that_does_not_count_gives_steps_no_sequence_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a comm hook issues its collectives in another one."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # no naps
    watched = Watched()
    monkeypatch.setattr(watched.probe, "issue_count", lambda: 5)
    for _ in range(4):
        watched.ddp(torch.ones(2, 8)).sum().backward()
        watched.recorder.optimizer_begin()
        watched.recorder.optimizer_end()
    watched.recorder.finish()
    watched.completions.stop()
    assert watched.errors == []
    assert [record.first_seq for record in watched.records] == [6, None, None, None]
    assert all(record.message(0, 0).comm_label == list(range(LAYERS)) for record in watched.records[2:])
