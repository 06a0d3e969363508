"""A DDP script as the tutorials write it. It knows nothing of ddpwatch."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())], nn.Linear(128, 10))
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=0.1)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
    for _ in range(25):
        inputs, labels = torch.randn(64, 128), torch.randint(0, 10, (64,))
        optimizer.zero_grad()
        loss_fn(ddp_model(inputs), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("trained", *sys.argv[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
