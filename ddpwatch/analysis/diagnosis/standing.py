"""Which incidents count, and which is the same one again: the one place that keeps verdicts from flapping.

Detectors say what is wrong now, and their figures hover around thresholds. So what comes back is the same incident
(`rejoined`), which is over only once it has been away for longer, the oftener it came. And `Standing` remembers: what
counts goes on counting while it lasts, and for some steps after that, as grave as it was; and the verdict stays with
its incident until another one costs clearly more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddpwatch.analysis.diagnosis.incident import SEVERITIES, Evidence, Incident, Severity
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.thresholds import COSTLY_SHARE, EXPOSED_SHARE, OVER_SHARE, WORTH_SAYING

AGAIN = 256  # steps from one spell to the next, up to which they are one incident
HOLD = 32  # watched steps, times its spells, for which what is over still counts: it may come back
MOST_HELD = 4  # spells, with which that grows
AWAY_SHARE = 1 / 16  # of its steps: what has come once, and is away for less, is not over
BRIEF = 8  # steps of a spell: a shorter one does not show a level of its own
ALIKE = 2.0  # times as late is another incident
OUTWEIGHS = 1.5  # times as much of a step is what another incident costs at least, to become the verdict instead
LOOK_NS = 1_000_000_000  # from one look to the next, by the run's own clock
Key = tuple[str, tuple[int, ...], str]


def key_of(incident: Incident) -> Key:
    """Returns what stays the same of an incident that goes and comes: what it is, whose, and where.

    A rank's garbage collections are no spell of its being late by something else.
    """
    if KINDS[incident.kind].late and incident.phase != "gc":
        return "late", incident.ranks, ""
    return incident.kind, incident.ranks, incident.phase


# -- the same one again --------------------------------------------------------------------------------------


def rejoined(incidents: Iterable[Incident], watched: Sequence[int] | None = None) -> list[Incident]:
    """Returns the incidents, those in one that came back within `AGAIN` steps.

    Args:
        incidents: Each spell by itself.
        watched: The newest watched steps, which show whether it has been away for long enough to be over; None if
            nothing will come back, as the run has ended.
    """
    found: list[Incident] = []
    newest: dict[Key, int] = {}
    for incident in sorted(incidents, key=_since):
        at = newest.get(key_of(incident))
        if at is not None and _is_same(found[at], incident):
            found[at] = _joined(found[at], incident)
            continue
        if KINDS[incident.kind].comes_back and incident.since_step is not None:
            newest[key_of(incident)] = len(found)
        found.append(incident)
    if watched is None:
        return found
    return [_rested(incident) if _rests(incident, watched) else incident for incident in found]


def _rests(incident: Incident, watched: Sequence[int]) -> bool:
    """Returns whether it is only away: for less time than it takes to be over, which is more if it came back before."""
    if incident.open or not incident.lasting or incident.evidence.stayed:
        return False
    away = len(watched) - bisect_right(watched, _until(incident))
    return away < (_held(incident) if incident.occurrences > 1 else min(_held(incident), AWAY_SHARE * incident.steps))


def _held(incident: Incident) -> int:
    return HOLD * min(incident.occurrences, MOST_HELD)


def _rested(incident: Incident) -> Incident:
    return replace(incident, open=True, resting=True, message=incident.lasting)


def _since(incident: Incident) -> int:
    return -1 if incident.since_step is None else incident.since_step


def _until(incident: Incident) -> int:
    return _since(incident) if incident.until_step is None else incident.until_step


def _is_same(before: Incident, now: Incident) -> bool:
    """Returns whether it is an earlier one that has come back: as large, as often, in the same phase."""
    if not KINDS[now.kind].comes_back or _since(now) - _until(before) > AGAIN or before.evidence.stayed:
        return False
    if min(before.steps, now.steps) < BRIEF:
        return True
    if (before.kind == "intermittent") != (now.kind == "intermittent"):
        return False
    if before.phase != now.phase and before.phase and now.phase:
        return False
    was, late = before.evidence.late_ms, now.evidence.late_ms
    return was is None or late is None or max(was, late) <= ALIKE * min(was, late)


def _joined(before: Incident, now: Incident) -> Incident:
    """Returns both as one that says what the newer one does; of two that are over, what the costlier one did."""
    shown, other = (now, before) if now.open or now.cost_ns >= before.cost_ns else (before, now)
    struck = (*before.struck, *now.struck) if before.struck and now.struck else ()
    watched = [steps for one in (before, now) if (steps := one.evidence.watched_steps) is not None]
    known = other if not shown.device and other.cost_ns >= shown.cost_ns else shown  # whose cause is that of most
    both = Evidence(watched_steps=sum(watched) if watched else None, device=known.evidence.device)
    return replace(
        shown,
        severity=min(before.severity, now.severity, key=SEVERITIES.index),
        phase=shown.phase or other.phase,
        device=known.device,
        evidence=shown.evidence | both,
        since_step=before.since_step,
        until_step=max(_until(before), _until(now)),
        steps=before.steps + now.steps,
        struck=struck,
        period=before.period if before.period == now.period else None,
        cost_ns=before.cost_ns + now.cost_ns,
        gain=_mean_gain(before, now),
        open=now.open or before.open,
        spells=(*before.spells_or_one, *now.spells_or_one),
    )


def _mean_gain(*parts: Incident) -> float | None:
    """Returns what a step of all spells would be shorter: of longer spells, what counts more."""
    known = [(part.gain, sum(until - since + 1 for since, until in part.spells_or_one)) for part in parts]
    weights = sum(steps for gain, steps in known if gain is not None)
    return sum(gain * steps for gain, steps in known if gain is not None) / weights if weights else None


# -- what counts ---------------------------------------------------------------------------------------------


def is_costly(share: float | None, before: bool = False, least: float = COSTLY_SHARE) -> bool:
    """Returns whether a share of the run, or of a step, is worth a word whatever it is for.

    Args:
        share: None if it is not known.
        before: Whether it was: then it has to fall clearly below.
        least: From where on it is.
    """
    return share is not None and share >= (OVER_SHARE if before else 1.0) * least


def is_worth_saying(incident: Incident) -> bool:
    """Returns whether an incident costs enough to be the verdict: of an info, more is needed."""
    if incident.severity == "info":
        return is_costly(incident.gain) or is_costly(incident.share)
    return incident.gain is None or incident.gain >= WORTH_SAYING


class Standing:
    """What counted at the last look, and as what. Looks are `LOOK_NS` apart, so who asks, and when, changes nothing.

    Attributes:
        costly: Whether lost time was worth a word.
        much: Whether it was worth a warning.
    """

    def __init__(self) -> None:
        self.costly = self.much = False
        self._counted: dict[Key, Severity] = {}
        self._foremost: Key | None = None
        self._next_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Returns whether it is time to look again."""
        return now_ns >= self._next_ns

    def look(
        self, incidents: Sequence[Incident], watched: Sequence[int], lost_share: float | None, now_ns: int
    ) -> None:
        """Takes what is known after the newest ``watched`` steps, and remembers what counts."""
        self._next_ns = now_ns + LOOK_NS
        self.costly, self.much = self.judge_lost(lost_share)
        counting = [incident for incident in self.judged(incidents, watched) if incident.counts]
        self._counted = {key_of(incident): incident.severity for incident in counting}
        now = next((incident for incident in counting if incident.foremost), None)
        others = [incident for incident in counting if now is None or _outweighs(incident, now)]
        if others:
            self._foremost = key_of(max(others, key=urgency))

    def judge_lost(self, share: float | None) -> tuple[bool, bool]:
        """Returns whether so much lost time is worth a word, and a warning."""
        return is_costly(share, self.costly), is_costly(share, self.much, EXPOSED_SHARE)

    def judged(self, incidents: Iterable[Incident], watched: Sequence[int]) -> list[Incident]:
        """Returns the incidents, each with whether it counts, as grave as it was since it does, and which is first."""
        found = [self._one(incident, watched) for incident in incidents]
        alike = [incident for incident in found if incident.counts and key_of(incident) == self._foremost]
        first = max(alike, key=urgency, default=None)
        return [replace(incident, foremost=True) if incident is first else incident for incident in found]

    def _one(self, incident: Incident, watched: Sequence[int]) -> Incident:
        if not _lasts(incident, watched):
            return incident
        key = key_of(incident)
        before = self._counted.get(key)
        if before is None and not is_worth_saying(incident):
            return incident
        severity = incident.severity if before is None else min(before, incident.severity, key=SEVERITIES.index)
        return replace(incident, counts=True, severity=severity)


def _lasts(incident: Incident, watched: Sequence[int]) -> bool:
    """Returns whether it lasts, or was over so few steps ago that it may come back; some harm a run for good."""
    if is_ongoing(incident):
        return True
    held = _held(incident)
    return KINDS[incident.kind].comes_back and (len(watched) <= held or watched[-held - 1] <= _until(incident))


def urgency(incident: Incident) -> tuple[bool, bool, float, float]:
    """Returns what orders incidents that count: errors first, then what goes on, weighs most, or grows fastest."""
    memory = incident.evidence.memory
    grows = 0.0 if memory is None else memory.step_bytes
    return incident.severity == "error", _goes_on(incident), _weight(incident), grows


def is_ongoing(incident: Incident) -> bool:
    """Returns whether an incident lasts, or has harmed the run for good."""
    return incident.open or KINDS[incident.kind].for_good


def _goes_on(incident: Incident) -> bool:
    """Returns whether it is ongoing, or has come back before, and counts as it may do so again."""
    return is_ongoing(incident) or (incident.counts and incident.occurrences > 1)


def _is_general(incident: Incident) -> bool:
    return KINDS[incident.kind].general and not incident.device


def _weight(incident: Incident) -> float:
    """Returns what it costs: of what is over, its share of the run. What says neither who nor why weighs less."""
    costs = (incident.gain, incident.share) if _goes_on(incident) else (incident.share, incident.gain)
    return (costs[0] or costs[1] or 0.0) / (OUTWEIGHS if _is_general(incident) else 1.0)


def _outweighs(other: Incident, now: Incident) -> bool:
    """Returns whether another one becomes the verdict instead: at once if it says more, else if it is clearly more."""
    if (other.severity == "error") != (now.severity == "error"):
        return other.severity == "error"
    if _goes_on(now) and not _goes_on(other):
        return False
    if _says(other) > _says(now):
        return _weight(other) >= _weight(now)
    return _weight(other) > OUTWEIGHS * _weight(now)


def _says(incident: Incident) -> tuple[bool, bool, bool]:
    return _goes_on(incident), not _is_general(incident), incident.severity != "info"
