"""The one job of all cases: ranks that train a small model whose layers take their time, and note what they did.

    torchrun --standalone --nproc-per-node=2 -m tests.support.field.job CASE FOLDER

Layers pause instead of computing (`tests.support.paced`), so ranks do not slow each other. Each rank writes notes to
``FOLDER/notes-RANK.json``: for each step when it started, when its gradients were there, when it had been reduced and
when it ended; the same of each backward; and how long the fault took, step by step: of slower layers, by plan.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.paced import Pause

WIDTH, LAYERS, BATCH = 128, 5, 8
LAYER_MS = 2.5  # in the forward, and twice that in the backward


class Job:
    """One rank.

    Attributes:
        step: The current one.
        layer_ms: How long each layer takes in the forward.
        model, optimizer: As `build` made them.
    """

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.step = -1
        self.layer_ms = self._usual_ms = LAYER_MS
        self._computed_ns = self._reduced_ns = 0
        self._compute_ns = 0  # of a step, by plan
        self._steps: list[tuple[int, int, int, int, int]] = []
        self._struck: list[tuple[int, int]] = []
        self._backwards: list[tuple[int, int, int]] = []
        self._fetched: list[tuple[int, int]] = []

    def build(
        self,
        net: nn.Module | None = None,
        timeout_s: float = 600,
        width: int = WIDTH,
        layer_ms: float = LAYER_MS,
        **options: Any,
    ) -> DistributedDataParallel:
        """Joins the group and wraps a model, in which each linear layer takes so long."""
        self._usual_ms = self.layer_ms = layer_ms
        options.setdefault("gradient_as_bucket_view", True)  # else, copies into buckets and back are noted as transfers
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        torch.manual_seed(0)
        net = net or nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
        layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
        for module in layers:
            module.register_forward_hook(lambda *call: Pause.apply(call[-1], self.layer_ms))
        self._compute_ns = round(3 * len(layers) * layer_ms * 1e6)
        self.model = DistributedDataParallel(net, **options)
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(self._note_gradient)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        return self.model

    def _note_gradient(self, _: Tensor) -> None:
        self._computed_ns = time.monotonic_ns()

    def steps(self, count: int) -> Iterator[int]:
        """Yields the numbers of steps, and notes them."""
        for _ in range(count):
            self.step += 1
            started = time.monotonic_ns()
            yield self.step
            ended = time.monotonic_ns()
            self._steps.append((self.step, started, self._computed_ns, self._reduced_ns, ended))

    def batch(self, width: int = WIDTH) -> Tensor:
        """Returns a batch of noise."""
        return torch.randn(BATCH, width)

    def backward(self, loss: Tensor) -> None:
        """Computes gradients, which DDP reduces, and notes when that is done."""
        loss.backward()
        self._reduced_ns = time.monotonic_ns()
        self._backwards.append((self.step, self._computed_ns, self._reduced_ns))

    def loss(self, batch: Tensor | None = None) -> Tensor:
        """Returns the loss of a batch."""
        found: Tensor = self.model(self.batch() if batch is None else batch).square().mean()
        return found

    def train(self, batch: Tensor | None = None, slower: float = 1.0) -> None:
        """Trains a step; its layers take ``slower`` times as long as usual."""
        self.layer_ms = slower * self._usual_ms
        if slower > 1:
            self._struck.append((self.step, round((slower - 1) * self._compute_ns)))
        self.optimizer.zero_grad()
        self.backward(self.loss(batch))
        self.optimizer.step()

    def fetch(self, batches: Iterator[Tensor]) -> Tensor:
        """Returns the next batch, and notes how long the loop waited for it."""
        started = time.monotonic_ns()
        batch = next(batches)
        self._fetched.append((self.step, time.monotonic_ns() - started))
        return batch

    @contextmanager
    def strike(self) -> Iterator[None]:
        """Notes how long the fault takes."""
        started = time.monotonic_ns()
        yield
        self._struck.append((self.step, time.monotonic_ns() - started))

    def pause(self, seconds: float) -> None:
        """Is the fault for so long."""
        with self.strike():
            time.sleep(seconds)

    def write_notes(self) -> None:
        """Writes what happened."""
        notes = {
            "steps": self._steps, "struck": self._struck, "backwards": self._backwards, "fetched": self._fetched,
        }  # fmt: skip
        (self.folder / f"notes-{self.rank}.json").write_text(json.dumps(notes))


def main() -> None:
    """Runs a case."""
    from tests.support.field.cases import CASES

    job = Job(Path(sys.argv[2]))
    try:
        CASES[sys.argv[1]].run(job)
    finally:
        job.write_notes()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
