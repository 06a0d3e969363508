"""Collectives that wait for other collectives, in the same order on every rank.

Gloo pairs the collectives of two ranks by the order in which they were issued. A bucket whose reduction is a chain
(PowerSGD: three all-reduces; reduce-scatter, then all-gather) issues the later links when the earlier ones complete,
on whichever worker thread finds out; with two buckets on their way, two ranks soon disagree about the order, and
messages meet that do not belong together: PowerSGD over several buckets hangs. So chains run on one thread per rank,
one after the other, on a process group that nobody else uses. NCCL needs none of this: its collectives queue up on
one stream.
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

Work = tuple[Callable[[], Future[Tensor]], "Future[Tensor]"]


class InOrder:
    """A thread that runs calls which communicate, each to its end before the next begins.

    ``delay_s`` is slept before every call: the rank's network, as if it were slow.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        """Start the thread; it ends with the process."""
        self.delay_s = delay_s
        self._queue: SimpleQueue[Work] = SimpleQueue()
        threading.Thread(target=self._run, name="in-order", daemon=True).start()

    def submit(self, call: Callable[[], Future[Tensor]]) -> Future[Tensor]:
        """Queue ``call`` and give a future of what its own future will hold."""
        result: Future[Tensor] = torch.futures.Future()
        self._queue.put((call, result))
        return result

    def _run(self) -> None:
        while True:
            call, result = self._queue.get()
            time.sleep(self.delay_s)
            try:
                result.set_result(call().wait())
            except Exception as error:  # belongs to whoever waits for the result, not to this thread
                traceback.print_exc()  # DDP waits in C++, which can only say "Unable to cast to Tensor"
                result.set_exception(error)  # type: ignore[arg-type]
