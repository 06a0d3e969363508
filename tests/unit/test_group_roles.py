"""What a group is for, by what whoever makes it calls it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ddpwatch.job import auto
from ddpwatch.probe import group_roles, role_makers
from ddpwatch.probe.calls import can_see_events
from ddpwatch.probe.event_log import EventLog
from ddpwatch.probe.group_ids import describe
from ddpwatch.probe.group_roles import (
    has_maker,
    known_role,
    note_dimension,
    note_maker,
    note_pipeline,
    role_by_name,
    role_of,
    role_of_name,
)
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.own_collectives import LOOKS, OwnCollectiveProbe
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.role_makers import ROLE_MAKERS
from tests.support.guards import noting

pytestmark = pytest.mark.same_everywhere


class Made:
    """As torch's groups."""


def _new_group_with_tag() -> Made:
    """As torch's function of this name, when it returns."""
    note_maker(made := Made())
    return made


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("_TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("tp_group", "tp"),
        ("pp_proc_group", "pp"),
        ("_PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("_DATA_PARALLEL_GROUP", "dp"),
        ("_EXPERT_DATA_PARALLEL_GROUP", "expert data"),
        ("_MODEL_PARALLEL_GROUP", "model"),
        ("embedding_group", "embedding"),
        ("_WORLD_GROUP", "world"),
        ("process_group", ""),
        ("groups", ""),
    ],
)
def test_a_name_says_what_a_group_is_for(name: str, role: str) -> None:
    assert role_of_name(name) == role
    assert known_role(name) == (role if len(role) == 2 else name)


class Stages:
    """Keeps its group under two names, another one in a dict, and a third one nowhere."""

    def __init__(self) -> None:
        self.group = self.pipe_group = _new_group_with_tag()
        self.expert_groups = {"all": _new_group_with_tag()}
        made = _new_group_with_tag()
        self.unknown = id(made)
        assert (has_maker(made), role_by_name(made)) == (True, "")


def test_a_group_is_what_its_maker_calls_it() -> None:
    stages = Stages()
    assert (role_by_name(stages.group), role_by_name(stages.expert_groups["all"])) == ("pp", "ep")
    assert not has_maker(Made())


def test_a_module_keeps_its_groups_as_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("parallel_state")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(_new_group_with_tag=_new_group_with_tag)
    exec("def make():\n    global _TENSOR_GROUP\n    _TENSOR_GROUP = _new_group_with_tag()\nmake()", vars(module))
    assert role_by_name(module._TENSOR_GROUP) == "tp"


class Strict:
    """Keeps its group; its class has a say in who asks for what."""

    def __init__(self) -> None:
        self.tp_group = _new_group_with_tag()

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("it is asked")


class Slots:
    """Has no dict of attributes."""

    __slots__ = ("__weakref__", "tp_group")

    def __init__(self) -> None:
        self.tp_group = _new_group_with_tag()

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("it is asked")


def test_whoever_keeps_a_group_is_not_asked() -> None:
    strict, slots = Strict(), Slots()
    assert role_by_name(object.__getattribute__(strict, "tp_group")) == "tp"
    assert role_by_name(slots.tp_group) == ""


def test_a_maker_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def _new_group_with_tag() -> Made:
        made = Made()
        for _ in range(2):  # `ddpwatch run` and the seen collectives
            note_maker(made)
        return made

    looked: list[object] = []
    monkeypatch.setattr(group_roles, "passes_on", lambda frame: bool(looked.append(frame)))
    assert has_maker(_new_group_with_tag())
    assert len(looked) == 1


def test_without_torch_s_makers_of_groups_no_more_than_their_names_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (auto, role_makers):
            patch.setattr(module, "SeenCalls", lambda places, **options: seen.append({"places": places, **options}))
        patch.setattr(role_makers, "_seen", set())
        auto.install_groups(ModuleType("distributed_c10d"))
        for name in ROLE_MAKERS:
            auto.install_roles(ModuleType(name))
    for one in seen:
        if not one["places"]:
            assert one["code"] is None
            one["on_error"](RuntimeError("another torch"))
    assert len(seen) == 4
    assert "does not watch" not in caplog.text


class Lists:
    """Keeps its group only after it has made all groups, as those of the other ranks."""

    def __init__(self, seeing: OwnCollectiveProbe, count: int) -> None:
        def _new_group_with_tag() -> Any:
            seeing._made(made := dist.new_group([0]))
            return made

        groups = []
        for _ in range(count):
            groups.append(_new_group_with_tag())
        self.tp_group = groups[0]


def test_a_group_has_a_name_where_its_maker_makes_many_before_it_keeps_one() -> None:
    said: list[Any] = []
    context = ProbeContext(StepRecorder(lambda record: None), noting([]), said.append)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        seeing = OwnCollectiveProbe(context, EventLog(), lambda own_ns: None)
        lists = Lists(seeing, LOOKS + 2)
        assert "tp" not in [group.kind for group in said]
        seeing.meet_groups()
        assert said[-1].kind == "tp"
        assert said[-1].id == describe(lists.tp_group, torch.device("cpu")).id
    finally:
        dist.destroy_process_group()


def test_nothing_is_kept_alive() -> None:
    stages = Stages()
    group = stages.group
    del stages
    assert role_by_name(group) == ""


@pytest.mark.parametrize(("name", "role"), [("pipeline", "pp"), ("dp_shard", "all ranks")])
def test_a_mesh_s_dimension_of_all_ranks_is_their_group_s_role(name: str, role: str) -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        note_dimension("tp", "another")
        note_dimension(name, world.group_name)
        assert role_of(world) == role
    finally:
        dist.destroy_process_group()


def test_the_group_in_which_a_pipeline_s_stages_talk_is_the_pipeline_s() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        of_all, other, mesh = dist.group.WORLD, dist.new_group([0]), dist.new_group([0], group_desc="mesh_dp")
        for group in (None, other, mesh):
            note_pipeline(group)
        assert [role_of(group) for group in (of_all, other, mesh)] == ["pp", "pp", "dp"]
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not can_see_events(), reason="only the interpreter's events show that a stage is made")
def test_a_pipeline_whose_stages_are_made_later_gives_its_group_its_role_then() -> None:
    said: list[Any] = []
    context = ProbeContext(StepRecorder(lambda record: None), noting([]), said.append)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        seeing = OwnCollectiveProbe(context, EventLog(), lambda own_ns: None)
        other = dist.new_group([0])
        seeing.meet_groups()
        assert [group.kind for group in said] == ["all ranks", "own"]
        for group in (None, other):
            PipelineStage(torch.nn.Linear(1, 1), 0, 1, torch.device("cpu"), group=group)
            for _ in range(2):
                seeing.meet_groups()
        assert [(group.id, group.kind) for group in said[2:]] == [
            (describe(group, torch.device("cpu")).id, "pp") for group in (dist.group.WORLD, other)
        ]
    finally:
        dist.destroy_process_group()
