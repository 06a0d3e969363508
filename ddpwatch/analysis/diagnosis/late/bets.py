"""Bets against chance: a score that grows while a rank is later than chance explains, whatever noise looks like.

A rank that is like the others is as late as any of them: the place of its residual among theirs is a p-value. A bet on
small ones, ``b * p ** (b - 1)``, wins nothing by chance, on average. So the logarithm of what many bets in a row have
won, never below 0, is a CUSUM: by chance, it exceeds h in fewer than exp(-h) of the steps. Bets of which only a share is
placed win from a rank that is late now and then; those that are placed in the steps of a rhythm, from one that is late
in these.
"""

from __future__ import annotations

from math import exp, log, log1p
from typing import NamedTuple

POWERS = (0.06, 0.2, 0.5)  # of p-values
SHARES = (1.0, 0.5, 0.2, 0.06)  # of what there is, that is placed in each step
RHYTHM_POWER = 0.12
PERIODS = range(2, 17)
FALSE_ALARMS = 5e-6  # per step and group, of all figures
FIGURES = 5  # by which ranks are compared: their lateness, and four phases
RHYTHMS = sum(PERIODS)
BETS = len(POWERS) * len(SHARES)
LEAST_P = 1e-9


class Found(NamedTuple):
    """Since when a score is above 0, by how much it exceeds what chance reaches, and the rhythm that it is of."""

    since: int
    beyond: float
    rhythm: tuple[int, int] | None


def threshold(ranks: int) -> float:
    """Returns which score chance reaches too rarely to matter; half of all bets are on rhythms."""
    return log(2 * FIGURES * ranks / FALSE_ALARMS)


def wins(p: float) -> list[float]:
    """Returns the logarithms of what each bet wins, but for those on rhythms."""
    found, log_p = [], log(p)
    for power in POWERS:
        won = log(power) + (power - 1) * log_p
        found.append(won)
        more = exp(won) - 1
        for share in SHARES[1:]:
            found.append(log1p(share * more))
    return found


def wins_in_rhythm(p: float) -> float:
    """Returns what a bet in a step of a rhythm wins."""
    return log(RHYTHM_POWER) + (RHYTHM_POWER - 1) * log(p)


class Bets:
    """What all bets on one rank have won.

    Attributes:
        history: Steps, and their p-values, since the first of today's winners started.
    """

    __slots__ = ("_rhythms", "_scores", "_since", "history")

    def __init__(self) -> None:
        self._scores = [0.0] * BETS
        self._since = [0] * BETS
        self._rhythms: dict[tuple[int, int], tuple[float, int]] = {}
        self.history: list[tuple[int, float]] = []

    def add_step(self, step: int, p: float) -> bool:
        """Takes a step; returns whether some bet has won so far."""
        self.history.append((step, p))
        scores, since, best = self._scores, self._since, 0.0
        for at, won in enumerate(wins(p)):
            score = scores[at]
            if score <= 0:
                since[at] = step
            scores[at] = score = max(0.0, score + won)
            best = max(best, score)
        won, rhythms = wins_in_rhythm(p), self._rhythms
        for period in PERIODS:
            key = period, step % period
            score, first = rhythms.get(key, (0.0, step))
            if score + won > 0:
                rhythms[key] = score + won, first
            elif score:
                del rhythms[key]
        if len(self.history) > 1024:
            del self.history[:512]
        return best > 0 or bool(rhythms)

    def found(self) -> Found:
        """Returns what stands out most."""
        at = max(range(BETS), key=self._scores.__getitem__)
        best = Found(self._since[at], self._scores[at] - log(BETS), None)
        for key, (score, since) in self._rhythms.items():
            if score - _LOG_RHYTHMS > best.beyond:
                best = Found(since, score - _LOG_RHYTHMS, key)
        return best


_LOG_RHYTHMS = log(RHYTHMS)
