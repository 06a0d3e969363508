"""What a rank trains on: what its script counts, and the batches that its DataLoader gives. And its GPU's memory.

Threads that train only append; the sender thread adds up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from numbers import Real
from typing import Any, Final, NamedTuple

import torch

from ddpwatch.errors import UsageError
from ddpwatch.wire.messages import Trained

BACKLOG: Final = 65_536  # counts that the sender thread has not added up yet
LoaderRef = Callable[[], object]


class _Counted(NamedTuple):
    """What was counted while a step was the newest; ``batches`` are samples that nobody but the DataLoader counts."""

    step: int
    samples: float | None = None
    tokens: float | None = None
    flops: float | None = None
    batches: int | None = None


class TrainedCounter:
    """Adds up what a rank trains on. What it says lies before the newest step in which something was counted.

    So rates between two of its answers are exact, wherever in a step the script counts, and however often.

    Args:
        steps: Returns how many steps the rank has taken.

    Attributes:
        loader: The DataLoader's iterator that gave the newest batch since an optimizer has stepped last.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps
        self._new: deque[_Counted] = deque(maxlen=BACKLOG)
        self._step = -1
        self._total: dict[str, float] = {}
        self._before: dict[str, float] = {}  # that step
        self._fetched: dict[LoaderRef, int] = {}  # samples by DataLoader iterator, since an optimizer has stepped last
        self.loader: LoaderRef | None = None

    def count(self, samples: object, tokens: object, flops: object) -> None:
        """Adds what the script counts. For any thread.

        Raises:
            UsageError: One is no number: to ask a tensor for its value would wait for the GPU. Or it is negative.
        """
        self._new.append(_Counted(self._steps(), _checked(samples), _checked(tokens), _checked(flops)))

    def take_batch(self, loader: LoaderRef) -> None:
        """Notes a batch that a DataLoader's iterator has given."""
        size = getattr(getattr(loader(), "_index_sampler", None), "batch_size", None)
        if isinstance(size, int):
            self.loader = loader
            self._fetched[loader] = self._fetched.get(loader, 0) + size

    def end_update(self) -> None:
        """Counts the batches of an update: of the iterator that gave the newest one. Others fed a validation."""
        loader, self.loader = self.loader, None
        if loader is not None:
            self._new.append(_Counted(self._steps(), batches=self._fetched.get(loader)))
            self._fetched.clear()

    def so_far(self) -> Trained | None:
        """Returns what was counted before the newest step; None before the first count. For the sender thread."""
        new = self._new
        while new:
            counted = new.popleft()
            if counted.step != self._step:
                self._step, self._before = counted.step, dict(self._total)
            for name, value in zip(_Counted._fields[1:], counted[1:], strict=True):
                if value is not None:
                    self._total[name] = self._total.get(name, 0) + value
        if not self._total:
            return None
        before = {name: self._before.get(name, 0) for name in self._total}
        samples = before.get("samples", before.get("batches"))
        return Trained(self._step, _whole(samples), _whole(before.get("tokens")), before.get("flops"))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _checked(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real):
        raise UsageError(f"count() got a {type(value).__name__}", "count numbers, such as batch.numel()")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"count() got {number}", "count what one batch has")
    return number


def gpu_memory(device: torch.device | None) -> dict[str, int]:
    """Returns a heartbeat's figures of a GPU's memory, as torch's allocator counts it; asks nothing of the GPU."""
    if device is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    found = torch.cuda.memory_stats(device)
    return {
        "memory_allocated": found["allocated_bytes.all.current"],
        "memory_reserved": found["reserved_bytes.all.current"],
        "memory_peak": found["allocated_bytes.all.peak"],
    }
