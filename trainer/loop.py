"""The training loop. Read it from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from trainer import checkpoint
from trainer.config import TrainConfig
from trainer.data.stream import Batch, BatchStream
from trainer.distributed import World
from trainer.faults import FaultPlan
from trainer.in_order import InOrder
from trainer.optimization import OPTIMIZERS, build_schedule
from trainer.progress import Progress
from trainer.strategies import build_strategy
from trainer.task import Task, build_task, check_config

MAX_TEST_SAMPLES = 2048
TEST_BATCH = 64


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. ``loss`` is this rank's last; accuracy and test loss are over all ranks, if asked for."""

    steps: int
    loss: float
    interrupted: bool = False
    test_loss: float | None = None
    test_accuracy: float | None = None


class Trainer:
    """One rank's share of a training run.

    Args:
        config: What to do.
        world: This rank's place; None to read it from the environment.
        task: Model and data; None to build those that ``config`` names.
        must_stop: Called with the number of every step before it; whether to stop instead.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World | None = None,
        task: Task | None = None,
        must_stop: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """Build everything; collective, so call it on every rank, inside a process group."""
        self.config = config
        self.world = world or World.from_environment(config.device)
        check_config(config, self.world)
        task = task or build_task(config, self.world)
        self.data, self.model = task.data, task.model.to(self.world.device)
        self.must_stop = must_stop
        self.faults = FaultPlan(task.faults, self.world, self.model)
        self.strategy = build_strategy(self.model, config, self.world)
        if self.faults.comm_delay_s:
            self.strategy.delay_communication(InOrder(self.faults.comm_delay_s, self.world.device))
        self.optimizer = OPTIMIZERS[config.optimizer](self.model.parameters(), config.lr)
        self.schedule = build_schedule(self.optimizer, config.schedule, config.warmup_steps, config.steps)
        self.stream = BatchStream(
            self.data.train, config.batch_size(self.world.rank), self.world, config.seed, self.faults.at_input
        )
        self.step = 0
        self.on_batch: Callable[[Tensor], None] = lambda inputs: None

    def fit(self) -> TrainResult:
        """Train until ``config.steps``, or until ``must_stop``."""
        batches = self._batches()
        progress = Progress(self.config.steps, self.step, self.config.log_every, self.world.rank == 0)
        loss, interrupted = torch.tensor(float("nan")), False
        while self.step < self.config.steps:
            if interrupted := self.must_stop(self.step + 1):
                break
            loss = self.train_step(batches)
            progress.update(self.step, loss)
            if self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0:
                self.save_checkpoint()
        progress.close()
        return TrainResult(self.step, loss.item(), interrupted)

    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """Take one optimizer step and return its local loss, still on the device."""
        self.faults.begin_step(self.step + 1)
        self.strategy.begin_step(self.config.accumulate * self.stream.batch_size)
        total = torch.zeros((), device=self.world.device)
        for micro in range(1, self.config.accumulate + 1):
            inputs, targets = next(batches)
            self.on_batch(inputs)
            # Forward belongs inside as well: DDP decides there whether this backward will synchronise.
            with self._synchronisation(micro):
                loss = self.loss(self.strategy.forward, inputs, targets) / self.config.accumulate
                self.strategy.backward(loss)
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.step += 1
        return total

    def loss(self, forward: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of a batch."""
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.amp):
            logits = forward(inputs)
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def _synchronisation(self, micro: int) -> AbstractContextManager[None]:
        """Synchronise after the last micro-batch only, or after each with ``accumulate_wrong``."""
        if micro == self.config.accumulate or self.config.accumulate_wrong:
            return nullcontext()
        return self.strategy.no_sync()

    def _batches(self) -> Iterator[Batch]:
        for inputs, targets in self.stream:
            yield inputs.to(self.world.device), targets.to(self.world.device)

    # -- testing ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, result: TrainResult) -> TrainResult:
        """Add loss and accuracy on the test data to a result; collective, each rank takes its share."""
        if self.data.test is None:
            return result
        self.strategy.share_state()
        batches = test_batches(min(len(self.data.test), MAX_TEST_SAMPLES), self.world)  # type: ignore[arg-type]
        sums = torch.zeros(3, device=self.world.device, dtype=torch.float64)
        self.model.eval()
        for inputs, targets in DataLoader(self.data.test, batch_sampler=batches):
            sums += self._score(inputs.to(self.world.device), targets.to(self.world.device))
        self.model.train()
        dist.all_reduce(sums)
        loss, right, count = sums.tolist()
        return replace(result, test_loss=loss / count, test_accuracy=right / count)

    def _score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs).flatten(0, -2)
        loss = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        right = (logits.argmax(dim=-1) == targets.flatten()).sum()
        return torch.stack([loss.double(), right.double(), torch.full_like(loss, targets.numel()).double()])

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Save a checkpoint; collective."""
        assert self.config.checkpoint is not None
        self.strategy.share_state()
        shared = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "setup": checkpoint_setup(self.config),
        }
        own = {
            "stream": self.stream.state_dict(),
            "random": torch.get_rng_state(),
            "strategy": self.strategy.state_dict(),
        }
        checkpoint.save(self.config.checkpoint, self.step, self.world, shared, own)

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint; if the number of ranks has changed, from the start of its epoch."""
        shared, own = found
        self.step = shared["step"]
        self.model.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.schedule.load_state_dict(shared["schedule"])
        if own is not None:
            self.stream.load_state_dict(own["stream"])
            torch.set_rng_state(own["random"].cpu())
            self.strategy.load_state_dict(own["strategy"])


def test_batches(samples: int, world: World) -> list[list[int]]:
    """Deal out the test samples, in as many batches on every rank: a sharded model needs all ranks in each forward."""
    share = torch.arange(samples)[world.rank :: world.size]
    count = -(-samples // (TEST_BATCH * world.size))
    return [batch.tolist() for batch in share.tensor_split(count) if len(batch)]


def checkpoint_setup(config: TrainConfig) -> dict[str, Any]:
    """Return the options that a checkpoint must match; the comm hook's memory belongs to its buckets."""
    names = ("model", "data", "optimizer", "comm_hook", "bucket_cap_mb")
    return {name: getattr(config, name) for name in names}
