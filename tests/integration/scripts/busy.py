"""Trains a tiny model as fast as it can, and says when it starts to drop frames.

    busy.py RECORDING FILL STOP END

Once the file FILL exists, each step has marks besides its own frame, so that queues fill in fewer steps. What it says
comes when a step's own frame was dropped, and not only marks. It stops training once STOP exists, and watching once END
does.
"""

import gc
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from ddpwatch.probe import session
from ddpwatch.probe.sender import Sender
from ddpwatch.wire.messages import Message, Step

MARKS = 10  # a step


def note_dropped_steps(sender: Sender) -> list[int]:
    """A list that gets the numbers of the steps that the sender drops."""
    dropped: list[int] = []
    send = sender._send

    def noting(message: Message) -> bool:
        sent = send(message)
        if not sent and isinstance(message, Step):
            dropped.append(message.step)
        return sent

    sender._send = noting
    return dropped


def main() -> None:
    record, fill, stop, end = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    gc.disable()  # its pauses would be marks as well
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, go_on, warned = torch.randn(4, 8), torch.ones(1), False
    with ddpwatch.watch(model, record=record):
        dropped = note_dropped_steps(session.current.sender)
        while go_on.item():
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(MARKS * Path(fill).exists()):
                ddpwatch.mark("one more frame")
            if dropped and not warned:
                warned = True
                print(f"rank {dist.get_rank()} drops\n", end="", flush=True)
            if dist.get_rank() == 0:
                go_on.fill_(not Path(stop).exists())
            dist.broadcast(go_on, 0)
        while not Path(end).exists():
            time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
