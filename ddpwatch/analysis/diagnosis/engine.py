"""The diagnosis: where a run's time goes, and what is wrong with it, step by step, in bounded memory.

Dashboard, plain lines, reports, comparisons and `open_recording` all show what this engine finds: the same steps give
the same incidents with the same costs. ``docs/diagnosis.md`` says what is tested, and how often it may be wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts.accounts import PAUSED, STUCK, STUCK_IN, Ledger, StepSplit, own_times_by_group
from ddpwatch.analysis.diagnosis.causes.devices import LOOK_AGAIN_NS, DeviceCause, DeviceCauses, because
from ddpwatch.analysis.diagnosis.causes.slow_host import by_host, late_together
from ddpwatch.analysis.diagnosis.hangs.held_up import HeldUp
from ddpwatch.analysis.diagnosis.hangs.liveness import RankLiveness
from ddpwatch.analysis.diagnosis.incident import SEVERITIES, Account, Evidence, Incident, LostTime
from ddpwatch.analysis.diagnosis.late.bets import WATCHED_PHASES
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.late.late_rank import LateRank
from ddpwatch.analysis.diagnosis.late.lateness import GroupLateness
from ddpwatch.analysis.diagnosis.late.residuals import KEEP_STEPS
from ddpwatch.analysis.diagnosis.late.streak import Streak
from ddpwatch.analysis.diagnosis.rules.pause_or_hang import joined
from ddpwatch.analysis.diagnosis.rules.pauses import Pauses
from ddpwatch.analysis.diagnosis.rules.rules import Rules
from ddpwatch.analysis.diagnosis.standing import Standing, rejoined
from ddpwatch.analysis.diagnosis.thresholds import KEEP_INCIDENTS
from ddpwatch.analysis.diagnosis.words.next_steps import JobPlaces, next_step, next_step_for
from ddpwatch.analysis.diagnosis.words.sentences import LayerNames, late_rank_sentence
from ddpwatch.analysis.estimate import Estimate
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.kept_steps import DECODED
from ddpwatch.analysis.launch_skew import RankFacts, common_keys
from ddpwatch.analysis.placement import Placement
from ddpwatch.analysis.step import BucketKey
from ddpwatch.common.intervals import total_within
from ddpwatch.sampling.stillness import is_of_hang
from ddpwatch.wire.messages import (
    OWN_COLLECTIVES,
    PAUSE_PHASES,
    Beat,
    Bye,
    Device,
    Hello,
    Layout,
    Mark,
    Message,
    Node,
    RankSample,
    Stack,
    Status,
    Step,
)

MOST_SPLITS = 16_384  # with the bare steps between them
LATENESS = ""  # instead of a phase: how much later a rank launches the last bucket
KEEP_FACTS = 16  # newest watched steps that may still show why
SETTLED_NS = 3 * LOOK_AGAIN_NS  # after which samples of a time are here, and looked at
SHARED = 0.25  # of a streak's late steps: with so many in a known one, it is the same
_Watch = tuple[int, str]  # a group, and by what its ranks are compared: a phase, or `LATENESS`


class Diagnosis:
    """Takes a run's messages and its steps in order, and knows at any time what they amount to.

    Args:
        names: Of buckets and parameters, for sentences.
        groups: The run's process groups, kept up to date by the caller; None if only steps and marks will come.
        source: The recording, for commands that read it.

    Attributes:
        places: Where the job's ranks can be looked at, and what ``ddpwatch whatif`` can read of it.
    """

    def __init__(self, names: LayerNames | None = None, groups: Groups | None = None, source: str = "") -> None:
        self._names = names
        self.places = JobPlaces(source)
        self._now_ns = 0
        self._ledger = Ledger()
        self._groups: dict[_Watch, GroupLateness] = {}
        self._late: dict[tuple[_Watch, int], LateRank] = {}  # open, by what showed them, and rank
        self._closing: list[LateRank] = []  # over, but samples of their time are still to come
        self._ended: list[Incident] = []
        self._job_groups = groups = groups or Groups()
        self._liveness = RankLiveness(groups)
        self._held_up = HeldUp(groups)
        self._placement = Placement()
        self._devices = DeviceCauses(self._placement)
        self._rules = Rules(self._devices)
        self._pauses = Pauses(self._devices, self._held_up, self._ledger)
        self._causes: dict[tuple[int, int], tuple[int, DeviceCause | None]] = {}
        self._splits: deque[StepSplit] = deque(maxlen=MOST_SPLITS)
        # The newest watched steps: their waits, and those since, may turn out to be one rank's doing
        self._judged: deque[int] = deque(maxlen=KEEP_STEPS)
        self._recent: deque[StepFacts] = deque(maxlen=KEEP_FACTS)
        self._looked: _Look | None = None  # at what is known so far
        self._standing = Standing()
        self._has_ended = False

    def apply_message(self, message: Message, received_ns: int) -> None:
        """Takes a message. Steps are compared once `add_step` has them of all ranks.

        A mark counts in the step that it lies in, or before which it lies, if it comes before that step.
        """
        if received_ns > self._now_ns:
            self._now_ns = received_ns
        self._looked = None
        if isinstance(message, Step):
            self._liveness.add_step(message, received_ns)
            return
        self._rules.apply_message(message)
        if isinstance(message, Beat):
            self._liveness.add_beat(message, received_ns)
            self._held_up.add_beat(message)
        elif isinstance(message, Mark):
            self._ledger.add_mark(message)
            self.places.add_mark(message)
            self._devices.add_mark(message)
            self._liveness.note_seen(message.rank, received_ns)
        elif isinstance(message, Device):
            self._devices.add_device(message)
            self._liveness.note_collector(received_ns)
        elif isinstance(message, RankSample):
            self._devices.add_rank_sample(message)
        elif isinstance(message, Hello):
            self._placement.add_hello(message)
            self.places.add_hello(message)
            self._liveness.add_hello(message.rank, received_ns)
        elif isinstance(message, Layout):
            self.places.add_layout(message)
        elif isinstance(message, Bye):
            self._liveness.add_bye(message, received_ns)
            self.places.add_bye(message)
            self._has_ended = self._has_ended or message.rank is None
        elif isinstance(message, Stack):
            if is_of_hang(message):
                self._liveness.add_stack(message)
            else:
                self._pauses.add_stack(message)
        elif isinstance(message, Node):
            self._liveness.add_node(message)
            self._liveness.note_collector(received_ns)
        elif isinstance(message, Status):
            self.places.source = self.places.source or message.recording
            self._liveness.pass_time(received_ns)

    def add_step(self, across: StepAcrossRanks) -> None:
        """Takes the next step, as complete as it will be."""
        self._looked = None
        if across.comparable:
            self._devices.note_clocks(across.shifts)
        split = self._ledger.add_step(across)
        self._keep_split(split, across.counted)
        facts = StepFacts(across, split)
        started: list[tuple[_Watch, LateRank]] = []
        if across.counted:
            self._recent.append(facts)
            for older in islice(reversed(self._recent), DECODED.of(len(across)), None):
                if not older.across.pack():
                    break
            started = list(self._watch(facts))
        if self._late:
            for late in self._late.values():
                late.add_split(split)
                late.add_facts(facts)
            self._end({late.streak.rank for _, late in started})
            for (watch, rank), late in list(self._late.items()):
                # As it turns out by now. Where it was late and did not pause, that was noise, and has no incident
                if across.counted and (self._pauses.is_pausing(late.streak) or self._is_held(late)):
                    self._groups[watch].dismiss(late.streak)
                    del self._late[watch, rank]
        for watch, late in started:
            if self._pauses.is_pausing(late.streak):
                self._groups[watch].dismiss(late.streak)
            elif self._is_news(late):
                late.catch_up(self._splits, self._recent)
                if self._is_held(late):
                    self._groups[watch].dismiss(late.streak)
                    continue
                self._late[watch, late.streak.rank] = late
                self._pauses.absorb(late.streak)
        split.blamed = {late.streak.rank for late in self._late.values()}.union(split.delays)
        self._pauses.add_step(facts, self._late.values())
        self._rules.add_step(facts)
        if self._closing:
            self._settle(split.end_ns)
        if self._standing.is_due(self._now_ns):
            self._standing.look(self._rejoined(), self._judged, self.lost().share, self._now_ns)

    def _is_held(self, late: LateRank) -> bool:
        """Returns whether a rank is late by a wait for data that the others' loaders would cost as well."""
        common = self._rules.input
        return common.lasts and late.streak.rank in common.held_by and late.cause.phase(late.late_ns)[0] == "data"

    def _keep_split(self, split: StepSplit, judged: bool) -> None:
        """Keeps what any streak that is found from now on may cost."""
        if judged:
            self._judged.append(split.step)
            while self._splits and self._splits[0].step < self._judged[0]:
                self._splits.popleft()
        self._splits.append(split)

    def _watch(self, facts: StepFacts) -> Iterable[tuple[_Watch, LateRank]]:
        """Compares the ranks of each group; yields who turns out to be late.

        Where no collective can be compared, as among the stages of a pipeline, compares how long ranks did not wait.
        """
        across = facts.across
        last = {key[3]: key for key in across.skew.buckets}  # of each group, the last bucket
        compared = [(group, *_compared(across, key)) for group, key in last.items()]
        for group, own in own_times_by_group(across, of_all=not compared).items():
            compared.append((group, tuple(own), list(own.values())))
        for group, ranks, launches in compared:
            if len(ranks) < 2:
                continue
            if facts.split.delays:  # these have a known reason
                _note_held_up(facts.split, ranks, launches)
                launches = [at - facts.paused_ns(rank) for at, rank in zip(launches, ranks, strict=True)]
            late = self._lateness((group, LATENESS), ranks)
            self._lead(facts.split, ranks, launches, late.streaks)
            found = late.add_step(across.step, launches, across.longest_ns, across.skew.error)
            if not facts.split.pauses:
                yield from self._watch_phases(facts, group, late)
            for streak in found:
                yield (group, LATENESS), self._late_rank((group, LATENESS), streak)

    def _lead(self, split: StepSplit, ranks: Sequence[int], launches: Sequence[int], late: Collection[int]) -> None:
        """Notes how much later the last rank was than the one before it; of a slow host, than those of other hosts."""
        last_at = max(launches)
        last = ranks[launches.index(last_at)]
        if len(late) < 2 or len(slow := late_together(last, late, self._placement.hosts)) < 2:
            lead = last_at - sorted(launches)[-2]
        elif others := [at for rank, at in zip(ranks, launches, strict=True) if rank not in slow]:
            lead = last_at - max(others)
        else:  # all of the group is slow: all waits for the last one count
            return
        split.leads[last] = max(lead, split.leads.get(last, 0))  # of all groups

    def _watch_phases(self, facts: StepFacts, group: int, late: GroupLateness) -> Iterable[tuple[_Watch, LateRank]]:
        """Compares how long the ranks of a group spend on a phase. It matters if it makes a rank late."""
        across, facts_of = facts.across, facts.across.all_facts()
        spent = [facts_of[rank].figures.phases_ns for rank in late.ranks]
        for phase in WATCHED_PHASES:
            try:
                values = [phases[phase] for phases in spent]
            except KeyError:  # on some rank, it was not seen
                continue
            watch = group, phase
            for streak in self._lateness(watch, late.ranks).add_step(across.step, values, across.longest_ns):
                if 2 * late.mean_in(streak) >= streak.typical_ns:
                    yield watch, self._late_rank(watch, streak)
                else:
                    self._groups[watch].dismiss(streak)

    def _lateness(self, watch: _Watch, ranks: tuple[int, ...]) -> GroupLateness:
        found = self._groups.get(watch)
        if found is None or (found.ranks is not ranks and found.ranks != ranks):
            found = self._groups[watch] = GroupLateness(ranks)
        return found

    def _late_rank(self, watch: _Watch, streak: Streak) -> LateRank:
        """Returns what a streak is, whatever figure shows it: how late the rank launches is known of the same steps."""
        group, figure = watch
        launches = None if figure == LATENESS else self._groups.get((group, LATENESS))
        return LateRank(streak, self._groups[watch].ranks, launches, self._ledger.ranks)

    def _is_news(self, late: LateRank) -> bool:
        """Returns whether it is not known from another group, or by another figure: what a rank costs counts once.

        If it has changed since it became known, what is known ends there.
        """
        streak = late.streak
        for key, known in list(self._late.items()):
            if key[1] != streak.rank or streak.shared_with(known.streak) < SHARED:
                continue
            if not streak.changed:
                return False
            self._groups[key[0]].dismiss(known.streak)
            known.streak.end_before(streak.since)
            self._close(key)
        return True

    def _end(self, started: Collection[int]) -> None:
        """Closes what is over. If nothing else of the rank has started, other figures may show what is left of it."""
        for key, late in list(self._late.items()):
            group = self._groups.get(key[0])
            if late.streak.open and group is not None and group.streaks.get(key[1]) is late.streak:
                continue
            self._close(key)
            if key[1] not in started:
                for watch, other in self._groups.items():
                    if (watch, key[1]) not in self._late:
                        other.release(key[1], late.streak.until)

    def _close(self, key: tuple[_Watch, int]) -> None:
        late = self._late.pop(key)
        late.end()
        if not late.streak.dissolved:
            self._closing.append(late)

    def _settle(self, now_ns: int) -> None:
        """Takes the incidents of late ranks that are over as they are, once samples of their time are here."""
        settled = [late for late in self._closing if now_ns - late.end_ns >= SETTLED_NS]
        for late in settled:
            self._closing.remove(late)
            self._keep(self._incident(late))

    def _keep(self, incident: Incident) -> None:
        self._ended.append(incident)
        if len(self._ended) > KEEP_INCIDENTS:
            self._ended.remove(min(self._ended, key=lambda ended: ended.cost_ns))

    def _incident(self, late: LateRank) -> Incident:
        streak, cause = late.streak, late.cause
        phase, excess = cause.phase(late.late_ns)
        parts = cause.parts(late.late_ns)
        param = cause.param(excess) if phase == "backward" else None
        throughout = phase == "backward" and param is None and cause.is_throughout(excess)
        module, bucket = (not throughout and cause.bucket) or (None, None)
        incident = Incident(
            kind=late.kind(phase),
            severity="warning" if late.matters and phase not in ("checkpoint", "validation") else "info",
            message="",
            ranks=(streak.rank,),
            phase=phase,
            param=param,
            module=module,
            bucket=bucket,
            since_step=streak.since,
            until_step=streak.until,
            steps=streak.count,
            struck=() if streak.constant or streak.period is not None else streak.struck,
            period=streak.period,
            cost_ns=late.cost_ns,
            gain=late.gain,
            open=streak.open,
            evidence=Evidence(
                late_ms=late.late_ns / 1e6,
                excess_ms=excess / 1e6 if phase else None,
                parts_ms={name: ns / 1e6 for name, ns in parts.items()} if len(parts) > 1 else None,
                throughout=throughout or None,
                rest_after=cause.rest_after if phase == "other" else None,
                watched_steps=streak.watched,
                step_ms=streak.step_ns / 1e6,
                group=list(late.peers),
                own_stage=self._is_own_stage(late) or None,
            ),
        )
        lasting = late_rank_sentence(replace(incident, open=True), self._names)
        incident = replace(incident, message=late_rank_sentence(incident, self._names), lasting=lasting)
        return because(incident, self._device_cause(late, incident.phase))

    def _is_own_stage(self, late: LateRank) -> bool:
        """Returns whether all ranks that have the same stage of a pipeline are late as well."""
        streak = late.streak
        ended = (one for one in self._ended if one.until_step is not None and one.until_step >= streak.since)
        as_late = {rank for one in ended for rank in one.ranks} | {rank for _, rank in self._late}
        as_late |= {late.streak.rank for late in self._closing if late.streak.until >= streak.since}
        stage = self._job_groups.with_stage_of(streak.rank)
        return bool(stage) and stage <= as_late | {streak.rank}

    def _device_cause(self, late: LateRank, phase: str) -> DeviceCause | None:
        """Returns what the rank's devices did meanwhile, or what it was short of like its peers.

        Looked up again now and then, while it lasts, and until samples of that time are here.
        """
        key = late.streak.rank, late.streak.since
        known = self._causes.get(key)
        if known is None or self._now_ns - known[0] >= LOOK_AGAIN_NS:
            span = late.streak.rank, late.start_ns, late.end_ns
            found = self._devices.cause(*span, late.gain or 0.0)
            if found is None and phase == "data":
                found = self._devices.workers(*span)
            elif found is None and phase not in PAUSE_PHASES.values():
                found = self._devices.shortage(*span, late.gain or 0.0)
            known = self._causes[key] = (self._now_ns, found)
            if len(self._causes) > KEEP_INCIDENTS:
                del self._causes[next(iter(self._causes))]
        return known[1]

    def incidents(self) -> list[Incident]:
        """Returns what went wrong so far: errors first, then the verdict's incident, then what costs most."""
        found = self._standing.judged(self._rejoined(), self._judged)
        found = [replace(incident, next_step=next_step(incident, self.places)) for incident in found]
        return sorted(found, key=_gravest_first)

    def spells(self) -> list[Incident]:
        """Returns it host by host, and each time that it came by itself."""
        return by_host(self._look().found, self._placement.hosts)

    def _rejoined(self) -> list[Incident]:
        """Returns what came back as one, with its share of the run."""
        found = rejoined(self.spells(), None if self._has_ended else self._judged)
        beyond = sum(incident.cost_ns + incident.stuck_ns for incident in found if not incident.in_steps)
        total = self._ledger.rank_ns + beyond
        return [replace(incident, share=incident.cost_ns / total if total else None) for incident in found]

    def _look(self) -> _Look:
        """Returns what went wrong so far, rank by rank; put together once, until something new comes."""
        if self._looked is None:
            self.places.reduces_again = self._rules.reduces_again
            late = [self._incident(late) for late in self._late.values()]
            found = [
                *late,
                *map(self._incident, self._closing),
                *self._ended,
                *self._rules.incidents(self._names),
                *self._liveness.deaths(self._now_ns),
                *joined(self._pauses.incidents(), self._liveness.hangs(self._now_ns)),
            ]
            self._looked = _Look(late, sorted(found, key=lambda incident: -incident.cost_ns))
        return self._looked

    def estimate(self) -> Estimate:
        """Returns what holds for all steps so far."""
        return self._ledger.estimator.estimate()

    def slowest(self) -> Incident | None:
        """Returns the late rank that costs most of a step at the moment."""
        return max(self._look().late, key=_gain, default=None)

    def lost(self) -> LostTime:
        """Returns where the rank-time went so far."""
        ledger, incidents = self._ledger, self._look().found
        rest, waits = ledger.as_estimated(), ledger.waits.total()
        waiting: Counter[tuple[int, str]] = Counter()
        for ns, taken_for in self._pauses.waited():
            ns = min(ns, rest[taken_for])
            rest[taken_for] -= ns
            waits += ns
        for ns, taken_for in self._pauses.spent():
            ns = min(ns, rest[taken_for])
            rest[taken_for] -= ns
            rest[PAUSED] += ns
        for incident in incidents:
            if len(incident.ranks) != 1 or not incident.in_steps:
                continue
            ns = min(incident.cost_ns, waits)
            waits -= ns
            waiting[incident.ranks[0], _waited_in(incident)] += ns
        held = min(self._rules.input.waited_ns, waits)
        waits -= held
        rest["input", "data"] += held
        total = ledger.rank_ns
        for hang in incidents:
            if not hang.in_steps:  # its ranks have not ended their step
                total += hang.cost_ns + hang.stuck_ns
                rest[STUCK] += hang.stuck_ns
                if len(hang.ranks) == 1:
                    waiting[hang.ranks[0], _waited_in(hang)] += hang.cost_ns
                else:
                    rest[STUCK] += hang.cost_ns
        accounts = [Account(name, None, phase, ns) for (name, phase), ns in rest.items() if ns]
        accounts += [Account("waiting", rank, phase, ns) for (rank, phase), ns in waiting.items() if ns]
        if waits:
            accounts.append(Account("jitter", None, "exposed_comm", waits))
        lost = LostTime(
            rank_ns=total,
            accounts=tuple(sorted(accounts, key=lambda account: -account.ns)),
            between_steps_ns=ledger.between_steps_ns,
            watched=ledger.watched_ns / total if total else None,
            ranks=ledger.ranks,
        )
        costly, much = self._standing.judge_lost(lost.share)
        lost = replace(lost, costly=costly, much=much)
        return replace(lost, next_step=next_step_for(lost, self.places))


class _Look(NamedTuple):
    """What went wrong so far, costliest first, and the late ranks' share of it."""

    late: list[Incident]
    found: list[Incident]


def _compared(across: StepAcrossRanks, key: BucketKey) -> tuple[tuple[int, ...], list[int]]:
    """Returns the ranks that launched a bucket, and when they did (see `_launches`)."""
    ranks = _ranks_with(across, key)
    return ranks, _launches(across, ranks, key) if len(ranks) > 1 else []


def _ranks_with(across: StepAcrossRanks, key: BucketKey) -> tuple[int, ...]:
    """Returns the ranks that launched a bucket, in ascending order."""
    facts, skew = across.all_facts(), across.skew
    peers = next(iter(skew.peers.values()))
    if len(peers) == skew.buckets[key].ranks:
        keys = common_keys([facts[rank] for rank in peers])
        if keys is not None and (keys[-1] == key or key in keys):
            return peers
    return tuple(rank for rank in sorted(skew.peers) if key in facts[rank].keys)


def _waited_in(incident: Incident) -> str:
    """Returns the phase in which a rank was waited for: pause, hang or death are one, wherever the rank was."""
    if incident.kind in STUCK_IN:
        return incident.kind
    is_stall = incident.kind == "pause" and incident.phase not in PAUSE_PHASES.values()
    return PAUSED[1] if is_stall else incident.phase


_waits = attrgetter("waits")


def _gain(incident: Incident) -> float:
    return incident.gain or 0.0


def _gravest_first(incident: Incident) -> tuple[bool, bool, int, int]:
    grave = SEVERITIES.index(incident.severity)
    return incident.severity != "error", not incident.foremost, grave, -incident.cost_ns


def _note_held_up(split: StepSplit, ranks: Sequence[int], launches: Sequence[int]) -> None:
    """Notes how much later those that paused launched than all others."""
    ordered = sorted(launches)
    for rank, at in zip(ranks, launches, strict=True):
        if rank in split.delays and at == ordered[-1]:
            split.held_up[rank] = max(split.held_up.get(rank, 0), at - ordered[-2])


def _most_late(facts: RankFacts, across: StepAcrossRanks, group: int) -> int:
    buckets = across.skew.buckets
    launches = zip(facts.keys, facts.launch, strict=True)
    return max(at - buckets[key].first for key, at in launches if key[3] == group and key in buckets)


def _launches(across: StepAcrossRanks, ranks: Sequence[int], key: BucketKey) -> list[int]:
    """Returns when ranks launched a bucket, had they never waited for a collective before: waits make up for lateness.

    Where waits are not seen, as for asynchronous collectives of the job's own, returns how late ranks were at most.
    """
    facts_of = across.all_facts()
    facts = [facts_of[rank] for rank in ranks]
    launches = [one.launch[-1] if one.keys[-1] == key else one.launch[one.keys.index(key)] for one in facts]
    if not any(map(_waits, facts)):
        return [_most_late(one, across, key[3]) for one in facts] if key[0] == OWN_COLLECTIVES else launches
    return [at - total_within(one.waits, 0, at - one.origin) for one, at in zip(facts, launches, strict=True)]
