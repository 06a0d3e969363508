"""Ranks with unequal work in each step: another one is last every time, and the others wait for it."""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from operator import attrgetter
from statistics import fmean

from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.rules.level_shift import KEEP_SPLITS, WINDOW, HighShare, Spell
from ddpwatch.analysis.diagnosis.thresholds import COSTLY_SHARE
from ddpwatch.common.statistics import RollingMedian

NEWEST = 2 * WINDOW  # watched steps: whom the others waited for, and how long on average
STALLS = NEWEST // 8  # of these, that may be single stalls: the longest waits
MOST_OF_ONE = 0.75  # of what they waited: more is one rank's doing


class Imbalance:
    """Finds it as steps come. Waits for ranks that are late or paused are not part of it.

    Args:
        devices: What may be why: ranks without cores of their own are last by turns.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self._devices = devices
        self._share = HighShare(COSTLY_SHARE, attrgetter("jitter_ns"))
        self._newest: deque[StepSplit] = deque(maxlen=NEWEST)
        self._shares = RollingMedian(NEWEST)  # of these steps, what ranks wait by turns
        self._sums: Counter[int] = Counter()  # of their waits, by the rank that was waited for
        self._first: deque[tuple[StepSplit, bool]] = deque(maxlen=KEEP_SPLITS)  # before enough are known to judge them

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        split, is_judged = facts.split, facts.across.counted and facts.split.total > 0
        if is_judged:
            if len(self._newest) == NEWEST:
                for rank, ns in self._newest[0].waits.items():
                    self._sums[rank] -= ns
            self._newest.append(split)
            self._shares.add_value(split.jitter_ns / split.total)
            for rank, ns in split.waits.items():
                self._sums[rank] += ns
        self._first.append((split, is_judged))
        if len(self._newest) < NEWEST:
            return
        share = self._usual_share() if self._is_by_turns() else 0.0
        for one, is_judged in self._first:
            self._share.add_split(one, int(share * one.total) if is_judged else None)
        self._first.clear()

    def _usual_share(self) -> float:
        """Returns what ranks wait of a step, by turns."""
        return fmean(self._shares.smallest(NEWEST - STALLS))

    def _is_by_turns(self) -> bool:
        """Returns whether it is not mostly the same rank that the others wait for."""
        return max(self._sums.values(), default=0) <= MOST_OF_ONE * self._sums.total()

    def incidents(self) -> list[Incident]:
        """Returns what lasts, and what is over."""
        return [self._incident(spell, is_open) for spell, is_open in self._share.spells()]

    def _incident(self, spell: Spell, is_open: bool) -> Incident:
        sentence = partial(imbalance_sentence, spell.share)
        # No warning: noise of ranks that share cores does the same.
        found = spell.incident("imbalance", "info", sentence, "", is_open)
        # Nothing else makes ranks late by turns
        return because(found, spell.cause_by(partial(self._devices.shortage, None, share=spell.share)))


def imbalance_sentence(share: float, is_open: bool) -> str:
    """Says that ranks wait for each other by turns."""
    is_last, wait = ("is", "wait") if is_open else ("was", "waited")
    part = f"{100 * share:.0f} % of it"
    return f"imbalance: a different rank {is_last} last in each step; the others {wait} during {part}"
