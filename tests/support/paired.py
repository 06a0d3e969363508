"""Statistics of paired measurements: two kinds of work alternate, and each round gives one ratio between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


def hodges_lehmann(ratios: Sequence[float]) -> Estimate:
    """The median of the averages of all pairs, each value also paired with itself.

    The interval is that of Wilcoxon's signed-rank test, with the normal approximation of its statistic. Of fewer than
    six values it is their whole range.

    Args:
        ratios: One per round; at least one.
    """
    values, count = np.array(ratios), len(ratios)
    averages = np.sort(((values[:, None] + values[None, :]) / 2)[np.triu_indices(count)])
    spread = 1.96 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    low = max(0, math.floor(count * (count + 1) / 4 - spread))
    return Estimate(float(np.median(averages)), float(averages[low]), float(averages[-1 - low]))


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Each value by the reference of its round."""
    return [value / base for value, base in zip(values, reference, strict=True)]
