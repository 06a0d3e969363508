"""Names process groups so that all ranks use the same name."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from ddpwatch.messages import DEFAULT_GROUP, Group


def describe(group: dist.ProcessGroup) -> Group:
    """The group's message, in which the sender fills in the rank.

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
        backend=backend_name(group) if ranks else "",
    )


def backend_name(group: dist.ProcessGroup, device: torch.device | None = None) -> str:
    """The backend that moves the tensors of a device: what torch calls ``undefined`` or ``cpu:gloo,cuda:nccl``.

    Args:
        group: The group.
        device: Without one, a GPU, or the CPU where there is none.

    Raises:
        ValueError: torch does not know the group.
    """
    configured = str(dist.get_backend(group))
    for kind in (device,) if device is not None else (torch.device("cuda"), torch.device("cpu")):
        if kind.type == "cpu" or torch.cuda.is_available():
            try:
                return str(group._get_backend(kind).name())
            except (AttributeError, RuntimeError):  # a group of another kind, or with no backend for it
                continue
    return configured
