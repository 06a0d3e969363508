"""A process group whose all-reduces sleep on a GPU.

`SleepingGroup` is a process group whose all-reduce lets a side stream of the GPU sleep for a known time, with a future
as NCCL's: complete at once, and whoever waits for it lets its stream wait. So DDP and the probe take their usual path,
with collectives of known length, without a second rank.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class _Work(dist._Work):
    """A collective that was issued."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: Any = None) -> bool:
        """Lets the current stream wait."""
        self.future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """The result."""
        return self.future


class SleepingGroup(dist.ProcessGroup):
    """A process group of one rank.

    Args:
        device: Of the tensors.
        cycles: How long each all-reduce sleeps on its stream.
    """

    def __init__(self, device: torch.device, cycles: int) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.device = device
        self.cycles = cycles
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "nccl" if self.stream is not None else "made up")

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """Sleeps, and leaves the tensors as they are."""
        if self.stream is None:
            return self._done(tensors)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self.cycles)
            return self._done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """There is nobody to send to."""
        return self._done(tensors)

    def _done(self, tensors: list[torch.Tensor]) -> dist.Work:
        """Done once the current stream has reached this."""
        future: Any = torch.futures.Future(devices=None if self.stream is None else [self.device])
        future.set_result(tensors)
        return _Work(future)
