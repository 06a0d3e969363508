"""What a group is for, by what whoever makes it calls it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch.distributed as dist

from ddpwatch.probe.group_names import has_maker, known_role, note_dimension, note_maker, role_by_name, role_of_name
from ddpwatch.probe.known_group import role_of

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
