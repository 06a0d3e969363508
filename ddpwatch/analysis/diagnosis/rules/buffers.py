"""Buffers that DDP sends from rank 0 before each forward, which no compute hides."""

from __future__ import annotations

from operator import attrgetter

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.rules.level_shift import WORTH_A_LOOK, HighShare
from ddpwatch.analysis.diagnosis.thresholds import COSTLY_SHARE


class Buffers:
    """Finds it as steps come."""

    def __init__(self) -> None:
        self._share = HighShare(WORTH_A_LOOK, attrgetter("buffers_ns"))

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        judged = facts.across.counted and facts.split.total
        self._share.add_split(facts.split, facts.split.buffers_ns if judged else None)

    def incidents(self) -> list[Incident]:
        """Returns what lasts, and what is over."""
        return self._share.incidents("buffers", "exposed_comm", COSTLY_SHARE, buffers_sentence)


def buffers_sentence(share: float, is_open: bool) -> str:
    """Says that buffers are sent before each forward."""
    sends, takes = ("sends", "takes") if is_open else ("sent", "took")
    return f"buffers: DDP {sends} them before each forward, which {takes} {100 * share:.0f} % of a step"
