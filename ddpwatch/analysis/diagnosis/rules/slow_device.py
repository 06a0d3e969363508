"""All ranks are slower from a step on: their devices show why, or it is known in which phase.

A job may also change what it does: longer sequences, a larger batch. So a slowdown without a cause is an info, and
after some time that is how the job goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.device_signals import SHORTAGES
from ddpwatch.analysis.diagnosis.causes.devices import LOOK_AGAIN_NS, DeviceCause, DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, Severity
from ddpwatch.analysis.diagnosis.rules.level_shift import KEEP_SPLITS, LevelShift, Spell, Spells
from ddpwatch.analysis.diagnosis.thresholds import LONGER_SHARE
from ddpwatch.analysis.diagnosis.words.wording import longer_than
from ddpwatch.common.statistics import median

_PHASES = {  # a rank's own work
    "forward": "the forward", "backward": "the backward", "optimizer": "the optimizer's step",
    "between": "the gap before the forward", "other": "the rest of the step",
}  # fmt: skip
Phases = Mapping[str, int]  # ns


class SlowDevice(Spells):
    """Finds it as steps come.

    Args:
        devices: What may be why.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        super().__init__(self._longer_ns)
        self._devices = devices
        self._level = LevelShift(1 + LONGER_SHARE)
        self._work: deque[tuple[int, Phases]] = deque(maxlen=KEEP_SPLITS)  # of watched steps

    def _longer_ns(self, split: StepSplit) -> int:
        return max(0, int(split.own_ns - self._level.usual))

    def add_split(self, split: StepSplit, work: Phases | None) -> None:
        """Takes the next step, and what all ranks alike did in it; None if it does not count."""
        if work is not None:
            self._work.append((split.step, work))
            if self._level.add_value(split.step, split.own_ns):
                self.follow(self._level)
                if self.lasting is not None:
                    self.lasting.phase = _grown_phase(self._work, self.lasting.since)
        self.count(split)
        spell = self.lasting
        if spell is not None and spell.cause_by(self._cause, LOOK_AGAIN_NS) is None and spell.count > KEEP_SPLITS:
            spell.is_normal = True
            self.end()
            self._level = LevelShift(1 + LONGER_SHARE)

    def _cause(self, start_ns: int, end_ns: int) -> DeviceCause | None:
        """Returns what devices show that was not there before; notes where cores are short anyway."""
        gain = 0.0 if self.lasting is None else self.lasting.gain
        cause = self._devices.cause(None, start_ns, end_ns, gain)
        if cause is not None and cause.evidence.before is not None:
            return cause
        if self.lasting is not None:
            self.lasting.shortage = self._devices.shortage(None, start_ns, end_ns, gain)
        return None

    def incidents(self) -> list[Incident]:
        """Returns those that are over, and the one that lasts."""
        return [self._incident(spell, is_open) for spell, is_open in self.spells() if spell.cause or spell.phase]

    def _incident(self, spell: Spell, is_open: bool) -> Incident:
        cause, longer = spell.cause, spell.longer
        severity: Severity = "info" if cause is None or cause.evidence.cause in SHORTAGES else "warning"
        sentence = partial(_sentence, longer, "" if cause else spell.phase)
        incident = spell.incident("slow_device", severity, sentence, "" if cause else spell.phase, is_open)
        short = None if spell.shortage is None else spell.shortage.evidence
        evidence = Evidence(longer=longer, stayed=spell.is_normal or None, device=short)
        return because(replace(incident, gain=spell.gain, evidence=evidence), cause)


def _sentence(longer: float, phase: str, is_open: bool) -> str:
    """Says that all ranks are slower from a step on, in which phase above all."""
    are, takes = ("are", "takes") if is_open else ("were", "took")
    place = f", most of it in {_PHASES[phase]}" if phase else ""
    return f"all ranks {are} slower: a step {takes} {longer_than(1 + longer, 'before')}{place}"


def common_work(across: StepAcrossRanks) -> Phases:
    """Returns how long three quarters of the ranks take at least, by phase."""
    spent, found = [one.phases_ns for one in across.figures.values()], dict[str, int]()
    for phase in _PHASES:
        took = sorted([phases.get(phase, 0) for phases in spent])
        found[phase] = took[len(took) // 4] if took else 0
    return found


def _grown_phase(work: Iterable[tuple[int, Phases]], since: int) -> str:
    """Returns the phase that has grown most; empty if ranks did not: some of them, or what other rules watch, did."""
    before, after = ([phases for step, phases in work if (step < since) is early] for early in (True, False))
    if not before or not after:
        return ""
    usual = {phase: median([one[phase] for one in before]) for phase in _PHASES}
    rises = {phase: median([one[phase] for one in after]) - usual[phase] for phase in _PHASES}
    phase = max(rises, key=rises.__getitem__)
    return phase if 2 * rises[phase] >= LONGER_SHARE * sum(usual.values()) else ""
