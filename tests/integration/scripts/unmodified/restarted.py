"""Fails once in mid-training, on every rank; torchrun restarts it. Knows nothing of ddpwatch.

Each attempt waits in its last step for a file: ``restarted.py NAME`` for ``NAME.0.end`` and ``NAME.1.end``.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wait(name: str) -> None:
    deadline = time.monotonic() + 300
    while not Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    attempt, rank, world = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    # A file for each attempt: with env:// the second may read addresses that the first has left in torchrun's store.
    store = f"file://{sys.argv[1]}.{attempt}"
    dist.init_process_group("gloo", store, rank=int(rank), world_size=int(world))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        model(torch.randn(4, 64)).square().mean().backward()
        if step == (4, 7)[int(attempt)]:
            wait(f"{sys.argv[1]}.{attempt}.end")
        if attempt == "0" and step == 4:
            raise SystemExit(f"rank {rank} gives up at step {step}")
        optimizer.step()
        optimizer.zero_grad()
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    # In one piece: the ranks share the pipe.
    os.write(1, f"attempt {attempt} parameters {hashlib.sha256(raw).hexdigest()[:16]}\n".encode())
    dist.barrier()  # both have said it
    del model  # else torch 2.13 hangs now and then, with nobody watching: it holds the group, and the GIL as it ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
