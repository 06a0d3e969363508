"""Gradients that are reduced more than once per update: each time but the last could be left out (``no_sync``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.rules.level_shift import WINDOW, WORTH_A_LOOK, HighShare
from ddpwatch.analysis.diagnosis.thresholds import COSTLY_SHARE
from ddpwatch.analysis.step import BucketKey


class RepeatedReduction:
    """Finds it as steps come, by the turns in which buckets are reduced."""

    def __init__(self) -> None:
        self._share = HighShare(WORTH_A_LOOK, self.repeated_ns)
        self._newest: deque[tuple[int, int, int]] = deque(maxlen=WINDOW)  # turns; exposed in all, in all but the last
        self._exposed = self._earlier = 0  # the sums of these

    def add_step(self, facts: StepFacts, least: Mapping[BucketKey, int] | None) -> None:
        """Takes the next step, and per bucket what is exposed on the rank that waits least; None if not measured."""
        split = facts.split
        if least:
            self._note_turns(least, facts.across)
        judged = facts.across.counted and split.total and self._newest
        self._share.add_split(split, self.repeated_ns(split) if judged else None)

    def _note_turns(self, least: Mapping[BucketKey, int], across: StepAcrossRanks) -> None:
        turns = 1 if _needs_each(across) else 1 + max((key[2] for key in least if not key[4]), default=0)
        earlier = sum([ns for key, ns in least.items() if not key[4] and key[2] < turns - 1])
        if len(self._newest) == WINDOW:
            _, exposed, before = self._newest[0]
            self._exposed -= exposed
            self._earlier -= before
        exposed = sum(least.values())
        self._newest.append((turns, exposed, earlier))
        self._exposed += exposed
        self._earlier += earlier

    @property
    def is_usual(self) -> bool:
        """True if most of the newest full steps reduce more than once."""
        return 2 * sum([turns > 1 for turns, *_ in self._newest]) > len(self._newest)

    def repeated_ns(self, split: StepSplit) -> int:
        """Returns how much of a step's transfers is that of reductions which another one follows."""
        return split.transfer_ns * self._earlier // self._exposed if self._exposed else 0

    def incidents(self) -> list[Incident]:
        """Returns what lasts, and what is over."""
        turns = max((turns for turns, *_ in self._newest), default=1)
        sentence, evidence = partial(repeated_sentence, turns), Evidence(reductions=turns)
        found = self._share.incidents("repeated_reduction", "exposed_comm", COSTLY_SHARE, sentence)
        return [replace(incident, evidence=incident.evidence | evidence) for incident in found]


def _needs_each(across: StepAcrossRanks) -> bool:
    """Returns whether an optimizer calls its closure several times, which needs reduced gradients each time."""
    phases = [span.phase for span in next(iter(across.ranks.values())).spans]
    return "optimizer" in phases and phases[phases.index("optimizer") :].count("backward") > 1


def repeated_sentence(turns: int, share: float, is_open: bool) -> str:
    """Says how often gradients are reduced per update, and what all but the last time takes."""
    are, take = ("are", "take") if is_open else ("were", "took")
    earlier = "transfers of the first time" if turns == 2 else f"transfers of the first {turns - 1} times"
    return f"gradients {are} reduced {turns} times per update: {earlier} {take} {100 * share:.0f} % of a step"
