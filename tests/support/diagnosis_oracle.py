"""What tests could find that know a fault's phase and size, and the noise, and are as seldom wrong as the engine.

By Neyman and Pearson, no test is more powerful than one that compares the likelihoods of what was watched under two
hypotheses, "this fault" and "none":

- *The oracle* knows the rank and the struck steps. What it misses is too small for its noise.
- *The search* does not: its "this fault" is a mixture of all ranks, and of all starts of a constant fault, all rhythms
  of a periodic one, all choices of steps of one at random. Without knowing where to look, nobody finds what it misses.

Neither knows the noise's tails, as nobody does. The engine knows neither phase, size, nor noise, and looks after every
step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddpwatch.analysis.diagnosis.late.bets import FALSE_ALARMS
from tests.support.diagnosis_cases import PERIODS

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

LASTING = 0.25  # correlation of successive steps, from where on a test takes it into account
MOST_SAMPLES = 4000
ELSEWHERE = 1e-3  # share of the noise that may lie anywhere
PLAYS = 1000  # made-up stretches, from which the power of a test is counted


@dataclass(frozen=True)
class Figure:
    """A figure of one rank in its watched steps.

    Attributes:
        shift: By how much the fault raises it, per step.
        noise: The same steps of all ranks without the fault, and maybe others: steps × ranks.
        rank: Which one.
        steps: Their numbers.
    """

    shift: Floats
    noise: Floats
    rank: int
    steps: npt.NDArray[np.int64]

    def until(self, struck: int) -> Figure:
        """The same up to so many struck steps."""
        kept = np.cumsum(self.shift != 0) <= struck
        return Figure(self.shift[kept], self.noise, self.rank, self.steps[kept])


class Powers(NamedTuple):
    """The chances to find a fault, and to find it from its first struck steps: of the oracle, and of the search."""

    knowing: float
    knowing_soon: float
    searching: float
    searching_soon: float


def powers(figures: Iterable[Figure], since: int, periodic: bool, soon: int) -> Powers:
    """By the figure that shows the fault best.

    Args:
        figures: Those that may show it.
        since: The first step that it strikes.
        periodic: It strikes in a rhythm. Otherwise it strikes every step, or some at random.
        soon: How many struck steps are the first ones.
    """
    found = []
    for figure in figures:
        whole, early = (_powers(part, since, periodic) for part in (figure, figure.until(soon)))
        found.append((whole[0], early[0], whole[1], early[1]))
    return Powers(*map(max, zip(*found, strict=True)))


def _powers(figure: Figure, since: int, periodic: bool) -> tuple[float, float]:
    """Of the oracle, and of the search."""
    struck, after = figure.shift != 0, figure.steps >= since
    if not struck.any():
        return 0.0, 0.0
    if not figure.noise[:, figure.rank].std():
        return 1.0, 1.0
    size = float(np.sqrt((figure.shift[struck] ** 2).mean()))
    stretches, ranks = _Stretches(figure.noise, figure.rank, size, struck), figure.noise.shape[1]
    knowing = stretches.power(struck[None], FALSE_ALARMS)
    if struck[after].all():
        patterns = np.triu(np.ones((len(struck), len(struck)), np.bool_))
    elif periodic:
        rhythms = [(period, residue) for period in range(PERIODS[0], PERIODS[1] + 1) for residue in range(period)]
        patterns = np.array([after & ((figure.steps - since) % period == residue) for period, residue in rhythms])
    elif stretches.kept:
        patterns = struck[None]  # of noise that lasts, the mixture is too large: as if the steps were known
    else:
        return knowing, stretches.power_at_random(after, FALSE_ALARMS / ranks)
    return knowing, stretches.power(patterns, FALSE_ALARMS / ranks)


class _Stretches:
    """Made-up stretches of one rank with a fault, to count how often a test finds it.

    A test compares Λ, the ratio of the likelihoods, with a threshold t, so that P(Λ > t) without a fault is what it may
    be wrong in: of n ranks, 1/n of that, as it is one rank whose Λ is large. P(Λ > t) is E[1(Λ > t) / Λ] over stretches
    with faults drawn from the mixture. Noise that lasts is a first-order autoregression; what is new in each step is
    compared.

    Attributes:
        kept: The correlation of successive steps; 0 where that may be chance.
    """

    def __init__(self, noise: Floats, rank: int, size: float, struck: Flags) -> None:
        own = noise[:, rank] - noise[:, rank].mean()
        kept = float((own[1:] * own[:-1]).sum() / (own * own).sum()) if len(own) > 2 else 0.0
        self.kept = kept if kept > LASTING else 0.0
        self._size, self._struck = size, struck
        self._dice = np.random.default_rng(len(struck))
        new = noise[1:] - self.kept * noise[:-1] if self.kept else noise
        samples = (new - np.median(new, axis=0)).ravel()
        self._samples = samples[:: max(1, len(samples) // MOST_SAMPLES)]
        self._middles, self._logs = _density(self._samples, abs(size))

    def power(self, patterns: Flags, alarms: float) -> float:
        """The chance to find the fault, for a test that takes these patterns (each × steps) to be equally likely."""
        drawn = patterns[self._dice.integers(len(patterns), size=PLAYS)]
        parts = self._changes(patterns)
        found = []
        for hit in (np.broadcast_to(self._struck, drawn.shape), drawn):
            values = self._noise() + sum(by * part for by, part in self._changes(hit))
            logs = sum(self._ratios(values, by) @ part.T for by, part in parts)
            found.append(np.logaddexp.reduce(logs, axis=1) - np.log(len(patterns)))
        return _beyond(found[0], found[1], alarms)

    def power_at_random(self, after: Flags, alarms: float) -> float:
        """The same for a test that knows how often the fault strikes, since when, and not in which steps."""
        share = float(self._struck.sum() / after.sum())
        drawn = after & (self._dice.random((PLAYS, len(after))) < share)
        found = []
        for hit in (self._struck, drawn):
            ratios = self._ratios(self._noise() + self._size * hit, self._size)[:, after]
            found.append(np.logaddexp(np.log1p(-share), np.log(share) + ratios).sum(axis=1))
        return _beyond(found[0], found[1], alarms)

    def _noise(self) -> Floats:
        return self._dice.choice(self._samples, (PLAYS, len(self._struck)))

    def _changes(self, patterns: Flags) -> list[tuple[float, Floats]]:
        """By how much what is new in a step is raised, and in which steps of each pattern."""
        if not self.kept:
            return [(self._size, patterns.astype(np.float64))]
        before = np.concatenate([np.zeros_like(patterns[:, :1]), patterns[:, :-1]], axis=1)
        first, going, over = patterns & ~before, patterns & before, ~patterns & before
        sizes = self._size, self._size * (1 - self.kept), -self._size * self.kept
        return [(by, part.astype(np.float64)) for by, part in zip(sizes, (first, going, over), strict=True)]

    def _ratios(self, values: Floats, by: float) -> Floats:
        """How much likelier values are if they are raised by that; logarithms."""
        shifted, usual = (np.interp(at, self._middles, self._logs) for at in (values - by, values))
        return np.asarray(shifted - usual)


def _density(samples: Floats, reach: float) -> tuple[Floats, Floats]:
    """The logarithm of how likely noise is, but for a constant, at values in between: a smoothed histogram."""
    spread = float(samples.std())
    reach += float(np.abs(samples).max() + spread)
    edges = np.linspace(-reach, reach, 4001)
    counts = np.histogram(samples, edges)[0].astype(np.float64)
    width = edges[1] - edges[0]
    quartiles = np.percentile(samples, [25, 75])
    bandwidth = 0.9 * min(spread, (quartiles[1] - quartiles[0]) / 1.34) * len(samples) ** -0.2
    kernel = np.exp(-0.5 * (np.arange(-400, 401) * width / max(width, bandwidth)) ** 2)
    density = np.convolve(counts, kernel / kernel.sum(), "same")
    logs = np.log((1 - ELSEWHERE) * density / density.sum() + ELSEWHERE / len(density))
    return (edges[1:] + edges[:-1]) / 2, np.asarray(logs)


def _beyond(known: Floats, mixed: Floats, alarms: float) -> float:
    """The share of ``known`` beyond the threshold that ``alarms`` allows; ``mixed`` are drawn from the mixture."""
    ordered = np.sort(mixed)[::-1]
    allowed = int(np.searchsorted(np.cumsum(np.exp(-ordered)) / len(ordered), alarms, side="right"))
    return float((known >= ordered[max(0, allowed - 1)]).mean())
