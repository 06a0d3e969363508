"""Checkpoints that are complete or absent.

A checkpoint is a directory ``step-00000120``: ``train.pt`` from rank 0 (model, optimizer, schedule) and ``rank-R.pt``
from every rank (position in the data, random state, the comm hook's memory). It is written under another name and
renamed when all ranks are done, so a crash in between leaves the previous one valid. On several hosts the directory
must be shared. Everything in it loads with ``weights_only=True``: no pickle.
"""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainer.distributed import World
from trainer.errors import TrainerError

KEPT = 2
State = dict[str, Any]


class Checkpoint(NamedTuple):
    """What rank 0 saved for all ranks, and what this rank saved; ``own`` is None if the number of ranks has changed."""

    shared: State
    own: State | None


def save(directory: Path, step: int, world: World, shared: State, own: State) -> None:
    """Write a checkpoint; collective. ``shared`` is used on rank 0, ``own`` on every rank."""
    final = directory / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    torch.save(own, partial / f"rank-{world.rank}.pt")
    if world.rank == 0:
        torch.save({"step": step, "world_size": world.size, **shared}, partial / "train.pt")
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in _complete(directory)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def load_newest(directory: Path, world: World, setup: State) -> Checkpoint | None:
    """Read the newest checkpoint, or return None if there is none.

    Raises:
        TrainerError: It cannot be read, or belongs to another ``setup``.
    """
    complete = _complete(directory)
    if not complete:
        return None
    shared = _load(complete[-1] / "train.pt", world)
    for key, value in setup.items():
        if shared["setup"][key] != value:
            raise TrainerError(f"checkpoint {complete[-1]} was made with {key} {shared['setup'][key]!r}, not {value!r}")
    same_ranks = shared["world_size"] == world.size
    return Checkpoint(shared, _load(complete[-1] / f"rank-{world.rank}.pt", world) if same_ranks else None)


def _complete(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if path.suffix != ".partial")


def _load(path: Path, world: World) -> State:
    # A truncated file has lost the index at its end, and torch's errors about that vary.
    if not zipfile.is_zipfile(path):
        raise TrainerError(f"cannot read checkpoint {path}: it is missing, cut short or something else")
    try:
        state: State = torch.load(path, map_location=world.device, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise TrainerError(f"cannot read checkpoint {path}: {str(error).splitlines()[0]}") from error
    return state
