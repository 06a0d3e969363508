"""Slow input: all ranks alike wait for data."""

from __future__ import annotations

from functools import partial

from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.rules.level_shift import WORTH_A_LOOK, HighShare
from ddpwatch.analysis.diagnosis.thresholds import INPUT_SHARE


class SlowInput:
    """Finds it as steps come.

    Args:
        devices: What may be why.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self._devices = devices
        self._share = HighShare(INPUT_SHARE, _input)

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        judged = facts.across.counted and facts.split.total
        self._share.add_split(facts.split, _common_input(facts) if judged else None)

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
    """Returns what ranks waited for data, but for single stalls, which are pauses."""
    return max(0, split.accounts.get(("input", "data"), 0) - split.stalled_ns)


def _common_input(facts: StepFacts) -> int:
    """Returns what all ranks alike wait for data: three quarters of them at least that long."""
    if _input(facts.split) < WORTH_A_LOOK * facts.split.total:
        return 0
    waits = sorted(figures.phases_ns.get("data", 0) for figures in facts.across.figures.values())
    return waits[len(waits) // 4] * len(waits)
