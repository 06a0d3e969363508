"""All ranks are slower from a step on, and their devices show why.

A job may also change what it does: longer sequences, a larger batch. So a slowdown without a cause is no incident.
"""

from __future__ import annotations

from dataclasses import replace

from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.device_signals import SHORTAGES
from ddpwatch.analysis.diagnosis.causes.devices import LOOK_AGAIN_NS, DeviceCause, DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, Severity
from ddpwatch.analysis.diagnosis.rules.level_shift import KEEP_SPLITS, LevelShift, Spell, Spells
from ddpwatch.analysis.diagnosis.thresholds import LONGER_SHARE


class SlowDevice(Spells):
    """Finds it as steps come.

    Args:
        devices: What may be why.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        super().__init__(self._longer_ns)
        self._devices = devices
        self._level = LevelShift(1 + LONGER_SHARE)

    def _longer_ns(self, split: StepSplit) -> int:
        return max(0, int(split.own_ns - self._level.usual))

    def add_split(self, split: StepSplit, is_judged: bool) -> None:
        """Takes the next step, and whether it counts."""
        if is_judged and self._level.add_value(split.step, split.own_ns):
            self.follow(self._level)
        self.count(split)
        spell = self.lasting
        if spell is not None and spell.cause_by(self._cause, LOOK_AGAIN_NS) is None and spell.count > KEEP_SPLITS:
            self.lasting, self._level = None, LevelShift(1 + LONGER_SHARE)  # that is how the job goes on

    def _cause(self, start_ns: int, end_ns: int) -> DeviceCause | None:
        """Returns what devices show that was not there before."""
        cause = self._devices.cause(None, start_ns, end_ns)
        return None if cause is None or cause.evidence.before is None else cause

    def incidents(self) -> list[Incident]:
        """Returns those that are over, and the one that lasts, of which devices show why."""
        return [
            self._incident(spell, spell.cause, is_open) for spell, is_open in self.spells() if spell.cause is not None
        ]

    def _incident(self, spell: Spell, cause: DeviceCause, is_open: bool) -> Incident:
        longer = spell.cost_ns / spell.count / spell.usual
        severity: Severity = "info" if cause.evidence.cause in SHORTAGES else "warning"
        incident = spell.incident("slow_device", severity, _sentence(longer, is_open), "", is_open)
        incident = replace(incident, gain=1 - 1 / (1 + longer), evidence=Evidence(longer=longer))
        return because(incident, cause)


def _sentence(longer: float, is_open: bool) -> str:
    """Says that all ranks are slower from a step on."""
    are, takes = ("are", "takes") if is_open else ("were", "took")
    return f"all ranks {are} slower: a step {takes} {100 * longer:.0f} % longer than before"
