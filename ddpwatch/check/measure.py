"""Measures one rank: matrix products, memory, clock, disk, exchanges with each other rank, all-reduce among all."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ddpwatch.check.judge import LIMITS, MeasureName, RankMeasures
from ddpwatch.whatif.sweep import settle, timed

ROUNDS = 40  # in the time that was asked for, about
FEWEST_ROUNDS = 10
PARTS = 5  # of a round
MOST_MEETINGS = 64  # in a round: of each rank with another
DISK_BYTES = 16 << 20
MB, GB = 1e6, 1e9


class RankCheck:
    """One rank's part. All ranks take the same measurements in the same order.

    Args:
        device: Where the tensors are.
        seconds: About how long to measure.
        folder: Which disk to measure.
    """

    def __init__(self, device: torch.device, seconds: float, folder: Path) -> None:
        is_gpu = device.type == "cuda"
        self._device, self._seconds, self._folder = device, seconds, folder
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._is_first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
        self._slice_s = seconds / ROUNDS / PARTS
        rows, kind = (8192, torch.bfloat16) if is_gpu else (384, torch.float32)
        self._matrix = torch.ones(rows, rows, device=device, dtype=kind)
        self._copied = [torch.zeros((1 << 28) if is_gpu else (1 << 24), device=device) for _ in range(2)]
        self._sent, self._got = (torch.zeros((1 << 24) if is_gpu else (1 << 18), device=device) for _ in range(2))
        self._block = os.urandom(DISK_BYTES)
        self._figures: dict[MeasureName, list[float | None]] = {
            name: [] for name in LIMITS if name != "link" and (name != "disk" or self._is_first_here)
        }
        self._links: dict[int, list[float | None]] = {peer: [] for peer in range(self._ranks) if peer != self._rank}

    def run(self) -> list[RankMeasures]:
        """Measures everything; returns the figures of all ranks."""
        self._round()  # opens connections
        for values in (*self._figures.values(), *self._links.values()):
            values.clear()
        started, rounds = time.monotonic(), 0
        while rounds < FEWEST_ROUNDS or self._goes_on(started):
            self._round()
            rounds += 1
        own = RankMeasures(
            rank=self._rank,
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            figures=self._figures,
            links={peer: values for peer, values in self._links.items() if any(values)},
        )
        found: list[RankMeasures | None] = [None] * self._ranks
        dist.all_gather_object(found, own)
        return [one for one in found if one is not None]

    def _goes_on(self, started: float) -> bool:
        over = torch.tensor(float(time.monotonic() - started > self._seconds), device=self._device)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        return not over.item()

    def _round(self) -> None:
        figures = self._figures
        dist.barrier()
        figures["matrix products"].append(self._rate(self._multiply, 2 * len(self._matrix) ** 3) / GB)
        figures["clock"].append(self._clock())
        dist.barrier()
        figures["memory"].append(self._rate(self._copy, 2 * self._copied[0].nbytes) / GB)
        if self._is_first_here:
            figures["disk"].append(self._disk())
        for values in self._links.values():
            values.append(None)
        for peer in meetings(self._rank, self._ranks):
            if peer is not None:
                self._links[peer][-1] = self._exchange(peer)
        dist.barrier()
        seconds = timed(self._device, lambda: dist.all_reduce(self._sent))
        figures["all-reduce"].append(2 * (self._ranks - 1) / self._ranks * self._sent.nbytes / seconds / MB)

    def _rate(self, work: Callable[[], object], amount: float) -> float:
        """Returns how much it does a second."""
        settle(self._device)
        started, done = time.perf_counter(), 0.0
        while (taken := time.perf_counter() - started) < self._slice_s or not done:
            work()
            settle(self._device)
            done += amount
        return done / taken

    def _multiply(self) -> None:
        self._matrix @ self._matrix

    def _copy(self) -> None:
        self._copied[0].copy_(self._copied[1])

    def _clock(self) -> float | None:
        """Returns the clock of this rank's device in MHz, right after work; None if it is not known."""
        with contextlib.suppress(Exception):  # no NVML, or no such file
            if self._device.type == "cuda":
                return float(torch.cuda.clock_rate(self._device)) or None
            return psutil.cpu_freq().current or None
        return None

    def _disk(self) -> float | None:
        """Returns how fast a file is written and flushed, in MB/s."""
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self._folder) as file:
            started = time.perf_counter()
            file.write(self._block)
            file.flush()
            os.fsync(file.fileno())
            return DISK_BYTES / (time.perf_counter() - started) / MB
        return None

    def _exchange(self, peer: int) -> float:
        """Sends and receives at once, as an all-reduce of two does; returns the bytes each way, in MB/s."""
        self._swap(peer, 1)  # both are there now
        return self._sent.nbytes / timed(self._device, lambda: self._swap(peer, len(self._sent))) / MB

    def _swap(self, peer: int, count: int) -> None:
        ways = [dist.P2POp(dist.isend, self._sent[:count], peer), dist.P2POp(dist.irecv, self._got[:count], peer)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()


def meetings(rank: int, ranks: int) -> list[int | None]:
    """Returns whom a rank meets, one after the other, so that all meet in pairs at the same time: as in a tournament.

    None: it has a break. Of many ranks, each meets some.
    """
    players = ranks + ranks % 2
    last, turns = players - 1, range(players - 1)
    found: list[int | None] = []
    for turn in turns[:: -(-len(turns) // MOST_MEETINGS) or 1]:
        if rank == last:
            peer = turn * (players // 2) % last
        else:
            peer = (turn - rank) % last
            peer = last if peer == rank else peer
        found.append(peer if peer < ranks else None)
    return found
