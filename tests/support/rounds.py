"""The rounds of a benchmark: progress on stderr, and an early end that keeps what was measured.

SIGINT (Ctrl-C) or SIGTERM ends a loop after the current round, and the benchmark prints the rounds that it has. In a
single process a second signal acts as usual. torchrun passes both signals on to its ranks and kills them 30 s later, so
a round should take less than that.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sized
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

if TYPE_CHECKING:
    from torch.distributed import Store

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REDRAW_S, LINE_S = 0.1, 30.0  # how often progress is shown: in a terminal, elsewhere
T = TypeVar("T")

tqdm.monitor_interval = 0  # no extra thread in a process that is measured


class Rounds:
    """Loops that a signal ends early; a context manager, which restores the signal handlers.

    Ranks agree through the job's store: rank 0 publishes before each round whether it takes place, and the others wait
    for that. This adds no collective, which would show up in what some benchmarks measure.

    Args:
        rank: This process's rank; only rank 0 shows progress.
        store: The job's store; None in a single process.

    Attributes:
        stop_requested: Whether this process has received a signal.
    """

    def __init__(self, rank: int = 0, store: Store | None = None) -> None:
        self.stop_requested = False
        self._rank, self._store, self._number = rank, store, 0
        self._previous = {number: signal.signal(number, self._request_stop) for number in SIGNALS}

    @classmethod
    def of_job(cls) -> Rounds:
        """The rounds of all ranks in the default process group."""
        import torch.distributed as dist

        return cls(dist.get_rank(), dist.distributed_c10d._get_default_store())

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_handlers()

    def over(self, items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
        """Yields one item per round, until there are no more or a signal has ended the rounds.

        Args:
            items: What the rounds are about; ``range(rounds)`` where they only have numbers.
            what: What is measured, for the progress bar.
            total: How many items there are, where they have no length.
        """
        if total is None and isinstance(items, Sized):
            total = len(items)
        interval_s = REDRAW_S if sys.stderr.isatty() else LINE_S
        remaining = iter(items)
        shown: dict[str, Any] = {"desc": what, "unit": "round", "mininterval": interval_s, "miniters": 1}
        with tqdm(total=total, disable=self._rank > 0, **shown) as bar:
            while self.go_on():
                try:
                    item = next(remaining)
                except StopIteration:
                    return
                yield item
                bar.update()

    def go_on(self) -> bool:
        """Whether the next round takes place: the same answer on all ranks, which must all ask equally often."""
        if self._store is None:
            return not self.stop_requested
        key = f"benchmark/round {self._number}"
        self._number += 1
        if self._rank == 0:
            self._store.set(key, "stop" if self.stop_requested else "go")
        return bool(self._store.get(key) == b"go")

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self._rank == 0 and not self.stop_requested:
            os.write(2, b"\nstopping after this round\n")
        self.stop_requested = True
        if self._store is None:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def rounds_done(done: int, planned: int, what: str = "round") -> str:
    """How many rounds a result rests on, for the line below a table; ``what`` in the singular."""
    if done < planned:
        return f"stopped after {done} of {planned} {what}s"
    return f"{done} {what}{'' if done == 1 else 's'}"
