"""Names process groups so that all ranks use the same name."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from ddpwatch.wire.messages import DEFAULT_GROUP, Group


def describe(group: dist.ProcessGroup, device: torch.device) -> Group:
    """Returns the group's message, in which the sender fills in the rank. The backend is that of the device.

    Name and members are empty if torch does not know the group.
    """
    try:
        name, ranks = str(group.group_name), sorted(dist.get_process_group_ranks(group))
    except (AttributeError, KeyError, ValueError, RuntimeError):
        name, ranks = "", []
    is_default = group is dist.group.WORLD
    digest = hashlib.blake2b(f"{name} {ranks}".encode(), digest_size=4).digest()
    return Group(
        rank=0,
        id=DEFAULT_GROUP if is_default else 1 + int.from_bytes(digest, "big"),
        name=name,
        ranks=ranks,
        backend=backend_name(group, device) if ranks else "",
    )


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the backend that moves a device's tensors, where torch may say ``undefined`` or ``cpu:gloo,cuda:nccl``.

    Empty if torch does not know the group.
    """
    try:
        return str(group._get_backend(device).name())
    except (AttributeError, RuntimeError):  # a group of another kind, or with no backend for the device
        pass
    try:
        return str(dist.get_backend(group))
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return ""


def world_backend() -> str:
    """Returns the backend between all ranks, for what a loop computes with; empty without a process group."""
    world = dist.group.WORLD if dist.is_available() else None
    kind = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    return "" if world is None else backend_name(world, torch.device(kind))
