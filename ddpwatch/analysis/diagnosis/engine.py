"""The diagnosis: where a run's time goes, and what is wrong with it, step by step, in bounded memory.

Dashboard, plain lines, reports, comparisons and `open_recording` all show what this engine finds: the same steps give
the same incidents with the same costs. ``docs/diagnosis.md`` says what is tested, and how often it may be wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts import Ledger, StepSplit
from ddpwatch.analysis.diagnosis.cause import StepFacts
from ddpwatch.analysis.diagnosis.incident import Account, Incident, LostTime
from ddpwatch.analysis.diagnosis.late_rank import LateRank
from ddpwatch.analysis.diagnosis.lateness import GroupLateness
from ddpwatch.analysis.diagnosis.pauses import Pauses
from ddpwatch.analysis.diagnosis.whole_run import WholeRun
from ddpwatch.analysis.diagnosis.sentences import LayerNames, late_rank_sentence
from ddpwatch.messages import Mark

KEEP_SPLITS = 1024  # newest steps whose waits may still turn out to be one rank's doing
KEEP_FACTS = 16  # newest watched steps that may still show why
KEEP_ENDED = 256  # incidents that are over: the costliest
_SEVERITIES = ("error", "warning", "info")


class Diagnosis:
    """Takes steps in order, and knows at any time what they amount to.

    Args:
        names: Of buckets and parameters, for sentences.
    """

    def __init__(self, names: LayerNames | None = None) -> None:
        self._names = names
        self._ledger = Ledger()
        self._groups: dict[int, GroupLateness] = {}
        self._late: dict[tuple[int, int], LateRank] = {}  # open, by group and rank
        self._ended: list[Incident] = []
        self._pauses = Pauses()
        self._whole = WholeRun()
        self._splits: deque[StepSplit] = deque(maxlen=KEEP_SPLITS)
        self._recent: deque[StepFacts] = deque(maxlen=KEEP_FACTS)

    def add_mark(self, mark: Mark) -> None:
        """Takes a mark. It counts in the step that it lies in, or before which it lies, if it comes before that."""
        self._ledger.mark(mark)

    def add_step(self, across: StepAcrossRanks) -> None:
        """Takes the next step, as complete as it will be."""
        split = self._ledger.add(across)
        self._splits.append(split)
        facts = StepFacts(across, split)
        started: list[tuple[int, LateRank]] = []
        if across.counted:
            self._recent.append(facts)
            started = list(self._watch(facts))
        known = list(self._late.values())
        for late in known:
            late.add_split(split)
            late.add_facts(facts)
        for group, late in started:
            late.catch_up(self._splits, self._recent)
            if any(late.streak.rank == rank for _, rank in self._late):
                continue  # in another group: what it costs counts once
            self._late[group, late.streak.rank] = late
            self._pauses.absorb(late.streak.rank, late.streak.since)
        self._pauses.add(facts, self._late.values())
        self._whole.add(facts)
        self._end()

    def _watch(self, facts: StepFacts) -> Iterable[tuple[int, LateRank]]:
        """Compares the ranks of each group; yields who turns out to be late."""
        across = facts.across
        last = {key[3]: key for key in across.skew.buckets}  # of each group, the last bucket
        for group, key in last.items():
            lowest = next(rank for rank in across.skew.peers if key in across.facts_of(rank).keys)
            ranks = across.skew.peers[lowest]
            watched = self._groups.get(group)
            if watched is None or watched.ranks != ranks:
                watched = self._groups[group] = GroupLateness(ranks)
            launches = [_launch(across, rank, key) for rank in ranks]
            if facts.split.pauses:  # these have a known reason
                launches = [at - facts.paused_ns(rank) for at, rank in zip(launches, ranks, strict=True)]
            for streak in watched.add(across.step, launches, across.longest_ns):
                yield group, LateRank(streak, ranks)

    def _end(self) -> None:
        for key, late in list(self._late.items()):
            group = self._groups.get(key[0])
            if not late.streak.open or group is None or group.streaks.get(key[1]) is not late.streak:
                del self._late[key]
                self._keep(replace(self._incident(late), open=False))

    def _keep(self, incident: Incident) -> None:
        self._ended.append(incident)
        if len(self._ended) > KEEP_ENDED:
            self._ended.remove(min(self._ended, key=lambda ended: ended.cost_ns))

    def _incident(self, late: LateRank) -> Incident:
        streak, cause = late.streak, late.cause
        phase, excess = cause.phase(streak.late_ns)
        incident = Incident(
            kind=late.kind(phase),
            severity="info" if phase in ("checkpoint", "validation") else "warning",
            message="",
            ranks=(streak.rank,),
            phase=phase,
            param=cause.param(streak.late_ns) if phase == "backward" else None,
            bucket=cause.bucket,
            since_step=streak.since,
            until_step=streak.until,
            steps=streak.count,
            period=streak.period,
            cost_ns=late.cost_ns,
            gain=late.gain,
            open=streak.open,
            evidence={
                "late_ms": streak.late_ns / 1e6,
                "excess_ms": excess / 1e6,
                "watched_steps": streak.watched,
                "step_ms": streak.step_ns / 1e6,
                "group": list(late.peers),
            },
        )
        return replace(incident, message=late_rank_sentence(incident, self._names))

    def incidents(self) -> list[Incident]:
        """What went wrong so far: errors first, then what costs most."""
        total = self._ledger.rank_ns
        found = [
            *(self._incident(late) for late in self._late.values()),
            *self._ended,
            *self._pauses.incidents(),
            *self._whole.incidents(self._names),
        ]
        found = [replace(incident, share=incident.cost_ns / total if total else None) for incident in found]
        return sorted(found, key=lambda incident: (_SEVERITIES.index(incident.severity), -incident.cost_ns))

    def lost(self) -> LostTime:
        """Where the rank-time went so far."""
        ledger = self._ledger
        waiting: dict[tuple[int, str], int] = {}
        for incident in self.incidents():
            if len(incident.ranks) == 1 and incident.kind not in ("hang", "death"):
                key = incident.ranks[0], incident.phase
                waiting[key] = waiting.get(key, 0) + incident.cost_ns
        accounts = [Account(name, None, phase, ns) for (name, phase), ns in ledger.accounts.items() if ns]
        accounts += [Account("waiting", rank, phase, ns) for (rank, phase), ns in waiting.items() if ns]
        if jitter := ledger.waits.total() - sum(waiting.values()):
            accounts.append(Account("jitter", None, "exposed_comm", jitter))
        total = ledger.rank_ns
        return LostTime(
            rank_ns=total,
            accounts=tuple(sorted(accounts, key=lambda account: -account.ns)),
            watched=ledger.watched_ns / total if total else None,
        )


def _launch(across: StepAcrossRanks, rank: int, key: tuple[int, int, int, int]) -> int:
    facts = across.facts_of(rank)
    return facts.launch[-1] if facts.keys[-1] == key else facts.launch[facts.keys.index(key)]
