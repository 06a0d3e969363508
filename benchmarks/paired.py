"""What paired measurements say: the middle of their ratios, and between what it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def middle(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The Hodges-Lehmann median and its 95 % interval, both from the averages of all pairs.

    The interval is that of Wilcoxon's signed-rank test, with the normal approximation of its statistic.
    """
    values, count = np.array(ratios), len(ratios)
    averages = np.sort(((values[:, None] + values[None, :]) / 2)[np.triu_indices(count)])
    spread = 1.96 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    low = max(0, math.floor(count * (count + 1) / 4 - spread))
    return float(np.median(averages)), float(averages[low]), float(averages[-1 - low])
