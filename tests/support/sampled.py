"""Made-up samples of ranks' stacks."""

from __future__ import annotations

from random import Random
from typing import Any

from ddpwatch.wire.messages import SampledLine, StackSamples

MS = 1_000_000
LOSS = SampledLine("backward", "", "main.py", 20, "main", "graph.py:700 in _engine_run_backward")
CROP = SampledLine("forward", "blocks.2", "data.py", 88, "augment")
CROP_TOO = SampledLine("forward", "blocks.2", "data.py", 90, "augment")
WAIT = SampledLine("sync", "", "main.py", 20, "main")
FEED = SampledLine("input", "", "data.py", 31, "read")


def samples_of(
    rank: int, rows: list[tuple[SampledLine, list[float]]], peer: int | None = 0, **about: Any
) -> StackSamples:
    """The samples of a rank: of each line, ms in each step. A step before and one behind are sampled in part."""
    steps = len(rows[0][1])
    lines = [line for line, _ in rows]
    cells = [(step + 1, at, int(ms[step] * MS)) for step in range(steps) for at, (_, ms) in enumerate(rows) if ms[step]]
    cells = [(0, 0, 3 * MS), *cells, (steps + 1, 0, 900 * MS)]
    total = sum(ns for _, _, ns in cells)
    return StackSamples(
        rank=rank,
        order=about.pop("order", 9),
        explained=about.pop("explained", 3),
        peer=peer,
        start_ns=0,
        end_ns=total,
        count=len(cells),
        longest_ns=40 * MS,
        cpu_ns=total // 200,
        slots=[100 + step for step in range(steps + 2)],
        lines=lines,
        sample_slot=[slot for slot, _, _ in cells],
        sample_line=[line for _, line, _ in cells],
        sample_ns=[ns for _, _, ns in cells],
        **about,
    )


def noisy(mean: float, seed: int, steps: int = 60, spread: float = 0.3) -> list[float]:
    random = Random(seed)
    return [max(0.0, random.gauss(mean, spread * mean)) for _ in range(steps)]


def a_pair(**about: Any) -> list[StackSamples]:
    """Rank 3 spends 61 ms more in `augment`, while rank 0 waits for it."""
    crop = noisy(41, 1)
    here = [(LOSS, noisy(50, 2)), (CROP, crop), (CROP_TOO, noisy(20, 3)), (FEED, noisy(4, 4))]
    there = [(LOSS, noisy(50, 5)), (WAIT, noisy(60, 6)), (FEED, noisy(4, 7))]
    return [samples_of(3, here, **about), samples_of(0, there)]
