"""Training with Lightning's ModelParallelStrategy: the module shards itself with FSDP2 in ``configure_model``."""

import sys

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
            nn.Linear(512, 10),
        )  # fmt: skip
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        features, labels = batch
        loss = nn.functional.cross_entropy(self.model(features), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    features = torch.randn(512, 256)
    data = TensorDataset(features, features[:, :10].argmax(dim=1))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
    trainer.print(f"last loss {trainer.callback_metrics['loss']:.6f}")
    trainer.save_checkpoint(sys.argv[1])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
