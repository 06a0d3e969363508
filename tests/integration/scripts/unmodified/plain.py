"""Data-parallel training as the PyTorch tutorials teach it: torchrun, a Trainer class, a DistributedSampler."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model: nn.Module, data: DataLoader, optimizer: torch.optim.Optimizer, checkpoint: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.model = DistributedDataParallel(model)
        self.data, self.optimizer, self.checkpoint = data, optimizer, checkpoint

    def run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run_epoch(self, epoch: int) -> None:
        self.data.sampler.set_epoch(epoch)
        losses = [self.run_batch(source, targets) for source, targets in self.data]
        print(
            f"rank {self.rank} | epoch {epoch} | steps {len(losses)} | loss {sum(losses) / len(losses):.6f}\n", end=""
        )

    def train(self, epochs: int) -> None:
        for epoch in range(epochs):
            self.run_epoch(epoch)
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), self.checkpoint)


def make_dataset() -> Dataset:
    features = torch.randn(640, 256)
    return TensorDataset(features, features[:, :10].argmax(dim=1))


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset, model = make_dataset(), make_model()
    data = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    Trainer(model, data, optimizer, arguments.checkpoint).train(arguments.epochs)
    dist.barrier()  # else torch 2.13 aborts now and then, with nobody watching: one rank leaves while the other saves
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
