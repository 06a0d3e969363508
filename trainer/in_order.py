"""Collectives that wait for other collectives, in the same order on every rank.

Gloo pairs the collectives of two ranks by the order in which they were issued. A bucket whose reduction is a chain
(PowerSGD: three all-reduces; reduce-scatter, then all-gather) issues the later links when the earlier ones complete, on
any worker thread. With two buckets in flight, two ranks soon disagree about the order, and messages are paired that do
not belong together: PowerSGD over several buckets hangs. So chains run on one thread per rank, one after the other, on
a process group of their own. NCCL needs none of this: its collectives queue up on one stream.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.futures import Future

CPU = torch.device("cpu")
Work = tuple[Callable[[], Future[Tensor]], "Future[Tensor]"]


def future_on(device: torch.device) -> Future[Tensor]:
    """Return a future whose result will lie on a device."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


class InOrder:
    """A thread that runs calls which communicate, each to its end before the next starts.

    It sleeps ``delay_s`` before every call, as if the rank's network were slow. The results lie on ``device``.
    """

    def __init__(self, delay_s: float = 0.0, device: torch.device = CPU) -> None:
        """Start the thread; it ends with the process."""
        self.delay_s = delay_s
        self.device = device
        self._queue: SimpleQueue[Work] = SimpleQueue()
        threading.Thread(target=self._run, name="in-order", daemon=True).start()

    def submit(self, call: Callable[[], Future[Tensor]]) -> Future[Tensor]:
        """Queue ``call`` and return a future of the result of its future."""
        result = future_on(self.device)
        self._queue.put((call, result))
        return result

    def _run(self) -> None:
        while True:
            call, result = self._queue.get()
            time.sleep(self.delay_s)
            try:
                result.set_result(call().wait())
            except Exception as error:  # the caller that waits for the result raises it
                traceback.print_exc()  # DDP waits in C++, which can only say "Unable to cast to Tensor"
                result.set_exception(error)  # type: ignore[arg-type]
