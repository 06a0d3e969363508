"""Ranks on two hosts: each enters the namespaces of its host before it does anything else.

    hosts.py PIDS FOLDER

PIDS are the processes that keep the namespaces, or ``-`` if the job was started in them. The job trains unwatched and
watched, compares the parameters, and then trains until there is a file ``stop`` in FOLDER. Rank 0 leaves the root's
public key there.
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.hosts import LINKS, NAMESPACES

if TYPE_CHECKING:
    from ddpwatch.probe.session import ProbeSession

STEPS, NAP_S = 30, 0.02
LATER_NAP_S = 0.06  # once the parameters are compared: the job only has to go on


def enter(pid: str) -> None:
    """Goes to a host. This process must have one thread only."""
    os.chdir("/")
    for kind in NAMESPACES:
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")


def leave_key(file: Path, session: "ProbeSession | None") -> None:
    """Writes the root's public key to the file once rank 0 has one."""
    server = None if session is None else session._rendezvous._server
    if server is not None and server._keys is not None and not file.exists():
        (whole := file.with_suffix(".new")).write_text(server._keys.public)
        whole.rename(file)


def main(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import ddpwatch
    from ddpwatch.probe import session

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()

    def made() -> DistributedDataParallel:
        torch.manual_seed(1)
        return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))

    def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: int) -> None:
        generator = torch.Generator().manual_seed(100 * batch + rank)
        optimizer.zero_grad()
        model(torch.rand(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()

    trained = []
    for watched in (False, True):
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = ddpwatch.watch(model) if watched else None
        for batch in range(STEPS):
            step(model, optimizer, batch)
            time.sleep(NAP_S)
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    print(f"rank {rank}: bit-identical {torch.equal(*trained)}", flush=True)
    stop, batch = torch.zeros(1), STEPS
    while not stop.item():
        step(model, optimizer, batch)
        time.sleep(LATER_NAP_S)
        batch += 1
        stop += rank == 0 and (folder / "stop").exists()
        dist.broadcast(stop, 0)
        leave_key(folder / "key", session.current)
    assert watch is not None
    watch.close()
    dist.destroy_process_group()


def enter_mine(pids: list[str]) -> None:
    """Goes to this rank's host, and forgets whatever has started the job elsewhere."""
    enter(pids[int(os.environ["RANK"]) * len(pids) // int(os.environ["WORLD_SIZE"])])
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    os.environ.update(
        MASTER_ADDR=f"{LINKS['eth0']}.1", MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0", DDPWATCH_IFNAME="mon0"
    )


if __name__ == "__main__":
    if sys.argv[1] != "-":
        enter_mine(sys.argv[1].split(","))
    main(Path(sys.argv[2]))
