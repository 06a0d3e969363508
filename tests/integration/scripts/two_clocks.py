"""Two ranks whose monotonic clocks differ, as on two hosts: rank 1 is in a time namespace of its own.

    two_clocks.py RECORDING AHEAD_S

The ranks take turns in launching 0.1 s late.
"""

import ctypes
import os
import sys
import time
from pathlib import Path

CLONE_NEWTIME = 0x80
STEPS, NAP_S = 20, 0.1


def enter(ahead_s: int) -> None:
    """Returns in a child process whose clock is ahead; the caller ends when that does."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {ahead_s} 0")
    if inside := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]) & 0xFF)


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import ddpwatch

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Linear(8, 8))
    with ddpwatch.watch(model, record=sys.argv[1]):
        for batch in range(STEPS):
            time.sleep(NAP_S * (batch % 2 == dist.get_rank()))
            model(torch.ones(2, 8)).sum().backward()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        enter(int(sys.argv[2]))
    main()
