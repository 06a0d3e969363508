"""A job of two ranks, of which rank 1 is slow as the file FOLDER/case says: ``explained.py FOLDER``.

With the case "own", rank 1 has a profiler of its own. Each rank notes in FOLDER/RANK the case that it has taken. With
the case "over", it trains the same number of steps again, unwatched and without delay, and leaves the digests of both
trainings in FOLDER/RANK.json.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import ddpwatch

WORK_S = 0.02  # of each rank's forward
DELAY_S = 0.02
CALLS = 20
WIDE = torch.ones(256, 256)  # about DELAY_S for so many products of it
FOLDER = Path(sys.argv[1])
case = ""
own = torch.profiler.profile()


def delay(name: str) -> bool:
    return case == name and dist.get_rank() == 1


def mask_spans() -> None:
    """Computes: Python has the GIL."""
    until = time.monotonic() + DELAY_S
    while time.monotonic() < until:
        pass


def augment(row: torch.Tensor) -> torch.Tensor:
    if delay("data"):
        time.sleep(DELAY_S)
    return row


class Rows(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        random = torch.Generator().manual_seed(dist.get_rank())
        while True:
            yield augment(torch.randn(16, generator=random))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: object, batch: torch.Tensor) -> torch.Tensor:
        return batch * 1.5

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if delay("backward"):
            time.sleep(DELAY_S)
        return gradient * 1.5


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(16, 16)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.number == 1 and delay("forward"):
            mask_spans()
        if self.number == 1 and delay("operators"):
            for _ in range(CALLS):
                torch.mm(WIDE, WIDE)
        return Scaled.apply(self.linear(batch)).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(0), Block(1)])

    def __getattr__(self, name: str) -> object:
        assert name != "self", "a sampler asks a model for its attributes"
        return super().__getattr__(name)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if case:
            time.sleep(WORK_S)
        for block in self.blocks:
            batch = block(batch)
        return batch


def train(steps: int | None) -> tuple[int, str]:
    """Trains for so many steps, None: watched, until the case is "over"; how many there were, and a digest."""
    global case
    torch.manual_seed(5)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = ddpwatch.watch(model, record=FOLDER / "run.mcap") if steps is None else None
    taken = 0
    for batch in DataLoader(Rows(), batch_size=1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if taken == steps or (steps is None and follow_case(taken)):
            break
    if watch is not None:
        watch.close()
    case = ""
    return taken, hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def follow_case(taken: int) -> bool:
    """Takes the case of now, which rank 0 reads for both; whether it is the last one."""
    global case
    if taken % 10 == 0:
        found = [(FOLDER / "case").read_text()]
        dist.broadcast_object_list(found)
        if dist.get_rank() == 1 and "own" in (case, found[0]) and case != found[0]:
            own.start() if found[0] == "own" else own.stop()
        case = found[0]
        (FOLDER / str(dist.get_rank())).write_text(case)
    return case == "over"


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    taken, watched = train(None)
    again, unwatched = train(taken)
    found = {"steps": [taken, again], "digests": [watched, unwatched]}
    (FOLDER / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
