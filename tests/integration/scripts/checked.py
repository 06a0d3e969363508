"""A check in which rank 1 computes for nothing between products, and no message of rank 2's arrives at once."""

from __future__ import annotations

import os
import sys
import time

from ddpwatch.check.__main__ import main
from ddpwatch.check.measure import RankCheck

multiply, swap = RankCheck._multiply, RankCheck._swap
RANK = int(os.environ["RANK"])


def slow_multiply(check: RankCheck) -> None:
    for _ in range(10):
        multiply(check)


def late_swap(check: RankCheck, peer: int, count: int) -> None:
    if count > 1 and 2 in (RANK, peer):
        time.sleep(0.03)
    swap(check, peer, count)


if RANK == 1:
    RankCheck._multiply = slow_multiply  # type: ignore[method-assign]
RankCheck._swap = late_swap  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
