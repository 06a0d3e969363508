"""Pauses: single steps that take far longer than others, and what ranks do between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from ddpwatch.analysis.diagnosis.accounts.accounts import PAUSE_PHASES
from ddpwatch.analysis.diagnosis.causes.devices import Denied, DeviceCause, DeviceCauses, because
from ddpwatch.analysis.diagnosis.hangs.held_up import HeldUp
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.late.late_rank import LateRank
from ddpwatch.analysis.diagnosis.late.streak import Streak
from ddpwatch.analysis.diagnosis.rules.tail import Tail
from ddpwatch.analysis.diagnosis.words.wording import place, ranks_named
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.statistics import RollingMedian
from ddpwatch.common.text import in_ms
from ddpwatch.common.units import NS_PER_MS

PAUSE_NS = 250_000_000  # longer than a usual step, at least
WORTH_NS = 5_000_000  # rank-time that a collection costs, on average: less is no warning
LONE_NS = 1_000_000_000  # what others wait for one that does not recur: less is no warning, as a job starts with one
PAUSE_STEPS = 1.5  # in steps, longer than a usual step, at least
WITHIN = 0.25  # a late rank's usual lateness, as a share of a pause: such a pause is part of its incident
WINDOW = 64  # newest steps: what a usual step is
FEWEST = 5  # steps, before anything is judged
KEEP_PAUSES = 256  # the costliest
KEEP_STRUCK = 512  # newest, of a pause that recurs
SAMPLED_NS = 2_000_000_000  # after a stall, for the samples that describe it
TOGETHER = 2  # steps, after a stall: one that comes so soon is part of it
ALIKE = 8  # times as long are collections that recur as one
REGULAR_AFTER = 2  # distances, to call a pause regular
LATE_AGAIN = 2  # times the longest distance so far: what has not come again by then is over
DENIED_SHARE = 0.5  # of a stall, in which the machine did not let the job run: then it is the machine's
PLANNED = frozenset({"checkpoint", "validation", "compilation"})
_NOUNS = {"gc": "garbage collection", "checkpoint": "checkpoint", "compilation": "compilation"}


@dataclass(slots=True)
class _Pause:
    """A pause, or one that recurs. Times in ns.

    Attributes:
        cost_ns: Of those in watched steps. Of others, it is estimated (`whole_cost_ns`).
        seen_ns, unseen_ns: How long a rank's marks lasted in watched steps, and in others.
        unseen_cost_ns: What others waited at most in those.
        span_ns: From start to end of the step of a stall; of one that recurs, from its first to its newest step.
        unusual: Whether it is beyond the tail of the job's other steps.
        denied: Whether the machine did not let the job run for most of it.
        incident: Once somebody asked, until it strikes again.
    """

    ranks: tuple[int, ...]
    phase: str
    since: int
    count: int = 0
    longest_ns: int = 0
    excess_ns: int = 0
    cost_ns: int = 0
    ranks_in_run: int = 1
    bare: bool = False
    seen_ns: int = 0
    unseen_ns: int = 0
    unseen_cost_ns: int = 0
    span_ns: tuple[int, int] = (0, 0)
    device: DeviceCause | Denied | None = None
    unusual: bool = True
    denied: bool = False
    incident: Incident | None = None
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=KEEP_STRUCK))

    def add_step(self, step: int, excess_ns: int, cost_ns: int) -> None:
        self.steps.append(step)
        self.count += 1
        self.longest_ns = max(self.longest_ns, excess_ns)
        self.excess_ns += excess_ns
        self.cost_ns += cost_ns
        self.incident = None

    def add_mark(self, step: int, ns: int, cost_ns: int, *, seen: bool) -> None:
        """Takes what a rank's mark says, and what others waited for it."""
        self.add_step(step, ns, cost_ns if seen else 0)
        if seen:
            self.seen_ns += ns
        else:
            self.unseen_ns += ns
            self.unseen_cost_ns += cost_ns

    @property
    def whole_cost_ns(self) -> int:
        """In a bare step, a mark costs as much of its length as in watched ones."""
        if not self.seen_ns:
            return self.cost_ns + self.unseen_cost_ns
        return self.cost_ns * (self.seen_ns + self.unseen_ns) // self.seen_ns

    @property
    def recurs(self) -> bool:
        """Whether it is a collection that comes again and again."""
        return self.phase == "gc" and self.count > REGULAR_AFTER

    def is_like(self, ns: int) -> bool:
        """Returns whether a mark of that length is one of it: short collections and long ones recur by themselves."""
        mean = self.excess_ns / self.count if self.count else ns
        return self.phase != "gc" or mean / ALIKE <= ns <= ALIKE * mean

    def is_due(self, step: int) -> bool:
        """Returns whether it recurs, and may come again: the time for that is not long over."""
        if not self.recurs:
            return False
        longest = max(after - before for before, after in pairwise(self.steps))
        return step - self.steps[-1] <= LATE_AGAIN * longest

    @property
    def gain(self) -> float | None:
        """By how much a step would be shorter without those that recur, as a share."""
        took = self.span_ns[1] - self.span_ns[0]
        if not self.recurs or took <= 0:
            return None
        return _waited(self) * (self.count - 1) / self.count / took

    def merge(self, other: _Pause) -> None:
        """Takes another one of the same ranks, perhaps in another phase."""
        self.phase = self.phase if self.phase == other.phase else ""
        self.steps.extend(other.steps)
        self.count += other.count
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        self.excess_ns += other.excess_ns
        self.cost_ns += other.cost_ns
        self.span_ns = self.span_ns[0], other.span_ns[1]
        self.unusual = self.unusual or other.unusual
        self.incident = None


class Pauses:
    """Finds pauses as steps come.

    Args:
        devices: What devices did meanwhile.
        held_up: What heartbeats said meanwhile.
    """

    def __init__(self, devices: DeviceCauses, held_up: HeldUp) -> None:
        self._devices = devices
        self._held_up = held_up
        self._durations = RollingMedian(WINDOW)
        self._tail = Tail()
        self._step = 0  # the newest
        self._found: list[_Pause] = []
        self._denied: list[_Pause] = []  # by others on the machine
        self._fresh: deque[_Pause] = deque(maxlen=KEEP_PAUSES)  # stalls of which samples may still come

    def add_step(self, facts: StepFacts, late: Collection[LateRank]) -> None:
        """Takes the next step, and who is late at the moment."""
        longest, self._step = facts.across.longest_ns, facts.across.step
        while self._fresh and facts.split.start_ns > self._fresh[0].span_ns[1] + SAMPLED_NS:
            self._settle(self._fresh.popleft())
        if facts.split.pauses:
            self._add_marked(facts)
        if len(self._durations) >= FEWEST:
            usual = self._durations.median
            excess = int(longest - usual)
            if excess >= max(PAUSE_NS, PAUSE_STEPS * usual):
                self._add_stall(facts, excess, late, unusual=excess > self._tail.end(usual))
            if not facts.split.pauses:  # these have a known reason
                self._tail.add_excess(excess, usual)
        if facts.across.counted or not len(self._durations):
            self._durations.add_value(longest)

    def absorb(self, streak: Streak) -> None:
        """Forgets a rank's pauses that were the first late steps of an incident: those as late as its other steps."""

        def stays(pause: _Pause) -> bool:
            late = pause.ranks == (streak.rank,) and pause.since >= streak.since
            return not (late and streak.typical_ns >= WITHIN * pause.longest_ns)

        self._found, self._denied = list(filter(stays, self._found)), list(filter(stays, self._denied))
        self._fresh = deque(filter(stays, self._fresh), maxlen=KEEP_PAUSES)

    def incidents(self) -> list[Incident]:
        """Returns all that were found."""
        for pause in self._fresh:
            self._explain(pause)
        found = [pause for pause in self._found if pause.whole_cost_ns or not (pause.seen_ns or pause.unseen_ns)]
        for pause in found:
            pause.incident = pause.incident or _incident(pause)
        incidents = [(pause, pause.incident) for pause in found if pause.incident is not None]
        return [replace(one, open=True) if pause.is_due(self._step) else one for pause, one in incidents]

    def _add_marked(self, facts: StepFacts) -> None:
        """Adds what marks explain: of all ranks at once, or of the one that is waited for."""
        step, split = facts.across.step, facts.split
        for phase in PAUSE_PHASES.values():
            paused = {rank: phases[phase] for rank, phases in split.pauses.items() if phases.get(phase)}
            if len(paused) > 1 and len(paused) == len(facts.across):
                most = max(paused.values())
                self._recurring((), phase, facts, most).add_step(step, most, sum(paused.values()))
                continue
            for rank, ns in paused.items():
                others = len(facts.across) - 1
                due = min(ns, split.held_up.get(rank, 0)) if facts.across.counted else ns
                cost = min(split.waits.get(rank, 0), others * due)
                self._recurring((rank,), phase, facts, ns).add_mark(step, ns, cost, seen=facts.across.counted)

    def _add_stall(self, facts: StepFacts, excess: int, late: Iterable[LateRank], unusual: bool) -> None:
        """Adds a single step that took far longer than others, and that no mark explains."""
        if 2 * max((sum(phases.values()) for phases in facts.split.pauses.values()), default=0) >= excess:
            return
        ranks, phase = self._who(facts, excess)
        if any(other.streak.rank in ranks and other.streak.typical_ns >= WITHIN * excess for other in late):
            return
        step = facts.across.step
        cost = _cost(facts, ranks, excess)
        pause = _Pause(ranks, phase, step, ranks_in_run=len(facts.across), bare=not facts.across.counted)
        pause.add_step(step, excess, cost)
        pause.span_ns, pause.unusual = (facts.split.start_ns, facts.split.end_ns), unusual
        before = self._fresh[-1] if self._fresh else None
        if before is not None and before.ranks == ranks and step - before.steps[-1] <= TOGETHER:
            before.merge(pause)
        else:
            self._fresh.append(self._keep(pause))

    def _who(self, facts: StepFacts, excess: int) -> tuple[tuple[int, ...], str]:
        """Returns whose pause it was, empty for no single rank's, and its phase."""
        across = facts.across
        if not across.counted:
            rank = self._held_up.by(across, excess)
            return (() if rank is None else (rank,)), ""
        late = across.skew.late
        rank = max(late, key=late.__getitem__, default=None)
        if rank is not None:
            at_least = late[rank] - across.skew.error
            others = (ns for other, ns in late.items() if other != rank)
            if 2 * at_least >= excess and at_least >= max(others, default=0):
                found = facts.excess(rank, across.skew.peers[rank])
                phase = max(found, key=found.__getitem__, default="")
                return (rank,), phase if found and 2 * found[phase] >= at_least else ""
        return (), _longest_phase(facts, excess)

    def _explain(self, pause: _Pause) -> None:
        """Looks up what devices did meanwhile."""
        rank = pause.ranks[0] if pause.ranks else None
        pause.device = self._devices.cause(rank, *pause.span_ns)
        denied = self._devices.denied(rank, *pause.span_ns, pause.excess_ns)
        pause.denied = denied.ns >= DENIED_SHARE * pause.excess_ns
        if pause.denied and pause.device is None:
            pause.device = denied
        pause.incident = None

    def _settle(self, pause: _Pause) -> None:
        """Looks it up for the last time. What the machine denied again and again is one incident."""
        self._explain(pause)
        if not pause.denied or not any(one is pause for one in self._found):
            return
        if (known := next((one for one in self._denied if one.ranks == pause.ranks), None)) is None:
            self._denied.append(pause)
        else:
            known.merge(pause)
            self._found = [one for one in self._found if one is not pause]

    def _recurring(self, ranks: tuple[int, ...], phase: str, facts: StepFacts, ns: int) -> _Pause:
        """Returns the one that a mark of that length belongs to."""
        split, found = facts.split, (one for one in self._found if one.ranks == ranks and one.phase == phase)
        known = (one for one in found if one.is_like(ns))
        pause = next(known, None)
        if pause is None:
            pause = self._keep(_Pause(ranks, phase, facts.across.step, ranks_in_run=len(facts.across)))
            pause.span_ns = split.start_ns, split.end_ns
        pause.span_ns = pause.span_ns[0], split.end_ns
        return pause

    def _keep(self, pause: _Pause) -> _Pause:
        self._found.append(pause)
        if len(self._found) > KEEP_PAUSES:
            least = min(self._found[:-1], key=lambda found: found.whole_cost_ns)
            self._found.remove(least)
            self._denied = [one for one in self._denied if one is not least]
        return pause


def _cost(facts: StepFacts, ranks: Sequence[int], excess: int) -> int:
    """Returns what the others waited for a rank, or what all ranks spent."""
    across = facts.across
    if not ranks:
        return excess * len(across)
    if across.counted:
        return facts.split.waits.get(ranks[0], 0)
    usual = across.longest_ns - excess
    return sum(max(0, step.duration_ns - usual) for rank, step in across.ranks.items() if rank not in ranks)


def _longest_phase(facts: StepFacts, excess: int) -> str:
    """Returns the phase that all ranks spent most of it in; "" if that is not known."""
    rows = [figures.phases_ns for figures in facts.across.figures.values()]
    spent = {phase: median(row.get(phase, 0) for row in rows) for phase in PHASES if phase != "other"}
    phase = max(spent, key=spent.__getitem__)
    return phase if 2 * spent[phase] >= excess else ""


def _incident(pause: _Pause) -> Incident:
    planned = pause.phase in PLANNED
    usual = not pause.unusual or pause.denied
    period = _regular(pause.steps)
    minor = pause.phase == "gc" and (_mean(pause) < WORTH_NS if pause.recurs else _waited(pause) < LONE_NS)
    incident = Incident(
        kind="intermittent" if pause.recurs else "pause",
        severity="info" if planned or minor or usual else "warning",
        message=_sentence(pause.ranks, pause.phase, pause.since, pause.longest_ns, pause.count),
        ranks=pause.ranks,
        phase=pause.phase,
        since_step=pause.since,
        until_step=pause.steps[-1],
        steps=pause.count,
        struck=tuple(pause.steps) if period is None else (),
        period=period,
        cost_ns=pause.whole_cost_ns,
        gain=pause.gain,
        evidence=Evidence(
            longest_ms=pause.longest_ns / NS_PER_MS,
            ranks=pause.ranks_in_run,
            unwatched=pause.bare or None,
            beyond_tail=pause.unusual if usual else None,
            denied=pause.denied if usual else None,
        ),
    )
    return because(incident, pause.device)


def _sentence(ranks: Sequence[int], phase: str, step: int, longest_ns: int, count: int) -> str:
    """Returns a pause of one rank or of all."""
    who = ranks_named(ranks) if ranks else "every rank"
    what = _NOUNS.get(phase, phase)
    why = f" ({what})" if phase in _NOUNS or phase == "validation" else f" {place(phase)}" if phase else ""
    if count > 1:
        return f"{who} paused {count} times{why}, for up to {in_ms(longest_ns)}"
    return f"{who} paused for {in_ms(longest_ns)}{why} at step {step}"


def _mean(pause: _Pause) -> float:
    return pause.whole_cost_ns / pause.count


def _waited(pause: _Pause) -> float:
    """Returns how long each rank waited for it, or was in it."""
    return pause.whole_cost_ns / max(1, pause.ranks_in_run - len(pause.ranks))


def _regular(steps: Sequence[int]) -> int | None:
    """Returns the distance of steps, if it is always the same."""
    gaps = {after - before for before, after in pairwise(steps)}
    return gaps.pop() if len(steps) > REGULAR_AFTER and len(gaps) == 1 else None


def joined(pauses: Iterable[Incident], hangs: Iterable[Incident]) -> list[Incident]:
    """Makes one incident of a stall that shows in the steps as a pause, and in heartbeats as a hang that is over."""
    found = list(pauses)
    for incident in hangs:
        index = next((at for at, pause in enumerate(found) if _same(pause, incident)), None)
        if index is None:
            found.append(incident)
            continue
        pause = found[index]
        evidence = incident.evidence | pause.evidence
        if pause.ranks or len(incident.ranks) != 1:
            found[index] = replace(pause, evidence=evidence)
        else:
            ranks = pause.evidence.ranks or 1
            found[index] = replace(
                pause,
                message=incident.message,
                ranks=incident.ranks,
                phase=pause.phase or incident.phase,
                cost_ns=pause.cost_ns * (ranks - 1) // ranks,
                evidence=evidence,
            )
    return found


def _same(pause: Incident, hang: Incident) -> bool:
    if hang.kind != "hang" or hang.open or hang.since_step is None or pause.since_step is None:
        return False
    if pause.ranks and hang.ranks and pause.ranks != hang.ranks:
        return False
    first, last = hang.since_step, hang.until_step or hang.since_step
    if pause.kind != "pause":
        return _holds(pause, range(first, last + 1)) and hang.cost_ns <= 2 * _longest_ns(pause)
    if (pause.until_step or pause.since_step) - pause.since_step > pause.steps * TOGETHER:
        return False  # planned ones, which come again
    return first <= pause.since_step <= last


def _holds(recurring: Incident, steps: range) -> bool:
    """Returns whether one of those that recur was in these steps."""
    if recurring.period is None:
        return any(step in steps for step in recurring.struck)
    return any((step - (recurring.since_step or 0)) % recurring.period == 0 for step in steps)


def _longest_ns(pause: Incident) -> float:
    """Returns what the others waited for the longest one, at most."""
    evidence = pause.evidence
    return (evidence.longest_ms or 0.0) * NS_PER_MS * max(1, (evidence.ranks or 0) - len(pause.ranks))
