"""Pauses: single steps that take far longer than others, and what ranks do between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median

from ddpwatch.analysis.diagnosis.accounts import PAUSE_PHASES
from ddpwatch.analysis.diagnosis.cause import COMPARED_PHASES, StepFacts
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.late_rank import LateRank
from ddpwatch.analysis.diagnosis.lateness import find_period
from ddpwatch.analysis.diagnosis.wording import pause_sentence

PAUSE_NS = 250_000_000  # longer than a usual step, at least
PAUSE_STEPS = 1.5  # in steps, longer than a usual step, at least
WITHIN = 0.25  # a late rank's usual lateness, as a share of a pause: such a pause is part of its incident
WINDOW = 64  # newest steps: what a usual step is
FEWEST = 5  # steps, before anything is judged
KEEP_PAUSES = 256  # the costliest
KEEP_STEPS = 512  # newest, of a pause that recurs
PLANNED = frozenset({"checkpoint", "validation", "compilation"})
_RECURRING = frozenset(PAUSE_PHASES.values())


@dataclass(slots=True)
class _Pause:
    """A pause, or one that recurs."""

    ranks: tuple[int, ...]
    phase: str
    since: int
    count: int = 0
    longest_ns: int = 0
    cost_ns: int = 0
    span_ns: int = 0
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=KEEP_STEPS))

    def add(self, step: int, excess_ns: int, cost_ns: int, span_ns: int) -> None:
        self.steps.append(step)
        self.count += 1
        self.longest_ns = max(self.longest_ns, excess_ns)
        self.cost_ns += cost_ns
        self.span_ns += span_ns


class Pauses:
    """Finds pauses as steps come."""

    def __init__(self) -> None:
        self._durations: deque[int] = deque(maxlen=WINDOW)
        self._found: list[_Pause] = []

    def add(self, facts: StepFacts, late: Collection[LateRank]) -> None:
        """Takes the next step, and who is late at the moment."""
        longest = facts.across.longest_ns
        if len(self._durations) >= FEWEST:
            usual = median(self._durations)
            self._add_planned(facts)
            excess = int(longest - usual)
            if excess >= max(PAUSE_NS, PAUSE_STEPS * usual):
                self._add_stall(facts, excess, int(usual), late)
        if facts.across.counted or not self._durations:
            self._durations.append(longest)

    def absorb(self, rank: int, since: int) -> None:
        """Forgets a rank's pauses from a step on: they were the first late steps of an incident."""
        self._found = [pause for pause in self._found if pause.ranks != (rank,) or pause.since < since]

    def incidents(self) -> list[Incident]:
        """All that were found."""
        return [_incident(pause) for pause in self._found]

    def _add_planned(self, facts: StepFacts) -> None:
        """Checkpoints, validations and compilations of all ranks at once: nobody waits for anybody."""
        pauses = facts.split.pauses
        for phase in PLANNED:
            paused = [phases[phase] for phases in pauses.values() if phases.get(phase)]
            if paused and len(paused) == len(facts.across):
                self._recurring((), phase, facts.across.step).add(
                    facts.across.step, max(paused), sum(paused), facts.split.total
                )

    def _add_stall(self, facts: StepFacts, excess: int, usual: int, late: Iterable[LateRank]) -> None:
        ranks, phase = _who(facts, excess)
        if any(other.streak.rank in ranks and other.streak.typical_ns >= WITHIN * excess for other in late):
            return
        if phase in PLANNED and not ranks:
            return  # `_add_planned` has it
        step = facts.across.step
        cost = facts.split.waits.get(ranks[0], 0) if len(ranks) == 1 else excess * len(facts.across)
        recurs = phase in _RECURRING
        pause = self._recurring(ranks, phase, step) if recurs else self._new(ranks, phase, step)
        pause.add(step, excess, cost, facts.split.total)

    def _recurring(self, ranks: tuple[int, ...], phase: str, step: int) -> _Pause:
        known = (pause for pause in self._found if pause.ranks == ranks and pause.phase == phase)
        return next(known, None) or self._new(ranks, phase, step)

    def _new(self, ranks: tuple[int, ...], phase: str, step: int) -> _Pause:
        pause = _Pause(ranks, phase, step)
        self._found.append(pause)
        if len(self._found) > KEEP_PAUSES:
            self._found.remove(min(self._found[:-1], key=lambda found: found.cost_ns))
        return pause


def _who(facts: StepFacts, excess: int) -> tuple[tuple[int, ...], str]:
    """Whose pause it was, empty for no single rank's, and its phase."""
    across, pauses = facts.across, facts.split.pauses
    marked = {rank: max(phases, key=phases.__getitem__) for rank, phases in pauses.items() if phases}
    long = [rank for rank in marked if 2 * pauses[rank][marked[rank]] >= excess]
    if len(long) == len(across):
        return (), marked[long[0]]
    if len(long) == 1:
        return (long[0],), marked[long[0]]
    late = across.skew.late if across.counted else {}
    rank = max(late, key=late.__getitem__, default=None)
    if rank is not None and 2 * late[rank] >= excess:
        found = facts.excess(rank, across.skew.peers[rank])
        phase = max(found, key=found.__getitem__, default="")
        return (rank,), phase if found and 2 * found[phase] >= late[rank] else ""
    return (), _longest_phase(facts, excess)


def _longest_phase(facts: StepFacts, excess: int) -> str:
    """The phase that all ranks spent most of it in; "" if that is not known."""
    if not facts.across.counted:
        return ""
    rows = [figures.phases_ns for figures in facts.across.figures.values()]
    spent = {phase: median(row.get(phase, 0) for row in rows) for phase in (*COMPARED_PHASES, "exposed_comm")}
    phase = max(spent, key=spent.__getitem__)
    return phase if 2 * spent[phase] >= excess else ""


def _incident(pause: _Pause) -> Incident:
    step = pause.steps[-1] if pause.steps else pause.since
    return Incident(
        kind="pause",
        severity="info" if pause.phase in PLANNED else "warning",
        message=pause_sentence(pause.ranks, pause.phase, pause.since, pause.longest_ns, pause.count),
        ranks=pause.ranks,
        phase=pause.phase,
        since_step=pause.since,
        until_step=step,
        steps=pause.count,
        period=find_period(pause.steps, ()) if pause.count >= 4 else None,
        cost_ns=pause.cost_ns,
        evidence={"longest_ms": pause.longest_ns / 1e6},
    )
