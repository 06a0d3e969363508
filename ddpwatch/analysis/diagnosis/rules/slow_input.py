"""Slow input: all ranks alike wait for data, or would, had they not waited for one that does.

Of loaders that are slower than the step, one that is a hair slower still takes all the visible waiting: while its rank
is waited for, the others' queues fill up.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from statistics import median

from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.rules.level_shift import WORTH_A_LOOK, HighShare
from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS, INPUT_SHARE

LIKE_WAIT = 0.75  # of the longest wait for data in a step: one of that length shows a loader as slow
SAME_PACE = 0.1  # by which the lengths of two steps may differ, if loaders of the same pace set both


class SlowInput:
    """Finds it as steps come.

    Args:
        devices: What may be why, and which ranks' DataLoaders have workers, which go on while the rank waits.

    Attributes:
        held_by: Ranks that others wait for now, and whose wait for data their own loaders would cost as well.
        waited_ns: Waits for these so far, of all ranks.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self.held_by: frozenset[int] = frozenset()
        self.waited_ns = 0
        self._devices = devices
        self._share = HighShare(INPUT_SHARE, _input)
        self._lengths: deque[float] = deque(maxlen=ENOUGH_STEPS)  # of the newest steps
        self._paces: dict[int, deque[float]] = {}  # by rank, the lengths of steps that waited for its loader

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        split = facts.split
        judged = facts.across.counted and split.total
        common = _common_input(facts) if judged else None
        if judged:
            common = max(common or 0, self._held_input(facts))
        if self.held_by:
            waits = sum(ns for rank, ns in split.waits.items() if rank in self.held_by)
            others = len(facts.across) - len(self.held_by)
            split.held_ns = min(waits, others * split.accounts.get(("input", "data"), 0))
            split.blamed = {*split.blamed, *self.held_by}
            self.waited_ns += split.held_ns
        self._share.add_split(split, common)

    def _held_input(self, facts: StepFacts) -> int:
        """Returns what all ranks alike would wait for data, if none waited for another one that does."""
        waits = {rank: figures.phases_ns.get("data", 0) for rank, figures in facts.across.figures.items()}
        longest, length = max(waits.values()), facts.split.total / len(waits)
        self.held_by = frozenset()
        if longest < INPUT_SHARE * length:
            return 0
        self._lengths.append(length)
        own = {rank for rank, ns in waits.items() if ns >= LIKE_WAIT * longest}
        for rank in own:
            self._paces.setdefault(rank, deque(maxlen=ENOUGH_STEPS)).append(length)
        alike = own | {rank for rank in waits if self._is_as_slow(rank)}
        if 4 * len(alike) < 3 * len(waits):
            return 0
        if all(self._devices.has_workers(rank) for rank in alike):
            self.held_by = frozenset(own)
            return longest * len(waits)
        return 0

    def _is_as_slow(self, rank: int) -> bool:
        """Returns whether steps are as long as when they waited for that rank's loader."""
        paces = self._paces.get(rank, ())
        if len(paces) < ENOUGH_STEPS:
            return False
        pace = median(paces)
        return abs(median(self._lengths) - pace) <= SAME_PACE * pace

    @property
    def lasts(self) -> bool:
        """True while it is an incident."""
        return self._share.lasting is not None

    def incidents(self) -> list[Incident]:
        """Returns what lasts, and what is over."""
        found = self._share.incidents("slow_input", "data", INPUT_SHARE, input_sentence)
        look = partial(self._devices.workers, None)
        causes = [spell.cause_by(look) for spell, _ in self._share.spells()]
        return [because(incident, cause) for incident, cause in zip(found, causes, strict=True)]


def input_sentence(share: float, is_open: bool) -> str:
    """Says that all ranks wait for data."""
    return f"slow input: the loop {'waits' if is_open else 'waited'} for data during {100 * share:.0f} % of a step"


def _input(split: StepSplit) -> int:
    """Returns what ranks waited for data, or for one that did, but for single stalls, which are pauses."""
    return max(0, split.accounts.get(("input", "data"), 0) + split.held_ns - split.stalled_ns)


def _common_input(facts: StepFacts) -> int:
    """Returns what all ranks alike wait for data: three quarters of them at least that long."""
    if _input(facts.split) < WORTH_A_LOOK * facts.split.total:
        return 0
    waits = sorted(figures.phases_ns.get("data", 0) for figures in facts.across.figures.values())
    return waits[len(waits) // 4] * len(waits)
