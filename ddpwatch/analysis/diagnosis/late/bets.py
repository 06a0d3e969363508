"""Bets against chance: capital that grows while a rank is later than chance explains, whatever noise looks like.

A rank that is like the others is as late as any of them: the place of its residual among theirs is a p-value. A bet on
small ones wins nothing by chance, on average: it pays by how much likelier such a p-value is if the rank is late by so
many standard deviations. One unit is staked in each step, and all that it wins is staked again in the next (the
procedure of Shiryaev and Roberts). So by chance, capital is as many units as there were steps, on average, and exceeds
A in fewer than one of A steps. Bets of which only a share is placed win from a rank that is late now and then; those
that are placed in the steps of a rhythm, from one that is late in these.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from operator import mul
from statistics import NormalDist

SHIFTS = (0.7, 1.4, 2.8)  # standard deviations by which a rank may be late; in between, little is lost
SHARES = (0.95, 0.5, 0.2, 0.06)  # of the steps, in which it may be late; the first one: all, but for outliers
PERIODS = range(2, 17)
FALSE_ALARMS = 1e-5  # per step and group, of all figures and ranks: so much chance may name in clean steps
WATCHED_PHASES = ("data", "between", "forward", "backward")  # by which ranks are compared, besides their lateness
BETS = len(SHIFTS) * len(SHARES)
LEAST_P, MOST_P = 1e-9, 0.999
MOST = 1e100  # capital
END = 6.0  # by how much the logarithm of what a bet has won may fall, until what it was placed on is over
# What a step stakes: half on a rank that is late in every step, a quarter on one that is now and then, or in a rhythm.
STAKES = (1 / 2 / len(SHIFTS), *[1 / 4 / len(SHIFTS) / (len(SHARES) - 1)] * (len(SHARES) - 1)) * len(SHIFTS)
RHYTHM_STAKE = 1 / 4 / len(PERIODS)
_NORMAL = NormalDist()


def threshold(ranks: int) -> float:
    """Returns which capital chance reaches too rarely to matter."""
    return (1 + len(WATCHED_PHASES)) * ranks / FALSE_ALARMS


def wins(p: float) -> list[float]:
    """Returns by what factor each bet multiplies what is placed."""
    found, deviations = [], -_NORMAL.inv_cdf(min(max(p, LEAST_P), MOST_P))
    for shift in SHIFTS:
        more = exp(shift * (deviations - shift / 2)) - 1
        for share in SHARES:
            found.append(1 + share * more)
    return found


def always_late(factors: list[float]) -> float:
    """Returns what the bets win that a rank is late in every step, on average: by how much is not known."""
    return sum(factors[:: len(SHARES)]) / len(SHIFTS)


def onset(steps: Sequence[int], chances: Sequence[float], rhythm: tuple[int, int] | None) -> int:
    """Returns for how many of these steps, newest first, a rank is late: some bet would have won most by then.

    Args:
        steps: Their numbers.
        chances: The rank's p-values in them.
        rhythm: What names it, if that is a period and a residue.
    """
    factors = list(map(wins, chances))
    won = [list(map(log, column)) for column in zip(*factors, strict=True)]
    if rhythm is not None:
        struck = (step % rhythm[0] == rhythm[1] for step in steps)
        won = [[log(always_late(row)) * late for row, late in zip(factors, struck, strict=True)]]
    best, found = 0.0, 1
    for column in won:
        score = top = 0.0
        at = 1
        for count, gain in enumerate(column, 1):
            score += gain
            if score > top:
                top, at = score, count
            elif top - score >= END:
                break
        if top > best:
            best, found = top, at
    return found


class Bets:
    """All bets on one rank, and what they have won."""

    __slots__ = ("_capital", "_rhythms")

    def __init__(self) -> None:
        self._capital = [0.0] * BETS
        self._rhythms: dict[tuple[int, int], float] = {}  # by period and residue

    def add_step(self, step: int, p: float) -> bool:
        """Takes a step; returns whether some bet has won so far."""
        factors = wins(p)
        fresh = always_late(factors)
        self._add_in_rhythms(step, fresh)
        fresh = fresh if fresh > 1 else 0.0  # nobody bets on a rank in a step in which it is on time
        self._capital = [min(own * factor + fresh, MOST) for own, factor in zip(self._capital, factors, strict=True)]
        return max(self._capital) > 1 or bool(self._rhythms)

    def _add_in_rhythms(self, step: int, factor: float) -> None:
        rhythms = self._rhythms
        for period in PERIODS:
            key = period, step % period
            capital = rhythms.get(key, 0.0)
            if (won := (capital + 1) * factor) > 1:
                rhythms[key] = min(won, MOST)
            elif capital:
                del rhythms[key]

    def won(self) -> tuple[float, tuple[int, int] | None]:
        """Returns what all have, and the rhythm that the best one is of."""
        staked = list(map(mul, self._capital, STAKES))
        total, rhythm = sum(staked), None
        if self._rhythms:
            total += RHYTHM_STAKE * sum(self._rhythms.values())
            best = max(self._rhythms, key=self._rhythms.__getitem__)
            rhythm = best if RHYTHM_STAKE * self._rhythms[best] > max(staked) else None
        return total, rhythm
