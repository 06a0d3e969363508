"""Buffers that DDP sends from rank 0 before each forward, which no compute hides."""

from __future__ import annotations

from operator import attrgetter

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.rules.high_share import WORTH_A_LOOK, HighShare
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
        return [
            spell.incident(
                "buffers",
                "warning" if spell.share >= COSTLY_SHARE else "info",
                buffers_sentence(spell.share, is_open),
                "exposed_comm",
                is_open,
            )
            for spell, is_open in self._share.spells()
        ]


def buffers_sentence(share: float, is_open: bool) -> str:
    """Says that buffers are sent before each forward."""
    sends, takes = ("sends", "takes") if is_open else ("sent", "took")
    return f"buffers: DDP {sends} them before each forward, which {takes} {100 * share:.0f} % of a step"
