"""Since when a rank is late: from there on, a late rank is likelier than a clean one by the largest factor."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import NormalDist

SHARES = (0.95, 0.6, 0.35, 0.2, 0.1, 0.05)  # of its steps that may be late; the first one: all
SIZES = (1.0, 0.6)  # how late they may be, as shares of what late steps show: noise picks the latest
GIVEN_UP = 8.0  # by how much the logarithm of the likelihood may fall, further back
LEAST_SCALE = 1 / 8  # of how late it is: noise is never taken to be smaller
LEAST_LIKELY = -50.0  # logarithm: what is less likely is as good as impossible


def onset(values: Sequence[int], late_ns: float, scale_ns: float, noise: Sequence[int], *, always: bool = False) -> int:
    """Returns for how many newest steps a rank is late; 1 if a clean one is likelier.

    Each step since then is late with some probability, by a fixed time, in normal noise. No step counts for more than
    the noise's outliers allow.

    Args:
        values: Its deviations, newest first.
        late_ns: How late it is in a late step.
        scale_ns: The standard deviation of noise.
        noise: Deviations of alike ranks.
        always: Whether it is late in all of these steps, by that time.
    """
    shares, sizes = (SHARES[:1], SIZES[:1]) if always else (SHARES, SIZES)
    best, found = 0.0, 1
    for size in (late_ns * part for part in sizes):
        deviation = max(scale_ns, LEAST_SCALE * size)
        variance, most = deviation**2, _most(size, deviation, noise)
        ratios = [exp(min(most, max(LEAST_LIKELY, size * (value - size / 2) / variance))) for value in values]
        for share in shares:
            score, top, at = 0.0, 0.0, 1
            for count, ratio in enumerate(ratios, 1):
                score += log(1 - share + share * ratio)
                if score > top:
                    top, at = score, count
                elif top - score > GIVEN_UP:
                    break
            if top > best:
                best, found = top, at
    return found


def _most(size: float, deviation: float, noise: Sequence[int]) -> float:
    """Returns the logarithm of how much likelier a late step can be: noise goes there as often as is seen."""
    count = max(1, len(noise))
    as_late = sum(value > size for value in noise) / count
    beyond_normal = sum(value > size / 2 for value in noise) / count - 1 + NormalDist().cdf(size / 2 / deviation)
    return -log(min(0.5, max(1 / count, as_late, beyond_normal)))
