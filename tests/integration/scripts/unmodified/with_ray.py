"""Training with Ray Train: a cluster on this machine, two workers, and a checkpoint at the end of each epoch."""

import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
        )
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def train(config: dict[str, float]) -> None:
    torch.manual_seed(0)
    features = torch.randn(1024, 256)
    dataset = TensorDataset(features, features[:, :10].argmax(dim=1))
    loader = prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    model = prepare_model(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), Path(folder) / "model.pt")
            ray.train.report({"loss": loss.item()}, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    saved = Path(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 1024**2)
    trainer = TorchTrainer(
        train,
        train_loop_config={"lr": 1e-3, "epochs": 2},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=saved.stem, storage_path=str(saved.parent / "ray_results")),
    )
    result = trainer.fit()
    print(f"trained, last loss {result.metrics['loss']:.6f}")
    with result.checkpoint.as_directory() as folder:
        torch.save(torch.load(Path(folder) / "model.pt"), saved)


if __name__ == "__main__":
    main()
