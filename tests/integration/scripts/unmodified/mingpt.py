"""A character-level GPT as PyTorch's minGPT example trains it: a Trainer with snapshots, a test after each epoch."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler

TEXT = "the quick brown fox jumps over the lazy dog, and then the dog jumps over the fox. " * 5


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int = 16
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 128


class CharDataset(Dataset):
    def __init__(self, text: str, block_size: int) -> None:
        characters = sorted(set(text))
        self.vocab_size, self.block_size = len(characters), block_size
        self.data = torch.tensor([characters.index(character) for character in text])

    def __len__(self) -> int:
        return len(self.data) - self.block_size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = self.data[index : index + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, config.n_head, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("mask", torch.triu(torch.ones(config.block_size, config.block_size).bool(), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln1(x)
        x = x + self.attn(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, index: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.ln_f(self.blocks(self.tok_emb(index) + self.pos_emb)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, model: nn.Module, train: Dataset, test: Dataset, snapshot: Path) -> None:
        self.rank, self.snapshot, self.epochs_run = int(os.environ["RANK"]), snapshot, 0
        self.train_loader, self.test_loader = self.loader(train), self.loader(test)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        if snapshot.exists():
            found = torch.load(snapshot, weights_only=True)
            model.load_state_dict(found["model"])
            self.optimizer.load_state_dict(found["optimizer"])
            self.epochs_run = found["epochs"]
        self.model = DistributedDataParallel(model)

    def loader(self, dataset: Dataset) -> DataLoader:
        return DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))

    def run_batch(self, source: torch.Tensor, targets: torch.Tensor, train: bool) -> float:
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return loss.item()

    def run_epoch(self, epoch: int, loader: DataLoader, train: bool) -> None:
        loader.sampler.set_epoch(epoch)
        losses = [self.run_batch(source, targets, train) for source, targets in loader]
        name, mean = "train" if train else "test", math.fsum(losses) / len(losses)
        print(f"rank {self.rank} | epoch {epoch} | {len(losses)} steps | {name} loss {mean:.6f}\n", end="")

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch, self.train_loader, train=True)
            if self.rank == 0:
                raw = self.model.module
                state = {"model": raw.state_dict(), "optimizer": self.optimizer.state_dict(), "epochs": epoch + 1}
                torch.save(state, self.snapshot)
            self.run_epoch(epoch, self.test_loader, train=False)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = CharDataset(TEXT, block_size=16)
    train, test = random_split(dataset, [320, len(dataset) - 320])
    trainer = Trainer(GPT(GPTConfig(dataset.vocab_size)), train, test, Path(sys.argv[1]).with_suffix(".snapshot"))
    trainer.train(epochs=2)
    dist.barrier()  # else torch 2.13 aborts now and then, with nobody watching: one rank leaves while the other saves
    if trainer.rank == 0:
        torch.save(dict(trainer.model.module.named_parameters()), sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
