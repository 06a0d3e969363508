"""What is new about incidents: which ones have started and ended since the last look, and what they cost in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddpwatch.analysis.diagnosis.incident import SEVERITIES, Incident, Severity
from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.analysis.diagnosis.standing import Key, key_of
from ddpwatch.analysis.diagnosis.words.lost_time import LEAST_SHARE, seconds_text, share_text
from ddpwatch.analysis.diagnosis.words.wording import ranks_named

ABSENT_NS = 3_000_000_000  # what is gone without being over has ended after that: it may have another explanation


@dataclass(frozen=True, slots=True)
class News:
    """An incident that started, maybe again, that grew worse, that ended, or that was over when it was found."""

    incident: Incident
    what: Literal["started", "again", "worse", "ended", "over"]

    @property
    def needs_step(self) -> bool:
        """True if the next step is to be said: once each time that it comes."""
        return self.what not in ("worse", "ended")

    def text(self, unit: str) -> str:
        """Returns one line; with the cost, in that unit, once it is known for good, and more than nothing."""
        message = message_text(self.incident)
        if self.what in ("started", "again", "worse"):
            return message if self.what == "started" else f"{self.what}: {message}"
        message = f"ended: {message}" if self.what == "ended" else message
        return message if costs_nothing(self.incident) else f"{message}; cost {cost_text(self.incident, unit)}"


class IncidentNews:
    """Compares the incidents of one look with those of the looks before.

    Which is the same one, and when it is over, is what the verdict goes by (`ddpwatch.analysis.diagnosis.standing`).
    """

    def __init__(self) -> None:
        self._ongoing: dict[Key, Incident] = {}
        self._seen_ns: dict[Key, int] = {}  # of these, when they were there last
        self._told: set[tuple[Key, int | None]] = set()  # of those kept, with their first steps

    def take_incidents(self, incidents: Sequence[Incident], at_ns: int) -> list[News]:
        """Returns what is new. ``at_ns`` is the time of the look."""
        ongoing = {key_of(incident): incident for incident in reversed(incidents) if _goes_on(incident)}
        over = [incident for incident in incidents if not _goes_on(incident)]
        if died := {key_of(incident) for incident in incidents if incident.kind == "death"}:  # it may become another's
            self._ongoing = {key: one for key, one in self._ongoing.items() if one.kind != "death" or key in died}
        self._seen_ns |= dict.fromkeys(ongoing, at_ns)
        news = [item for incident in incidents for item in self._take_ongoing(incident, ongoing)]
        news += [item for key in [*self._ongoing] if key not in ongoing for item in self._take_gone(key, over, at_ns)]
        news += [News(incident, "over") for incident in over if _told(incident) not in self._told]
        self._told = {_told(incident) for incident in incidents}
        return news

    def _take_ongoing(self, incident: Incident, ongoing: Mapping[Key, Incident]) -> list[News]:
        key = key_of(incident)
        if ongoing.get(key) is not incident:
            return []
        was = self._ongoing.pop(key, None)
        if was is None and incident.kind == "hang":  # others may turn out to hold it up
            hangs = (other for other, one in self._ongoing.items() if one.kind == "hang" and other not in ongoing)
            was = self._ongoing.pop(next(hangs, key), None)
        self._ongoing[key] = incident if was is None else _as_grave(incident, was.severity)
        if was is None:
            return [News(incident, "again" if _told(incident) in self._told else "started")]
        if SEVERITIES.index(incident.severity) >= SEVERITIES.index(was.severity):
            return []
        return [News(incident, "started" if was.severity == "info" else "worse")]

    def _take_gone(self, key: Key, over: Sequence[Incident], at_ns: int) -> list[News]:
        """Takes what went on and does not any more: it is over, or is not there."""
        before = self._ongoing[key]
        ended = next((one for one in over if _is_end_of(before, one)), None)
        if ended is None and at_ns - self._seen_ns[key] < ABSENT_NS:
            return []
        del self._ongoing[key]
        if ended is not None:
            self._told.add(_told(ended))
        return [News(_as_grave(ended or replace(before, open=False), before.severity), "ended")]


def _goes_on(incident: Incident) -> bool:
    return incident.open or incident.counts


def _told(incident: Incident) -> tuple[Key, int | None]:
    return key_of(incident), incident.since_step


def _as_grave(incident: Incident, as_before: Severity) -> Incident:
    """Returns the incident; what was a warning stays one."""
    return replace(incident, severity=min(as_before, incident.severity, key=SEVERITIES.index))


def _is_end_of(before: Incident, now: Incident) -> bool:
    """Returns whether what is over is what went on before; a hang becomes a pause."""
    if before.kind == "hang" and now.kind == "pause":
        return before.ranks == now.ranks or not now.ranks
    if now.until_step is not None and before.since_step is not None and now.until_step < before.since_step:
        return False
    return key_of(now) == key_of(before)


# -- texts ---------------------------------------------------------------------------------------------------


def message_text(incident: Incident) -> str:
    """Returns what happened, and the cause outside the job."""
    return incident.message + (f" ({incident.device})" if incident.device else "")


def costs_nothing(incident: Incident) -> bool:
    """Returns whether its cost is known, and would be shown as 0."""
    return incident.share is not None and incident.share < LEAST_SHARE


def is_only_counted(kind: Kind, severity: Severity, share: float | None) -> bool:
    """Returns whether lists only count it: an info whose cost would be shown as 0, and not how the run ended."""
    return severity == "info" and kind != "stopped" and share is not None and share < LEAST_SHARE


def cost_text(incident: Incident, unit: str) -> str:
    """Returns ``41 GPU-seconds, 0.8 % of all ranks' time``; of a hang also what is lost in all."""
    text = f"{seconds_text(incident.cost_ns)} {unit}, {share_text(incident.share)} of all ranks' time"
    if (lost := share_with_stuck(incident)) is None:
        return text
    return f"{text}, {share_text(lost)} with that of {ranks_named(incident.ranks)}"


def share_with_stuck(incident: Incident) -> float | None:
    """Returns the share of all ranks' time that a hang loses, with that of who is stuck; None if nobody is."""
    if not (incident.stuck_ns and incident.cost_ns and incident.share):
        return None
    return incident.share * (incident.cost_ns + incident.stuck_ns) / incident.cost_ns


def steps_text(incident: Incident) -> str:
    """Returns ``12–40``; ``12–`` while it is ongoing; a death has one step."""
    since, until = incident.since_step, incident.until_step
    if since is None:
        return "–"
    if incident.open and incident.kind != "death":
        return f"{since}–"
    return f"{since}" if until in (None, since) else f"{since}–{until}"
