"""Pauses: single steps that take far longer than others, and what ranks do between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts.accounts import AccountKey, Ledger, account_of, own_times
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses, because
from ddpwatch.analysis.diagnosis.hangs.call_stack import CallStack, call_stack
from ddpwatch.analysis.diagnosis.hangs.held_up import HeldUp
from ddpwatch.analysis.diagnosis.hangs.stall import EARLY, Worked
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.late.late_rank import LateRank
from ddpwatch.analysis.diagnosis.late.streak import Streak
from ddpwatch.analysis.diagnosis.rules.recurring import Pause, with_pause
from ddpwatch.analysis.diagnosis.rules.tail import Tail
from ddpwatch.analysis.diagnosis.thresholds import OVER_SHARE
from ddpwatch.analysis.diagnosis.words.wording import PAUSE_NOUNS, place, ranks_named
from ddpwatch.analysis.step import PHASES, STALL_NS, STALL_STEPS
from ddpwatch.common.statistics import RollingMedian
from ddpwatch.common.text import in_ms
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.sampling.levels import PROFILED
from ddpwatch.wire.messages import PAUSE_PHASES, Stack

WORTH = 0.01  # of a step, that collections cost which recur: less is no warning
SHOWN_NS = 5_000_000  # what others wait for marks that do not recur: less is shown as 0 seconds
LONE_NS = 1_000_000_000  # what others wait for one that does not recur: less is no warning, as a job starts with one
WITHIN = 0.25  # a late rank's usual lateness, as a share of a pause: such a pause is part of its incident
WINDOW = 64  # newest steps: what a usual step is
FEWEST = 5  # steps, before anything is judged
KEEP_PAUSES = 256  # the costliest
SAMPLED_NS = 2_000_000_000  # after a stall, for the samples that describe it
TOGETHER = 2  # steps, after a stall: one that comes so soon is part of it
DENIED_SHARE = 0.5  # of a stall, in which the machine did not let the job run: then it is the machine's
LONGER = 1.5  # times what all ranks pause, at least: then they wait for that one
SHORT = 0.25  # of the longest rank's pause: less is no pause of all
PLANNED = frozenset({"checkpoint", "validation", "compilation"})


class Whose(NamedTuple):
    """Whose a stall was.

    Attributes:
        ranks: One, or empty for no single rank's.
        cost_ns: What the others waited for it, or what all ranks spent.
        taken_ns: What of that an account has only since this is known, or does not have yet.
    """

    ranks: tuple[int, ...]
    phase: str
    cost_ns: int
    taken_ns: int = 0


class LongStep(NamedTuple):
    """A step that took far longer than others.

    Attributes:
        excess: By how much (ns).
        late: Who was late then.
        unusual: Whether that is beyond the tail of the job's other steps.
    """

    facts: StepFacts
    excess: int
    late: tuple[LateRank, ...]
    unusual: bool


class Pauses:
    """Finds pauses as steps come.

    Args:
        devices: What devices did meanwhile.
        held_up: What heartbeats said meanwhile.
        ledger: Where a stall's time belongs, once it is known what it was.
    """

    def __init__(self, devices: DeviceCauses, held_up: HeldUp, ledger: Ledger) -> None:
        self._devices = devices
        self._held_up = held_up
        self._ledger = ledger
        self._durations = RollingMedian(WINDOW)
        self._tail = Tail()
        self._step = 0  # the newest
        self._lags: dict[int, int] | None = None  # by how much ranks began later than the first, until they caught up
        self._stacks: dict[int, CallStack] = {}  # the newest of each rank
        self._found: list[Pause] = []
        self._fresh: deque[Pause] = deque(maxlen=KEEP_PAUSES)  # stalls of which samples may still come
        self._shorter: deque[LongStep] = deque(maxlen=WINDOW)  # too short by themselves, but not if one recurs so

    def add_step(self, facts: StepFacts, late: Collection[LateRank]) -> None:
        """Takes the next step, and who is late at the moment."""
        longest, self._step = facts.across.longest_ns, facts.across.step
        self._note_lags(facts.across)
        while self._fresh and facts.split.start_ns > self._fresh[0].span_ns[1] + SAMPLED_NS:
            self._settle(self._fresh.popleft())
        if facts.split.delays:
            self._add_marked(facts)
        if len(self._durations) >= FEWEST:
            usual = self._durations.median
            excess, least = int(longest - usual), max(STALL_NS, STALL_STEPS * usual)
            if excess >= OVER_SHARE * least and not _is_profiled(facts.across):
                stall = LongStep(facts, excess, tuple(late), excess > self._tail.end(usual))
                if excess >= least:
                    self._add_stall(stall)
                else:
                    self._shorter.append(stall)
                self._add_shorter()
            if not facts.split.marked_ns:  # these have a known reason
                self._tail.add_excess(excess, usual)
        if facts.across.counted or not len(self._durations):
            self._durations.add_value(longest)

    def add_stack(self, stack: Stack) -> None:
        """Takes where a rank was in a pause."""
        if (found := call_stack(stack)) is not None:
            self._stacks[stack.rank] = found

    def absorb(self, streak: Streak) -> None:
        """Forgets a rank's pauses that were the first late steps of an incident: those as late as its other steps."""

        def stays(pause: Pause) -> bool:
            late = pause.ranks == (streak.rank,) and pause.since >= streak.since
            return not (late and streak.typical_ns >= WITHIN * pause.longest_ns)

        self._found = list(filter(stays, self._found))
        self._fresh = deque(filter(stays, self._fresh), maxlen=KEEP_PAUSES)

    def is_pausing(self, streak: Streak) -> bool:
        """Returns whether a rank pauses where it is late, for about as long as it typically is.

        In half of its late steps, at least, without the newest: whether it pauses there is not known yet.
        """
        own = [pause for pause in (*self._found, *self._fresh) if pause.ranks == (streak.rank,)]
        if streak.constant or not own:
            return False
        paused = {step for pause in own if pause.is_like(streak.typical_ns) for step in pause.starts}
        before = set(streak.struck[:-1])
        return bool(before) and 2 * len(before & paused) >= len(before)

    def incidents(self) -> list[Incident]:
        """Returns all that were found."""
        found = self._known()
        stalls = {(pause.ranks, step) for pause in found if not pause.is_marked for step in pause.starts}
        found = [part for pause in found if not _is_trifle(pause, stalls) for part in pause.apart()]
        for pause in found:
            pause.incident = pause.incident or _incident(pause)
        incidents = [(pause, pause.incident) for pause in found if pause.incident is not None]
        return [replace(one, open=True) if pause.is_due(self._step) else one for pause, one in incidents]

    def waited(self) -> list[tuple[int, AccountKey]]:
        """Returns by how much longer ranks waited for one than stalls said by themselves (ns): see `Pause.waited`."""
        return [waited for pause in self._known() for waited in pause.waited()]

    def spent(self) -> list[tuple[int, AccountKey]]:
        """Returns how long ranks were in stalls that no mark explains (ns), by the account that has it."""
        return [spent for pause in self._known() for spent in pause.spent()]

    def _known(self) -> list[Pause]:
        found = self._found
        for pause in self._fresh:
            self._explain(pause)
            found = with_pause(found, pause)
        return found

    def _add_marked(self, facts: StepFacts) -> None:
        """Adds what marks explain: of all ranks at once, or of the one that is waited for."""
        step, split = facts.across.step, facts.split
        for phase in PAUSE_PHASES.values():
            paused = {rank: phases[phase] for rank, phases in split.delays.items() if phases.get(phase)}
            paused, common_ns = self._apart(paused, phase, facts)
            for rank, ns in paused.items():
                others = len(facts.across) - 1
                due = min(ns, split.held_up.get(rank, 0)) if facts.across.counted else ns
                cost = min(split.waits.get(rank, 0), others * due)
                pause = self._recurring((rank,), phase, facts, ns, common_ns)
                pause.add_mark(step, ns, cost, seen=facts.across.counted)

    def _apart(self, paused: dict[int, int], phase: str, facts: StepFacts) -> tuple[dict[int, int], int]:
        """Adds what all ranks pause alike; returns what single ones pause besides, and how long all do (ns)."""
        if len(paused) < 2 or len(paused) < len(facts.across):
            return paused, 0
        most, common = max(paused.values()), sorted(paused.values())[(len(paused) - 1) // 2]
        longer = {rank: ns for rank, ns in paused.items() if ns >= LONGER * common}
        if not longer:
            common = most
        elif common < SHORT * most:  # as of a checkpoint to which the others only add their random states
            return longer, 0
        cost = sum(min(ns, common) for ns in paused.values())
        self._recurring((), phase, facts, common).add_step(facts.across.step, common, cost)
        return {rank: ns - common for rank, ns in longer.items()}, common

    def _add_shorter(self) -> None:
        """Adds the stalls below the limit, earlier ones too, that keep time with a pause that recurs, and are alike."""
        if not self._shorter:
            return
        for known in [pause for pause in self._known() if pause.recurs and not pause.is_marked]:
            for stall in [stall for stall in self._shorter if known.keeps_time(stall.facts.across.step, stall.excess)]:
                self._shorter.remove(stall)
                self._add_stall(stall, known)

    def _add_stall(self, stall: LongStep, known: Pause | None = None) -> None:
        """Adds what no mark explains of a single step that took far longer than others, if it is what is known."""
        facts, excess, late, unusual = stall
        marked = facts.split.marked_ns
        if 2 * marked >= excess:
            return
        alike = _alike(facts, excess)
        launched = self._who_launched_late(facts, excess, alike) if facts.across.counted else None
        ranks, phase, cost, taken = launched or self._who(facts, excess)
        if any(2 * (self._lags or {}).get(rank, 0) >= excess for rank in ranks):
            self._ledger.count_as_startup(ranks[0], cost)
            return
        if unusual and phase == "data" and not ranks:
            facts.split.stalled_ns = cost
        if any(other.streak.rank in ranks and other.streak.typical_ns >= WITHIN * excess for other in late):
            return
        step = facts.across.step
        pause = Pause(ranks, phase, step, ranks_in_run=len(facts.across), bare=not facts.across.counted)
        pause.add_step(step, excess - marked, cost * (excess - marked) // excess)
        pause.span_ns, pause.unusual = (facts.split.start_ns, facts.split.end_ns), unusual
        stacks = self._stacks_in(facts.across)
        pause.stacks = [(rank, stack.calls) for rank, stack in stacks.items() if not stack.in_collective]
        spent = excess - marked if ranks else cost * (excess - marked) // excess
        if launched is None:
            of_phase = phase in PLANNED or (pause.bare and phase)
            key = account_of(phase) if of_phase else facts.split.taken_for
            (pause.taken if ranks else pause.shared)[key] = taken
            left = facts.split.accounts.get(facts.split.taken_for, 0) - (taken if ranks else 0)
            if ranks and phase not in PLANNED:  # what is not the others' is where it was
                key = facts.split.taken_for
            if ranks and 2 * left < spent:  # perhaps a bare one that is split like a watched stall
                key = facts.split.largest
                left = facts.split.accounts.get(key, 0)
            self._note_worked(pause, facts, excess, stacks)
        else:
            pause.add_alike(excess - marked, alike * (excess - marked) // excess)
            key = account_of(phase) if phase else facts.split.taken_for
            left, spent = facts.split.accounts.get(key, 0), spent + alike * (len(facts.across) - len(ranks))
            pause.worked = Worked(alike, alike or None)  # also where that is not timed, once it comes again
        if 2 * left >= spent:  # else it was communication
            pause.own[key] = min(spent, left)
        if known is not None and not known.is_again(pause):
            return
        before = self._fresh[-1] if self._fresh else None
        if before is not None and before.ranks == ranks and 0 <= step - before.until <= TOGETHER:
            before.merge(pause, again=False)
        else:
            self._fresh.append(pause)

    def _note_worked(self, pause: Pause, facts: StepFacts, excess: int, stacks: Mapping[int, CallStack]) -> None:
        """Notes who was behind in a stall of which no launch shows that, and what the others did before they waited."""
        rank, stall = pause.ranks[0] if pause.ranks else None, self._held_up.stall(facts.across, excess)
        if rank is None and pause.phase != "data" and (rank := stall.behind()) is not None:
            pause.behind[rank] += 1
        late = tuple(facts.across.ranks) if rank is None else (rank,)
        pause.untimed, pause.worked = 1, stall.worked(late, stacks, facts.split.marked_until)

    def _note_lags(self, across: StepAcrossRanks) -> None:
        """Notes which ranks began later than the first one, and which have caught up: others wait for them once."""
        if self._lags == {}:
            return
        starts = {rank: across.start_of(rank) for rank in across.members} if across.comparable else {}
        lags = {rank: at - across.start_ns for rank, at in starts.items()}
        if self._lags is None:
            self._lags = {rank: lag for rank, lag in lags.items() if lag >= STALL_NS}
        else:
            self._lags = {rank: lag for rank, lag in self._lags.items() if 2 * lags.get(rank, 0) >= lag}

    def _stacks_in(self, across: StepAcrossRanks) -> dict[int, CallStack]:
        """Returns where ranks were in a step, as far as that is known."""
        steps = ((rank, self._stacks.get(rank), step) for rank, step in across.ranks.items())
        return {
            rank: stack
            for rank, stack, step in steps
            if stack is not None and step.start_ns <= stack.at_ns <= step.start_ns + step.duration_ns
        }

    def _outside(self, across: StepAcrossRanks) -> int | None:
        """Returns the only rank that was in no collective, if all others were in one."""
        stacks = self._stacks_in(across)
        found = [rank for rank, stack in stacks.items() if not stack.in_collective]
        return found[0] if len(found) == 1 and len(stacks) == len(across) > 1 else None

    def _who(self, facts: StepFacts, excess: int) -> Whose:
        """Returns whose pause it was if no launch shows that."""
        across = facts.across
        if _all_wait_for_data(facts, excess):
            return Whose((), "data", excess * len(across), excess * len(across))
        bare, usual = not across.counted, across.longest_ns - excess
        all_wait = bare and self._held_up.doing(across, tuple(across.ranks), excess) == "data"
        rank = None if all_wait else self._held_up.by(across, excess, self._ledger.gaps)
        rank = self._outside(across) if rank is None and not all_wait else rank
        ranks = across.ranks if rank is None else (rank,)
        phase = _longest_phase(facts, excess) if across.counted and rank is None else ""
        phase = self._held_up.doing(across, tuple(ranks), excess) or phase
        took = {other: max(0, int(step.duration_ns - usual)) for other, step in across.ranks.items() if other != rank}
        source, taken = facts.split.taken_for, excess * len(took)
        if rank is not None or (bare and phase):
            known = 0 if rank is None else facts.split.waits.get(rank, 0)  # of a bare one, as the stall that it is like
            moved = self._ledger.reassign(max(0, sum(took.values()) - known), source, phase, rank)
            taken = taken if rank is None else moved
        elif phase in PLANNED:
            self._ledger.reassign(min(sum(took.values()), facts.split.accounts.get(source, 0)), source, phase, None)
        if rank is not None and phase in PLANNED:
            self._ledger.reassign(excess, source, phase, None)
        if rank is None:
            return Whose((), phase, taken, taken)
        return Whose((rank,), phase, sum(took.values()), taken)

    def _who_launched_late(self, facts: StepFacts, excess: int, alike: int) -> Whose | None:
        """Returns that of the rank that launched late in a watched step, by most of what not all took alike."""
        across, late = facts.across, facts.across.skew.late
        rank = max(late, key=late.__getitem__, default=None)
        if rank is not None:
            at_least = late[rank] - across.skew.error
            others = (ns for other, ns in late.items() if other != rank)
            if 2 * at_least >= excess - alike and at_least >= max(others, default=0):
                found = facts.excess(rank, across.skew.peers[rank])
                phase = max(found, key=found.__getitem__, default="")
                phase = phase if found and 2 * found[phase] >= at_least else ""
                return Whose((rank,), phase, facts.split.waits.get(rank, 0))
        return None

    def _explain(self, pause: Pause) -> None:
        """Looks up what devices did meanwhile."""
        rank = pause.ranks[0] if pause.ranks else None
        denied = self._devices.denied(rank, *pause.span_ns, pause.excess_ns)
        pause.denied = denied.ns >= DENIED_SHARE * pause.excess_ns
        share = 0.0 if pause.denied else 1.0  # of its own time, it takes all
        pause.device = self._devices.cause(rank, *pause.span_ns, share) or (denied if pause.denied else None)
        pause.incident = None

    def _settle(self, pause: Pause) -> None:
        """Looks it up for the last time."""
        self._explain(pause)
        self._found = with_pause(self._found, pause)
        self._forget()

    def _recurring(self, ranks: tuple[int, ...], phase: str, facts: StepFacts, ns: int, common_ns: int = 0) -> Pause:
        """Returns the one that a mark of that length belongs to; ``common_ns`` is how long all ranks pause besides."""
        split, found = facts.split, (one for one in self._found if one.ranks == ranks and one.phase == phase)
        known = (one for one in found if one.is_like(ns) and bool(one.common_ns) == bool(common_ns))
        pause = next(known, None)
        if pause is None:
            pause = Pause(ranks, phase, facts.across.step, ranks_in_run=len(facts.across), common_ns=common_ns)
            pause.span_ns = split.start_ns, split.end_ns
            self._found.append(pause)
            self._forget()
        pause.span_ns = pause.span_ns[0], split.end_ns
        return pause

    def _forget(self) -> None:
        """Keeps the costliest, and the newest."""
        if len(self._found) > KEEP_PAUSES:
            del self._found[min(range(KEEP_PAUSES), key=lambda at: self._found[at].whole_cost_ns)]


def _is_profiled(across: StepAcrossRanks) -> bool:
    return any(step.status == PROFILED for step in across.ranks.values())


def _is_trifle(pause: Pause, stalls: Collection[tuple[tuple[int, ...], int]]) -> bool:
    """Returns whether marks alone show it, and others waited next to nothing for it, or it is a part of known stalls.

    Args:
        pause: It.
        stalls: The ranks and steps of those that no mark explains.
    """
    if not pause.is_marked:
        return False
    if pause.starts and all((pause.ranks, step) in stalls for step in pause.starts):
        return True
    return pause.whole_cost_ns < (1 if pause.recurs else SHOWN_NS)


def _all_wait_for_data(facts: StepFacts, excess: int) -> bool:
    """Returns whether each rank waits for data for most of it: that the last one goes on later does not hold up all."""
    rows = [figures.phases_ns for figures in facts.across.figures.values()] if facts.across.counted else []
    return 2 * min((row.get("data", 0) for row in rows), default=0) >= excess


def _alike(facts: StepFacts, excess: int) -> int:
    """Returns how much longer than usual all ranks took without their waits, where all of these are known; else 0.

    Neither where that is next to nothing, nor where it is nearly all.
    """
    own = {} if _all_wait_for_data(facts, excess) else own_times(facts.across)
    alike = min(own.values(), default=0) - (facts.across.longest_ns - excess)
    return alike if excess * EARLY <= alike <= excess - excess * EARLY else 0


def _longest_phase(facts: StepFacts, excess: int) -> str:
    """Returns the phase that all ranks spent most of it in; "" if that is not known."""
    rows = [figures.phases_ns for figures in facts.across.figures.values()]
    spent = {phase: median(row.get(phase, 0) for row in rows) for phase in PHASES if phase != "other"}
    phase = max(spent, key=spent.__getitem__)
    return phase if 2 * spent[phase] >= excess else ""


def _incident(pause: Pause) -> Incident:
    of_loop = not pause.ranks and (pause.recurs or pause.phase == "between")  # all do it, again, or outside the steps
    planned = pause.phase in PLANNED or of_loop
    period = pause.period
    usual = not (pause.unusual or period) or pause.denied
    minor = pause.phase == "gc" and ((pause.gain or 0.0) < WORTH if pause.recurs else pause.waited_ns < LONE_NS)
    incident = Incident(
        kind="intermittent" if pause.recurs and pause.phase == "gc" else "pause",
        severity="info" if planned or minor or usual else "warning",
        message=_sentence(pause),
        ranks=pause.ranks,
        phase=pause.phase,
        since_step=pause.since,
        until_step=pause.until,
        steps=pause.count,
        struck=tuple(pause.starts) if period is None else (),
        period=period,
        cost_ns=pause.whole_cost_ns,
        gain=pause.gain,
        evidence=Evidence(
            longest_ms=pause.longest_ns / NS_PER_MS,
            ranks=pause.ranks_in_run,
            call_sites=dict.fromkeys(pause.ranks, pause.site) if pause.site else None,
            unwatched=pause.bare or None,
            beyond_tail=pause.unusual if usual else None,
            denied=pause.denied if usual else None,
        ),
    )
    return because(incident, pause.device)


def _sentence(pause: Pause) -> str:
    """Returns a pause of one rank or of all."""
    phase, longest = pause.phase, in_ms(pause.longest_ns) + (" longer than others" if pause.common_ns else "")
    who = ranks_named(pause.ranks) if pause.ranks else "every rank"
    at = f": {pause.site}" if pause.site else ""
    why = f" ({PAUSE_NOUNS[phase]})" if phase in PAUSE_NOUNS else f" {place(phase)}" if phase else ""
    if pause.count == 1:
        return f"{who} paused for {longest}{why} at step {pause.since}{at}"
    if pause.count > TOGETHER * pause.times:  # steps one after another, as where cores are taken away
        return f"{who} paused in {pause.count} steps{why}, for up to {longest}{at}"
    if pause.period is None:
        return f"{who} paused {pause.times if pause.times > 1 else pause.count} times{why}, for up to {longest}{at}"
    alone = " alone" if pause.ranks and phase != "gc" and pause.is_alone else ""
    period = "step" if pause.period == 1 else f"{pause.period} steps"
    return f"{who}{alone} paused{why} every {period}, for up to {longest}{at}"
