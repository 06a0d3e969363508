"""This process's place in the job, and its process group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainer.errors import TrainerError

DEVICES = ("auto", "cpu", "cuda")
DROP_CALLBACKS_S = 0.1
"""Time for Gloo's threads to drop the last step's Python callbacks.

They need the GIL for that, and a thread that asks for the GIL while the interpreter shuts down ends in C++'s
``std::terminate``: a run that succeeded would exit with SIGABRT. There is no way to ask whether they are done.
"""


@dataclass(frozen=True)
class World:
    """One process's place among all ranks; several may share a GPU."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    shares_gpu: bool = False

    @property
    def backend(self) -> str:
        """The collective backend for the device. NCCL refuses two ranks on one GPU."""
        return "nccl" if self.device.type == "cuda" and not self.shares_gpu else "gloo"

    @classmethod
    def from_environment(cls, device: str = "auto") -> World:
        """Read what torchrun sets; without torchrun this is a world of one.

        Args:
            device: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is a GPU.

        Raises:
            TrainerError: There is no GPU, or no such device.
        """
        if device not in DEVICES:
            raise TrainerError(f"no device is called {device!r}; known: {', '.join(DEVICES)}")
        gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
        if device == "cuda" and not gpus:
            raise TrainerError("there is no GPU here that torch can use; --device cpu needs none")
        local_rank, on_host = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        place = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
        return cls(rank, local_rank, size, place, shares_gpu=0 < gpus < on_host)


@contextmanager
def process_group(world: World, timeout: timedelta = timedelta(minutes=10)) -> Iterator[Store]:
    """Join the job's process group for as long as the block lasts; yields the job's store."""
    _claim_compute(world)
    store = _meet(world)
    dist.init_process_group(world.backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    try:
        yield store
    finally:
        if world.backend == "gloo":
            time.sleep(DROP_CALLBACKS_S)
        dist.destroy_process_group()


def _meet(world: World) -> Store:
    """Reach the store that torchrun provides; a world of one without torchrun makes its own."""
    if "RANK" not in os.environ:
        return HashStore()
    store: Store = next(rendezvous("env://", world.rank, world.size))[0]
    # A restarted job finds the same store, with the addresses of ranks that are gone.
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _claim_compute(world: World) -> None:
    """Give each rank its own GPU, or one thread, so that ranks do not compete for the same cores."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
