"""Finds a process group's role: mostly what the job calls it, by the attribute or global in which its maker keeps it.

Meshes name their groups. Of others, torch only knows a number, though the job keeps each as its ``tp_group`` or
``_DATA_PARALLEL_GROUP``: in the object whose method has made it, in the module whose function has, or in a list or dict
there. Nobody is asked, and nothing is kept alive: to look takes a pass through the names of these two, once a group.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from ddpwatch.probe.calls import GROUP_MAKER, argument
from ddpwatch.probe.places import passes_on
from ddpwatch.wire.messages import SAME_SAMPLES

OWN: Final = "own"  # the role of a group that nothing says any other of
MOST_HELD: Final = 1024  # groups in a list or dict that is looked into
MOST_CHARACTERS: Final = 24
# What words in a name say a group is for; all others say it themselves, but for those that every group's name may have
_ROLES: Final = {
    "tensor": "tp", "tp": "tp", "slice": "tp", "pipeline": "pp", "pipe": "pp", "pp": "pp", "data": "dp", "dp": "dp",
    "expert": "ep", "ep": "ep", "context": "cp", "cp": "cp", "sequence": "sp", "sp": "sp",
}  # fmt: skip
_FILLERS: Final = {
    "group", "groups", "pg", "pgs", "process", "processgroup", "proc", "parallel", "comm", "communicator", "ds", "mpu",
    "my", "cur", "current", "the", "gloo", "nccl",
}  # fmt: skip


class _Maker(NamedTuple):
    """Who has made a group: an object, if that was a method of it, and a module's name."""

    owner: weakref.ref[Any] | None
    module: str


_makers: weakref.WeakKeyDictionary[Any, _Maker] = weakref.WeakKeyDictionary()
_noted: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # roles: of all ranks' group, or a pipeline's
_notes = 0


def role_of(group: Any) -> str:
    """Returns what a group is for: the dimension of a mesh, what the job has described it as, or what it calls it."""
    if group is dist.group.WORLD:
        return noted_role(group) or "all ranks"
    described = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
    if described not in ("", "undefined"):
        return known_role(described)
    return noted_role(group) or role_by_name(group) or OWN


def note_maker(group: Any) -> None:
    """Notes who makes a group, while `GROUP_MAKER` returns it on this thread."""
    if has_maker(group):  # it has been noted by another
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != GROUP_MAKER:
        frame = frame.f_back
    while frame is not None and (frame.f_code.co_name == GROUP_MAKER or passes_on(frame)):
        frame = frame.f_back
    if frame is not None:
        try:
            _makers[group] = _Maker(_owner(frame), str(frame.f_globals.get("__name__", "")))
        except TypeError:  # the placeholder of processes outside the group
            return


def _owner(frame: FrameType) -> weakref.ref[Any] | None:
    if frame.f_code.co_argcount and frame.f_code.co_varnames[0] == "self":
        try:
            return weakref.ref(argument(frame, "self"))
        except (KeyError, NameError, TypeError):  # it was deleted, or has no weak references
            return None
    return None


def note_dimension(name: str, group_name: object) -> None:
    """Notes that a mesh has made a dimension, and of which group: one that spans all ranks has theirs."""
    world = dist.group.WORLD
    if world is not None and group_name == world.group_name and (role := role_of_name(name)) in SAME_SAMPLES:
        _note(world, role)


def note_pipeline(group: Any) -> None:
    """Notes that the stages of a pipeline talk in a group: that of all ranks if it is None."""
    group = group or dist.group.WORLD
    if group is not None:
        _note(group, "pp")


def _note(group: Any, role: str) -> None:
    global _notes
    if _noted.get(group) != role:
        _noted[group] = role
        _notes += 1


def notes() -> int:
    """Returns how often a group has been noted to have another role than before."""
    return _notes


def noted_role(group: Any) -> str:
    """Returns what a mesh that splits the model or its input, or a pipeline, has a group for; empty without one."""
    return _noted.get(group, "")


def has_maker(group: Any) -> bool:
    """Returns whether it is known who has made a group."""
    return group in _makers


def role_by_name(group: Any) -> str:
    """Returns what a group is for, by what its maker calls it; empty if that says nothing, or not yet."""
    maker = _makers.get(group)
    if maker is None:
        return ""
    owner = None if maker.owner is None else maker.owner()
    spaces = _space(owner), _space(sys.modules.get(maker.module))
    roles = [role for space in spaces for role in map(role_of_name, _names(space, group)) if role]
    return next((role for role in roles if role in _ROLES.values()), next(iter(roles), ""))


def _space(keeper: object) -> Mapping[str, Any]:
    """Returns the attributes of an object, or a module's globals, without asking it: its class may be the job's."""
    try:
        space = object.__getattribute__(keeper, "__dict__")
    except AttributeError:  # it has slots, or there is none
        return {}
    return space if type(space) is dict else {}


def _names(space: Mapping[str, Any], group: Any) -> Iterator[str]:
    """Yields the names in which a group is kept, by itself or with others."""
    for name, value in list(space.items()):
        if value is group:
            yield name
        elif type(value) in (list, tuple, dict) and len(value) <= MOST_HELD:
            held = list(value.values() if type(value) is dict else value)
            if any(one is group for one in held):
                yield name


def known_role(name: str) -> str:
    """Returns the role that a name says, such as "tp" of a mesh's "tensor_parallel"; the name itself of any other."""
    role = role_of_name(name)
    return role if role in _ROLES.values() else name


def role_of_name(name: str) -> str:
    """Returns what a group of this name is for: "tp" of ``_TENSOR_MODEL_PARALLEL_GROUP``; empty if it does not say."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _FILLERS]
    words = [word for word in words if word != "model"] or words
    return (_ROLES.get(words[0], words[0]) if len(words) == 1 else " ".join(words))[:MOST_CHARACTERS]
