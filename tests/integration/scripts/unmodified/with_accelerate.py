"""Training with Hugging Face Accelerate: all goes through ``prepare``; gradients of two batches are accumulated."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(256, 512)
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).relu()
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    features = torch.randn(1024, 256)
    dataset = TensorDataset(features, features[:, :10].argmax(dim=1))
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()[None]).mean()
    accelerator.print(f"trained on {accelerator.num_processes} processes, last loss {mean:.6f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
    accelerator.end_training()


if __name__ == "__main__":
    main()
