"""Two Lightning ranks with our callback and a logger; rank 0 writes what the logger got. Then Accelerate, by itself."""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning as L  # noqa: N812
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddpwatch.integrations import AccelerateTracker, LightningCallback


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Logger(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged |= metrics


class Tracker(GeneralTracker):
    """Keeps what is logged."""

    name = "kept"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: object) -> None:
        self.logged |= values


def with_lightning(folder: Path, loader: DataLoader) -> dict[str, float]:
    logger = Logger()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=logger, default_root_dir=folder,
        callbacks=[LightningCallback(every=5, record=folder / "run.mcap")],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    return logger.logged


def with_accelerate(folder: Path, loader: DataLoader) -> dict[str, float]:
    ours, other = AccelerateTracker(every=2), Tracker()
    accelerator = Accelerator(cpu=True, log_with=[ours, other])
    accelerator.init_trackers("project")
    ours.attach(accelerator)
    for step, _ in enumerate(loader):
        accelerator.log({"epoch": step // 4, "loss": 0.0}, step=step)
    accelerator.save_state(str(folder / "state"))
    accelerator.end_training()
    return other.logged


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    features = torch.randn(512, 64)
    loader = DataLoader(TensorDataset(features, features[:, :10].argmax(dim=1)), batch_size=16)
    found = {"lightning": with_lightning(folder, loader)}
    found["accelerate"] = with_accelerate(folder, loader)
    if os.environ["RANK"] == "0":  # Accelerate has ended the process group
        (folder / "logged.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
