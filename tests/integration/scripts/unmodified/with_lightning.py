"""Training with Lightning, which starts its second process by itself and validates every eight batches."""

import sys

import lightning as L  # noqa: N812
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
        )
        self.head = nn.Linear(512, 10)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        return nn.functional.cross_entropy(self.head(self.body(features)), labels)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loader(samples: int, *, shuffle: bool) -> DataLoader:
    features = torch.randn(samples, 256)
    return DataLoader(TensorDataset(features, features[:, :10].argmax(dim=1)), batch_size=32, shuffle=shuffle)


def main() -> None:
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, val_check_interval=8,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), loader(1024, shuffle=True), loader(256, shuffle=False))
    trainer.print(f"validation loss {trainer.callback_metrics['val_loss']:.6f}")
    trainer.save_checkpoint(sys.argv[1])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
