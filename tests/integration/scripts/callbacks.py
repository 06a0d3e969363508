"""Two ranks with our callbacks: Lightning with FSDP2, Transformers' Trainer, Lightning with DDP, then Accelerate.

It runs as below `ddpwatch run`: Transformers and Accelerate wrap the model by themselves.
Rank 0 writes what the loggers got. Each framework's marks follow one with its name.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning as L  # noqa: N812
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import FullyShardedDataParallelPlugin
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ddpwatch
from ddpwatch.integrations import AccelerateTracker, LightningCallback, TransformersCallback

Logged = dict[str, float]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Sharded(Module):
    """Shards itself, as the docs of `ModelParallelStrategy` teach."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.body[0], self.body[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.body, mesh=mesh)


class Logger(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: Logged = {}

    def log_metrics(self, metrics: Logged, step: int | None = None) -> None:
        self.logged |= metrics


class Tracker(GeneralTracker):
    """Keeps what is logged."""

    name = "kept"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: Logged = {}

    def log(self, values: Logged, step: int | None = None, **kwargs: object) -> None:
        self.logged |= values


class Reporting(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logged: Logged = {}

    def on_log(self, args: object, state: object, control: object, logs: Logged, **kwargs: object) -> None:
        self.logged |= logs


def with_lightning(folder: Path, data: DataLoader, module: Module, **options: object) -> Logged:
    logger = Logger()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, logger=logger, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[LightningCallback(every=5, record=folder / "run.mcap")], **options,
    )  # fmt: skip
    trainer.fit(module, data)
    os.environ["WORLD_SIZE"] = "2"  # Lightning removes it at the end
    return logger.logged


def sharded(folder: Path, data: DataLoader) -> Logged:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return with_lightning(folder, data, Sharded(), strategy=strategy, max_steps=4, enable_checkpointing=False)


def lightning(folder: Path, data: DataLoader) -> Logged:
    return with_lightning(folder, data, Module(), strategy="ddp", max_epochs=2)


def transformers(folder: Path, data: DataLoader) -> Logged:
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 16}
    model, kept = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)), Reporting()
    batch = {"input_ids": torch.zeros(8, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}
    arguments = TrainingArguments(
        str(folder / "trainer"), per_device_train_batch_size=2, num_train_epochs=2, save_strategy="epoch", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[batch] * 16, callbacks=[kept])
    trainer.add_callback(TransformersCallback(trainer, every=4))
    trainer.train()
    return kept.logged


def accelerate(folder: Path, data: DataLoader) -> Logged:
    ours, other = AccelerateTracker(every=2), Tracker()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, log_with=[ours, other], fsdp_plugin=plugin)
    print(f"with its plugin for FSDP2, Accelerate trains {accelerator.distributed_type.value}\n", end="")
    accelerator.init_trackers("project")
    ours.attach(accelerator)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    module, optimizer, data = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1e-2), data)
    for step, (inputs, targets) in enumerate(data):
        loss = nn.functional.cross_entropy(module(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"epoch": step // 4, "loss": loss.item()}, step=step)
    accelerator.save_state(str(folder / "state"))
    accelerator.end_training()
    return other.logged


def main() -> None:
    warnings.simplefilter("ignore")
    folder, found = Path(sys.argv[1]), {}
    features = torch.randn(512, 64)
    data = DataLoader(TensorDataset(features, features[:, :10].argmax(dim=1)), batch_size=16)
    for run in (sharded, transformers, lightning, accelerate):
        ddpwatch.mark(run.__name__)
        found[run.__name__] = run(folder, data)
    if os.environ["RANK"] == "0":  # Accelerate has ended the process group
        (folder / "logged.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
