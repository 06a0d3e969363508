"""What any test could find: an oracle that knows the rank, the phase, the struck steps and by how much, and the noise.

It compares two hypotheses, "this fault" and "none", by the likelihood of what was watched, and is falsely alarmed as
often as the engine allows itself to be. The engine knows none of that, and looks at every rank after every step. Where
the oracle misses a fault, it is too small for its noise.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ddpwatch.analysis.diagnosis.noise import FALSE_ALARMS

Floats = npt.NDArray[np.float64]

LASTING = 0.25  # correlation of successive steps, from where on the oracle takes it into account
BINS = 8  # classes of shift size
MOST_SAMPLES = 4000
ELSEWHERE = 1e-3  # share of the noise that may lie anywhere, as nobody knows a density's tails


def power(shift: Floats, noise: Floats, rank: int) -> float:
    """The chance that the oracle finds a fault.

    Args:
        shift: By how much each watched step of the rank is later.
        noise: The same steps of all ranks without the fault.
        rank: Which one.
    """
    if not shift.any():
        return 0.0
    if not noise[:, rank].std():
        return 1.0
    own = noise[:, rank] - noise[:, rank].mean()
    kept = float((own[1:] * own[:-1]).sum() / (own * own).sum()) if len(own) > 2 else 0.0
    if kept > LASTING:
        innovations = np.diff(np.concatenate([[0.0], shift])) + (1 - kept) * np.concatenate([[0.0], shift[:-1]])
        strength = float(np.sqrt((innovations**2).sum() / (own.var() * (1 - kept**2))))
        return NormalDist().cdf(strength - _limit())
    return _independent(shift, noise)


def soon(shift: Floats, steps: int) -> Floats:
    """The shift up to so many struck steps."""
    return np.asarray(shift[np.cumsum(shift != 0) <= steps])


def _independent(shift: Floats, noise: Floats) -> float:
    """Of noise that is independent from step to step, by its density."""
    samples = (noise - np.median(noise, axis=0)).ravel()
    samples = samples[:: max(1, len(samples) // MOST_SAMPLES)]
    spread = float(samples.std())
    reach = float(np.abs(samples).max() + np.abs(shift).max() + spread)
    edges = np.linspace(-reach, reach, 4001)
    counts = np.histogram(samples, edges)[0].astype(np.float64)
    width = edges[1] - edges[0]
    deviations = np.arange(-400, 401) * width
    quartiles = np.percentile(samples, [25, 75])
    bandwidth = max(width, 0.9 * min(spread, (quartiles[1] - quartiles[0]) / 1.34) * len(samples) ** -0.2)
    kernel = np.exp(-0.5 * (deviations / bandwidth) ** 2)
    density = np.convolve(counts, kernel / kernel.sum(), "same")
    logs = np.log((1 - ELSEWHERE) * density / density.sum() + ELSEWHERE / len(density))
    middles = (edges[1:] + edges[:-1]) / 2
    struck = shift[shift != 0]
    groups = np.array_split(np.sort(struck), min(BINS, len(struck)))
    with_fault = without = spread_with = spread_without = 0.0
    for group in groups:
        size = float(group.mean())
        usual, later, earlier = (np.interp(samples + by, middles, logs) for by in (0.0, size, -size))
        ratios, ratios_without = usual - later, earlier - usual
        with_fault, without = with_fault + len(group) * ratios.mean(), without + len(group) * ratios_without.mean()
        spread_with += len(group) * float(ratios.var())
        spread_without += len(group) * float(ratios_without.var())
    lead = with_fault - without - _limit() * spread_without**0.5
    return NormalDist().cdf(lead / spread_with**0.5) if spread_with else float(lead > 0)


def _limit() -> float:
    return NormalDist().inv_cdf(1 - FALSE_ALARMS)
