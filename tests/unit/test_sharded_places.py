"""What the probe uses of FSDP2 that is not public: given back at the end, and missed with one warning."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wrapt
from torch import nn

from ddpwatch.probe import session
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.watch import watch
from tests.support.guards import noting
from tests.support.probe import gloo_group

pytestmark = [pytest.mark.same_everywhere, pytest.mark.xdist_group("sharded waits")]
__all__ = ["gloo_group"]


def sharded(kind: type[nn.Sequential] = nn.Sequential) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    return fully_shard(kind(fully_shard(nn.Linear(4, 4), mesh=mesh), nn.Linear(4, 4)), mesh=mesh)


def replicated(groups: int = 2) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    inner = [replicate(nn.Linear(4, 4), mesh=mesh) for _ in range(1, groups)]
    return replicate(nn.Sequential(*inner, nn.Linear(4, 4)), mesh=mesh)


def probe_on(model: Any) -> Any:
    from ddpwatch.probe.fsdp import FsdpProbe

    return FsdpProbe(model, ProbeContext(StepRecorder(lambda record: None), noting([]), lambda message: None))


@pytest.fixture
def collectives() -> Iterator[Any]:
    """The module of FSDP2's that all-reduces through its attribute ``dist``."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    gc.collect()
    assert _fsdp_collectives.dist is dist
    yield _fsdp_collectives
    _fsdp_collectives.dist = dist  # type: ignore[attr-defined]


def test_the_last_probe_that_closes_gives_torch_distributed_back(collectives: Any) -> None:
    models = [sharded(), sharded()]
    first, last = map(probe_on, models)
    assert collectives.dist is not dist
    for _ in range(2):  # closing twice counts once
        first.close()
        assert collectives.dist is not dist
    last.close()
    assert collectives.dist is dist


def test_so_does_a_model_that_is_freed(collectives: Any) -> None:
    model = sharded()
    probe_on(model)
    assert collectives.dist is not dist
    del model
    gc.collect()
    assert collectives.dist is dist


def test_what_another_has_put_there_stays(collectives: Any) -> None:
    model, other = sharded(), object()
    probe = probe_on(model)
    collectives.dist = other
    probe.close()
    assert collectives.dist is other


def test_one_all_reduce_counts_once_also_if_another_stands_between(
    collectives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    from ddpwatch.probe.fsdp import FsdpProbe

    model = replicate(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    launched: list[str] = []
    monkeypatch.setattr(FsdpProbe, "launch", lambda probe, op, *rest: launched.append(op))
    probes = [probe_on(model)]
    collectives.dist = wrapt.ObjectProxy(collectives.dist)
    probes += [probe_on(sharded())]
    model(torch.ones(2, 4)).sum().backward()
    assert launched == ["all_reduce"]
    for probe in probes:
        probe.close()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_reduction_without_an_all_reduce_leaves_nothing_to_the_next(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 scatters nothing within one rank: only the all-reduce ends what `allocate` has started."""
    from ddpwatch.probe.fsdp import FsdpProbe

    model = replicated(groups)
    launched: list[tuple[str, int, int]] = []

    def launch(probe: Any, op: str, label: int, tensor: Any, group: Any, ready: int | None = None) -> None:
        assert ready is not None
        launched.append((op, label, ready))

    monkeypatch.setattr(FsdpProbe, "launch", launch)
    probe = probe_on(model)
    model.set_requires_all_reduce(False)
    model(torch.ones(2, 4)).sum().backward()
    assert launched == []
    model.set_requires_all_reduce(True)
    start = time.monotonic_ns()
    model(torch.ones(2, 4)).sum().backward()
    assert sorted((op, label) for op, label, _ in launched) == [("all_reduce", label) for label in range(groups)]
    assert all(ready > start for _, _, ready in launched)
    probe.close()


def test_the_all_reduce_of_another_model_is_left_alone() -> None:
    """Plain FSDP2 has none: what follows its reduce-scatter may be that of a model which is not watched."""
    models = sharded(), replicated()
    group = models[1]._get_fsdp_state()._fsdp_param_group.mesh_info.replicate_process_group
    for model, counts in zip(models, (False, True), strict=True):
        probe = probe_on(model)
        model(torch.ones(2, 4))
        assert (probe.launch("all_reduce", 0, torch.ones(4), group) is not None) == counts
        probe.close()


class Scorer(nn.Sequential):
    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        """A forward that does not pass by the module's hooks."""
        return nn.Sequential.forward(self, inputs).sum()

    def score_twice(self, inputs: torch.Tensor) -> torch.Tensor:
        """Forwards within a forward."""
        return self(inputs).sum() + self.score(inputs)

    def fail(self, inputs: torch.Tensor) -> torch.Tensor:
        raise ValueError("no score")


def trained(model: Any, method: str, recorder: StepRecorder) -> None:
    """One step, with the optimizer's stamps."""
    getattr(model, method)(torch.ones(2, 4)).sum().backward()
    recorder.optimizer_begin()
    recorder.optimizer_end()


@pytest.mark.parametrize("method", ["score", "score_twice", "forward_of_module"])
@pytest.mark.parametrize("found", ["before", "in its first forward"])
def test_a_method_that_is_registered_as_a_forward_is_one(method: str, found: str) -> None:
    """Also if it calls the module or another such method, and after one that has failed."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    from ddpwatch.probe.fsdp import FsdpProbe

    model: Any = sharded(Scorer)
    for name in ("score", "score_twice", "fail"):
        register_fsdp_forward_method(model, name)
    model.forward_of_module = model.__call__
    records: list[StepRecord] = []
    recorder = StepRecorder(records.append)
    probes: list[FsdpProbe] = []
    errors: list[Exception] = []
    state = model._get_fsdp_state()
    lazy_init = state._lazy_init

    def watched() -> None:
        lazy_init()
        if not probes:
            probes.append(FsdpProbe(model, ProbeContext(recorder, noting(errors), lambda message: None)))

    if found == "before":
        watched()
    else:
        state._lazy_init = watched
    for _ in range(2):
        trained(model, method, recorder)
    with pytest.raises(ValueError, match="no score"):
        model.fail(torch.ones(2, 4))
    for _ in range(2):
        trained(model, method, recorder)
    with torch.no_grad():
        getattr(model, method)(torch.ones(2, 4))
    trained(model, method, recorder)
    assert [record.status for record in records] == ["warmup", "ok", "aborted", "ok", "ok"][: len(records)]
    assert len(records) >= 4
    for record in records:
        if record.status != "aborted":
            phases = list(dict.fromkeys(phase for phase, _, _ in record.spans))
            assert phases == ["forward", "backward", "sync", "optimizer"]
    probes[0].close()
    assert not {"_pre_forward", "_post_forward"} & set(vars(state))
    assert errors == []


@pytest.mark.parametrize(
    "state", [{"_fsdp_param_groups": [1, 2]}, {"_fsdp_param_group": 1}, {"_fsdp_param_group": None}]
)
def test_older_torch_has_one_parameter_group_per_module(state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpwatch.probe import fsdp

    monkeypatch.setattr(fsdp, "_get_module_fsdp_state", lambda module: SimpleNamespace(**state))
    (kept,) = state.values()
    expected = kept if isinstance(kept, list) else [1] * (kept is not None)
    assert list(fsdp.parameter_groups(nn.Linear(1, 1))) == expected


@pytest.mark.parametrize(
    ("place", "feature"),
    [
        ("_fsdp_state._get_module_fsdp_state", ""), ("FSDPParamGroup.mesh_info", ""), ("FSDPState._pre_forward", ""),
        ("FSDPState._post_forward", ""), ("FSDPParamGroup._all_gather_comm", "collectives"),
        ("FSDPParamGroup._reduce_scatter_comm", "collectives"), ("_fsdp_collectives.dist", "collectives"),
        ("FSDPParamGroup.fsdp_params", "bucket layouts"),
    ],
)  # fmt: skip
def test_without_one_of_its_places_a_feature_is_off_or_the_probe_steps_aside(
    place: str,
    feature: str,
    collectives: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """With one warning, and in the end nothing left on the model, which trains on."""
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    monkeypatch.setenv("DDPWATCH_RECORD_DIR", str(tmp_path))  # no collector
    model = sharded()
    owner, name = place.split(".")
    group = model[0]._get_fsdp_state()._fsdp_param_group
    hooks = [*model._forward_pre_hooks, *model._forward_hooks]
    state = type(model._get_fsdp_state())
    owners = {"_fsdp_collectives": collectives, "_fsdp_state": _fsdp_state, "FSDPParamGroup": group, "FSDPState": state}
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.delitem(sys.modules, "ddpwatch.probe.fsdp", raising=False)  # imported once more, as in a new process
        patch.delattr(owners[owner], name)
        assert (watch(model)._probe is None) == (not feature)
        ours = session.current
    model(torch.ones(2, 4)).sum().backward()
    assert (ours is not None) == bool(feature)
    if ours is not None:
        assert ours.guard.off == {feature}
        ours.close()
        ours.sender._context.term()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"ddpwatch {f'goes on without {feature}, the rest is' if feature else 'does not'} watch" in caplog.text
    assert name in caplog.text
    assert [*model._forward_pre_hooks, *model._forward_hooks] == hooks
    assert collectives.dist is dist
    assert type(group._all_gather_comm).__module__.startswith("torch.")
    model(torch.ones(2, 4)).sum().backward()
