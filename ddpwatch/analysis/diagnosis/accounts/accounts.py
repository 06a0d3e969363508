"""Where a run's time goes: every nanosecond of every rank into exactly one account.

Exposed communication is split on its critical path, walked backwards from its end. The last collective was transferred
since its last launch, or since the one before it was done: then that one counts as well, and so on. What lies before
the last launch that this leads to is waiting for the rank that launched last, even if the wire was busy: with a faster
wire, it would have been waiting all the same. In a light step no completion is known: there, the last launch of all is
where waiting ends.

Of a bare step only the duration is known: it is split like a watched one that took about as long, and rather like
a newer one. In the end, what is exposed adds up to what is estimated of all steps (`ddpwatch.analysis.estimate`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple, TypeVar

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts.buffers import NOBODY, waits_for_buffers
from ddpwatch.analysis.diagnosis.incident import AccountName
from ddpwatch.analysis.digest import share_of
from ddpwatch.analysis.estimate import UNSEEN, Estimator, StepShare, of_duration
from ddpwatch.analysis.launch_skew import BucketSkew, RankFacts
from ddpwatch.analysis.means import summed
from ddpwatch.analysis.step import PHASES, STALL_NS, STALL_STEPS, BucketKey, claims_of, split
from ddpwatch.common.intervals import Intervals, intersect, subtract, total, total_within, union
from ddpwatch.common.statistics import RollingMedian
from ddpwatch.sampling.levels import PROFILED, is_watched
from ddpwatch.wire.messages import DEFAULT_GROUP, PAUSE_PHASES, Mark, Step

AccountKey = tuple[AccountName, str]  # its name, and the phase
Pauses = Mapping[str, Intervals]  # by phase, absolute
_Key = TypeVar("_Key")

REFERENCES = 8  # newest watched steps: what a bare one may resemble, besides the newest long one of each duration
PER_OLDER = 0.01  # of a step: what an older one of these has to be more alike by
LONG = 1.05  # a long step takes longer than usual, by this factor
LIKE = 1.25  # a bare step that took longer than the most similar watched one, by this factor, is not like it
PENDING_MARKS = 64  # per rank, that no step has covered yet
MOST_PENDING = 32  # steps

_KEYS: dict[str, AccountKey] = {
    "forward": ("compute", "forward"),
    "backward": ("compute", "backward"),
    "optimizer": ("compute", "optimizer"),
    "data": ("input", "data"),
    "between": ("other", "between"),
    "other": ("other", ""),
    **{phase: ("pause", phase) for phase in PAUSE_PHASES.values()},
}
TRANSFER: AccountKey = ("transfer", "exposed_comm")
EXPOSED: AccountKey = ("exposed", "exposed_comm")  # waiting or transfer, which cannot be distinguished
OTHER: AccountKey = _KEYS["other"]
_STARTUP: AccountKey = ("startup", "")
BARE: AccountKey = ("other", "unwatched")
STUCK_IN = ("hang", "death")  # phases in which others wait for a rank that ends no step
STUCK: AccountKey = ("pause", "hang")  # of the ranks that hold up the others
PAUSED: AccountKey = ("other", "pause")  # of those in a stall that no mark explains: perhaps the job means it
_UNSEEN: AccountKey = ("other", "unseen")
_ABORTED: AccountKey = ("other", "aborted")
_PROFILED: AccountKey = ("other", PROFILED)


@dataclass(slots=True)
class StepSplit:
    """One step's rank-time (ns).

    Attributes:
        total: Of all ranks.
        accounts: All of it but the waits.
        waits: By the rank that was waited for.
        leads: By the rank that launched its group's last bucket last, how much later than the one before it; of a slow
            host, than the last one of another host.
        pauses: By rank, how long it paused since its step before, by phase.
        delays: By rank, by phase, how long it paused since it launched its last bucket before: so much later it
            launches this step's last one. A pause that comes after that delays the next step.
        marked_until: By rank that paused, when its last mark ended, since its step started.
        held_up: By rank that paused, how much later it launched its group's last bucket than all others, at most.
        blamed: Ranks that are late or paused: who waits for them does not wait by chance.
        buffers_ns: Transfer of DDP's buffers, of the same account as that of buckets.
        stalled_ns: Waits of all ranks for data in a single stall, which is an incident of its own.
        held_ns: Waits for ranks that wait for data, where the others' loaders are as slow.
        longest_ns: Duration on the slowest rank.
        start_ns, end_ns: Its earliest start and its latest end on any rank.
        like: The watched step that a bare one was split like.
    """

    step: int
    total: int = 0
    longest_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0
    like: int | None = None
    accounts: dict[AccountKey, int] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)
    leads: dict[int, int] = field(default_factory=dict)
    pauses: dict[int, dict[str, int]] = field(default_factory=dict)
    delays: dict[int, dict[str, int]] = field(default_factory=dict)
    marked_until: dict[int, int] = field(default_factory=dict)
    held_up: dict[int, int] = field(default_factory=dict)
    blamed: Collection[int] = ()
    buffers_ns: int = 0
    stalled_ns: int = 0
    held_ns: int = 0

    @property
    def taken_for(self) -> AccountKey:
        """The account that a stall went into which no stamp explains."""
        return BARE if self.like is not None else self.largest

    @property
    def largest(self) -> AccountKey:
        """The largest account that is no communication."""
        known = [key for key in self.accounts if key not in (TRANSFER, EXPOSED)]
        return max(known, key=self.accounts.__getitem__, default=BARE)

    @property
    def marked_ns(self) -> int:
        """The most of its duration that marks explain: pauses in it, or those in the step before that delay it."""
        return max((sum(of.values()) for of in (*self.pauses.values(), *self.delays.values())), default=0)

    @property
    def jitter_ns(self) -> int:
        """Waits for ranks that are not to blame."""
        return sum(ns for rank, ns in self.waits.items() if rank not in self.blamed)

    @property
    def own_ns(self) -> int:
        """Rank-time without waits for other ranks."""
        return self.total - sum(self.waits.values())

    @property
    def transfer_ns(self) -> int:
        """Exposed communication that is not waiting for a rank, as far as the two can be distinguished."""
        return self.accounts.get(TRANSFER, 0) + self.accounts.get(EXPOSED, 0)


class ExposedSplit(NamedTuple):
    """What a rank's exposed communication was: waits by the last rank, transfer, and what cannot be split (ns)."""

    waits: dict[int, int]
    transfer: int
    unknown: int

    @property
    def mostly_for(self) -> int:
        """The rank that it waited for most; `NOBODY` if it did not wait."""
        return max(self.waits, key=self.waits.__getitem__, default=NOBODY)

    def explains(self, late_ns: int, rank: int) -> bool:
        """Returns whether it is most of what the rank is late by, as seen by another rank, for which it did not wait.

        So ranks of one group hold up those of another.
        """
        awaited = self.mostly_for
        return awaited not in (NOBODY, rank) and 2 * self.waits[awaited] >= late_ns > 0


class Launched(NamedTuple):
    """A rank's buckets, of which the launches were compared. Mostly the same for all ranks of a step.

    Attributes:
        skews: In launch order; None for a bucket that cannot be compared.
        ordered: All others, by their last launch.
        lasts: When that was.
        done: About when each was done, by what transfers usually take; None if that is not known of all.
    """

    skews: Sequence[BucketSkew | None]
    ordered: Sequence[BucketSkew]
    lasts: Sequence[int]
    done: Sequence[int] | None


def launched(
    keys: Sequence[BucketKey], buckets: Mapping[BucketKey, BucketSkew], transfers: Mapping[BucketKey, RollingMedian]
) -> Launched:
    """Looks up what was compared of a rank's buckets. ``transfers`` is how long each took of late."""
    skews = list(map(buckets.get, keys))
    ordered = sorted((skew for skew in skews if skew is not None), key=_last)
    done = None
    if len(ordered) == len(skews) and all(key in transfers for key in keys):
        took = [int(transfers[key].median) for key in keys]
        done = [skew.last + ns for skew, ns in zip(skews, took, strict=True) if skew is not None]
    return Launched(skews, ordered, list(map(_last, ordered)), done)


def split_exposed(facts: RankFacts, exposed: Intervals, buckets: Launched) -> ExposedSplit:
    """Splits one rank's exposed communication.

    Args:
        facts: The rank's share of the step.
        exposed: When its communication was exposed, absolute (ns).
        buckets: Those that it launched.
    """
    size = total(exposed)
    measured = facts.figures.comm_ns is not None
    if not size or not buckets.ordered or (not measured and len(buckets.ordered) < len(buckets.skews)):
        return ExposedSplit({}, 0, size)
    waits: dict[int, int] = {}
    unknown = 0
    done = facts.done if measured else buckets.done
    for since, until in exposed:
        if measured and buckets.skews[_last_before(facts, until)] is None:
            unknown += until - since
            continue
        skew = (
            _awaited_in_sync(facts, buckets, since, until)
            if done is None
            else _awaited(facts, buckets.skews, done, since, until)
        )
        if skew is not None and skew.last > since:
            _add_ns(waits, NOBODY if (rank := skew.last_rank) is None else rank, min(skew.last, until) - since)
    return ExposedSplit(waits, size - unknown - sum(waits.values()), unknown)


def _last_before(facts: RankFacts, until: int) -> int:
    """Returns the position of the last collective that started before then; 0 if none did."""
    last = len(facts.start) - 1
    while last > 0 and facts.start[last] >= until:  # of a later stretch
        last -= 1
    return last


def _awaited(
    facts: RankFacts, skews: Sequence[BucketSkew | None], done: Sequence[int | None], since: int, until: int
) -> BucketSkew | None:
    """Returns the bucket whose last launch an exposed stretch had to wait for.

    None if the wire was busy all the time.
    """
    for at in range(_last_before(facts, until), -1, -1):
        skew = skews[at]
        before = done[at - 1] if at else None
        if skew is not None and (before is None or skew.last >= before):
            return skew
        if before is not None and before <= since:
            return None
    return None


def _awaited_in_sync(facts: RankFacts, buckets: Launched, since: int, until: int) -> BucketSkew | None:
    """Does the same where transfers are not known yet: the backward only waited for its buckets in that stretch.

    It did not wait for those that it launched itself only after that.
    """
    before = bisect_right(buckets.lasts, until) - 1
    if before >= 0 and (last := buckets.lasts[before]) > since:
        return buckets.ordered[bisect_left(buckets.lasts, last)]
    launches = zip(buckets.skews, facts.launch, strict=True)
    return next((skew for skew, own in launches if skew is not None and own < until and skew.last > since), None)


_last = attrgetter("last")


def account_of(phase: str) -> AccountKey:
    """Returns the account of a phase."""
    return _KEYS[phase]


def own_times(across: StepAcrossRanks) -> dict[int, int]:
    """Returns how long each rank did not only wait for a collective (ns); empty where that is not known of all.

    Ranks that cannot be compared by a collective, as the stages of a pipeline, wait for the one with most of it.
    """
    found = across.figures
    if not across.full or any(one.exposed_ns is None for one in found.values()):
        return {}
    return {rank: found[rank].step_ns - (found[rank].exposed_ns or 0) for rank in sorted(found)}


def own_times_by_group(across: StepAcrossRanks, of_all: bool = True) -> dict[int, dict[int, int]]:
    """Returns the own times of each pipeline's stages, by its group, where no collective compares these.

    Args:
        across: The step.
        of_all: Whether those of all ranks follow, as of the default group.
    """
    distinct = {id(fact.keys): fact.keys for fact in across.all_facts().values()}
    groups = {group for keys in distinct.values() for group in keys.groups if across.role_of(group).name == "pp"}
    groups -= {key[3] for key in across.skew.buckets} if groups else set()
    if not (groups or of_all) or not (own := own_times(across)):
        return {}
    members = {group: across.members_of(group) or () for group in sorted(groups)}
    sent = {group: ranks for group, ranks in members.items() if ranks and own.keys() >= set(ranks)}
    found = {group: {rank: own[rank] for rank in ranks} for group, ranks in sent.items()}
    return {**found, DEFAULT_GROUP: own} if of_all else found


class Ledger:
    """Splits step after step, and adds up.

    Attributes:
        waits: By the rank that was waited for (ns).
        watched_ns: Rank-time of watched steps.
        between_steps_ns: Rank-time between steps, without pauses, and steps that never came.
        gaps: By rank, how much lies between the newest step and the one before, if something does: nearly all ranks
            have some, so it is not kept of other steps.
        estimator: Of all steps but warm-up and aborted ones.
    """

    def __init__(self) -> None:
        self._accounts: Counter[AccountKey] = Counter()
        self._pending: list[dict[AccountKey, int]] = []  # not in there yet: columns are summed faster
        self.waits: Counter[int] = Counter()
        self.watched_ns = 0
        self.between_steps_ns = 0
        self.gaps: dict[int, int] = {}
        self.estimator = Estimator()
        self._paused: Counter[AccountKey] = Counter()  # by what a rank would have done meanwhile
        self._transfers: dict[BucketKey, RollingMedian] = {}  # from a bucket's last launch to its end, in full steps
        self._beyond: deque[float] = deque(maxlen=REFERENCES)  # see `_without_copies`
        self._ends: dict[int, int] = {}  # of each rank's newest step, absolute
        self._launched: dict[int, tuple[int, int]] = {}  # by rank: its newest step with a pause, and its last launch
        self._numbers: dict[int, int] = {}  # each rank's own count
        self._marks: dict[int, deque[tuple[str, int, int]]] = {}
        self._references: deque[tuple[float, StepSplit]] = deque(maxlen=REFERENCES)
        self._usual = RollingMedian(REFERENCES)
        self._long: dict[int, tuple[float, StepSplit]] = {}  # by duration, as strata have it

    @property
    def accounts(self) -> Counter[AccountKey]:
        """All but the waits (ns)."""
        self._add_pending()
        return self._accounts

    def _add_pending(self) -> None:
        for key, ns in summed(self._pending).items():
            self._accounts[key] += ns
        self._pending.clear()

    def as_estimated(self) -> Counter[AccountKey]:
        """Returns all but the waits, so that they add up to what is estimated of all steps; "other" is the rest."""
        accounts, found = Counter(self.accounts), self.estimator.estimate(reach=False)
        total = accounts.total()
        wanted = {_KEYS[phase]: ns for phase, ns in found.phases_ns.items() if phase not in ("exposed_comm", "other")}
        if _KEYS["between"] in wanted:
            wanted[_KEYS["between"]] -= found.alone_ns  # see `_add_gaps`
        wanted = {key: max(0.0, ns * found.rank_steps - self._paused[key]) for key, ns in wanted.items()}
        if found.transfer_ns is not None and found.unsplit_ns is not None:
            wanted[TRANSFER] = found.transfer_ns * found.rank_steps
            wanted[EXPOSED] = found.unsplit_ns * found.rank_steps
        accounts.update({key: round(ns) - accounts[key] for key, ns in wanted.items()})
        accounts[OTHER] += total - accounts.total()
        if accounts[OTHER] < 0:
            return Counter(self.accounts)
        return accounts

    @property
    def rank_ns(self) -> int:
        """From each rank's first step to the end of its newest one, added up."""
        return self.accounts.total() + self.waits.total()

    @property
    def ranks(self) -> int:
        """How many ranks have sent steps."""
        return len(self._ends)

    def add_mark(self, mark: Mark) -> None:
        """Takes a mark of a pause."""
        phase = PAUSE_PHASES.get(mark.kind)
        if phase is not None and mark.end_ns is not None:
            marks = self._marks.setdefault(mark.rank, deque(maxlen=PENDING_MARKS))
            marks.append((phase, mark.start_ns, mark.end_ns))

    def reassign(self, ns: int, source: AccountKey, phase: str, rank: int | None) -> int:
        """Notes what a stall was that no stamp explains; returns how much of it that account had (ns).

        Args:
            ns: Rank-time of it.
            source: What it was taken for.
            phase: What all ranks did meanwhile.
            rank: The one that all others waited for instead.
        """
        ns = min(ns, self.accounts[source])
        self._accounts[source] -= ns
        if source != BARE:
            self._paused[source] += ns
        if rank is not None:
            self.waits[rank] += ns
        else:
            self._accounts[_KEYS[phase]] += ns
            self._paused[_KEYS[phase]] -= ns
        return ns

    def count_as_startup(self, rank: int, ns: int) -> None:
        """Notes how long others waited for a rank because it had begun later."""
        ns = min(ns, self.waits[rank])
        self.waits[rank] -= ns
        self.accounts[_STARTUP] += ns

    def add_step(self, across: StepAcrossRanks) -> StepSplit:
        """Takes the next step; returns its split."""
        steps = list(across.ranks.values())
        total_ns = sum([step.duration_ns for step in steps])
        found = StepSplit(across.step, total_ns, across.longest_ns, across.start_ns, across.end_ns)
        pauses = self._pauses(steps, found) if self._marks else {}
        if across.counted:
            self._split_watched(across, found, pauses)
        else:
            self._split_other(across, steps, found)
        self._add_gaps(steps, pauses)
        self._pending.append(found.accounts)
        if len(self._pending) >= MOST_PENDING:
            self._add_pending()
        for rank, ns in found.waits.items():
            self.waits[rank] += ns
        return found

    def _pauses(self, steps: Iterable[Step], found: StepSplit) -> dict[int, Pauses]:
        """Returns the pauses of each rank since its step before; notes how long they were, and what delays it."""
        pauses: dict[int, Pauses] = {}
        for step in steps:
            marks = self._marks.get(step.rank)
            if not marks:
                continue
            end, before = step.start_ns + step.duration_ns, self._ends.get(step.rank, step.start_ns)
            launched = step.start_ns + max(step.comm_launch, default=step.duration_ns)
            by_phase: dict[str, Intervals] = {}
            for phase, since, until in marks:
                if since < end:
                    by_phase.setdefault(phase, []).append((since, until))
            self._marks[step.rank] = deque((mark for mark in marks if mark[2] > launched), maxlen=PENDING_MARKS)
            if by_phase:
                found.marked_until[step.rank] = max(until for several in by_phase.values() for _, until in several)
                found.marked_until[step.rank] -= step.start_ns
                own = {phase: union(several) for phase, several in by_phase.items()}
                if paused := _paused(own, before, end):
                    pauses[step.rank], found.pauses[step.rank] = own, paused
                number, since = self._launched.get(step.rank, (step.step, before))
                if paused := _paused(own, since if number == step.step - 1 else before, launched):
                    found.delays[step.rank] = paused
                self._launched[step.rank] = step.step, launched
        return pauses

    def _split_watched(self, across: StepAcrossRanks, found: StepSplit, pauses: Mapping[int, Pauses]) -> None:
        buckets, waits = across.skew.buckets, found.waits
        compared: dict[int, Launched] = {}  # by the identity of the keys, which many ranks share
        rows: list[Mapping[str, int]] = []
        transferred = unknown = 0
        waited = waits_for_buffers(across)
        parts: dict[int, ExposedSplit] = {}
        for rank, facts in across.all_facts().items():
            phases: Mapping[str, int] = facts.figures.phases_ns
            exposed = facts.figures.exposed
            if rank in pauses:
                phases, exposed = _with_pauses(across.ranks[rank], exposed, pauses[rank])
            if exposed:
                start = facts.origin
                exposed = [(start + since, start + until) for since, until in exposed]
            rows.append(phases)
            if exposed and rank in waited:
                ns, travelled, exposed = waited[rank].split(exposed)
                if ns:
                    _add_ns(waits, waited[rank].awaited, ns)
                transferred += travelled
                found.buffers_ns += travelled
            if exposed:
                if (own := compared.get(id(facts.keys))) is None:
                    measured = facts.figures.comm_ns is not None
                    own = launched(facts.keys, buckets, {} if measured else self._transfers)
                    compared[id(facts.keys)] = own
                    self._add_transfers(facts, own.skews)
                part = parts[rank] = split_exposed(facts, exposed, own)
                transferred += part.transfer
                unknown += part.unknown
        explained = dict.fromkeys(parts, 0)
        for own_ns in own_times_by_group(across).values() if unknown else ():
            slowest = max(own_ns, key=own_ns.__getitem__)
            for rank in own_ns.keys() & parts.keys():
                ns = min(parts[rank].unknown, own_ns[slowest] - own_ns[rank]) - explained[rank]
                explained[rank] += ns
                unknown -= ns
                _add_ns(waits, slowest, ns)
        several = len({key[3] for key in buckets}) > 1
        for rank, part in parts.items():
            for last, ns in part.waits.items():
                held_up = last in waited and waited[last].explains(across.skew.late[last])
                before = parts.get(last) if several else None
                if before is not None and before.explains(across.skew.late[last], rank):
                    _add_ns(waits, before.mostly_for, ns)
                else:
                    _add_ns(waits, waited[last].awaited if held_up else last, ns)
        share = share_of(across, sum(waits.values()), transferred, unknown)
        alone = self._alone(across.ranks.values())
        for_pause = sum([min(waits.get(rank, 0), (len(across) - 1) * ns) for rank, ns in alone.items()])
        longer = self._beyond_usual(found, share.phases or {}) if self._is_stall(found) else {}
        longer["exposed_comm"] = min(max(for_pause, longer.get("exposed_comm", 0)), share.waited)
        share = across.share = share._replace(alone=alone, beyond=longer)
        self.estimator.add_share(share)
        spent = dict(share.phases or {})
        if pauses:
            unpaused, spent = spent, summed(rows)
            self._paused.update({_KEYS[phase]: ns - spent[phase] for phase, ns in unpaused.items() if phase in _KEYS})
        spent.pop("exposed_comm", None)
        if share.exposed is not None:
            self._beyond.append((share.waited - share.exposed) / share.ranks)
        else:
            transferred, unknown, beyond = self._without_copies(transferred, unknown, share.ranks)
            spent["other"] = spent.get("other", 0) + beyond
        found.accounts = {_KEYS[phase]: ns for phase, ns in spent.items() if ns}
        found.accounts[TRANSFER], found.accounts[EXPOSED] = transferred, unknown
        self.watched_ns += found.total
        if not for_pause:
            self._refer(found, len(across))

    def _add_transfers(self, facts: RankFacts, skews: Iterable[BucketSkew | None]) -> None:
        for key, skew, done in zip(facts.keys, skews, facts.done, strict=True):
            if skew is not None and done is not None:
                known = self._transfers.get(key)
                if known is None:
                    known = self._transfers[key] = RollingMedian(REFERENCES)
                known.add_value(max(0, done - skew.last))

    def _without_copies(self, transferred: int, unknown: int, ranks: int) -> tuple[int, int, int]:
        """Returns transfers without what full steps show that ranks wait beyond them, such as copies of results."""
        beyond = fmean(self._beyond) * ranks if self._beyond else 0.0
        beyond = max(0, min(int(beyond), transferred + unknown))
        of_unknown = beyond * unknown // max(transferred + unknown, 1)
        return transferred - beyond + of_unknown, unknown - of_unknown, beyond

    def _refer(self, found: StepSplit, ranks: int) -> None:
        """Keeps a watched step, for bare ones that are like it."""
        mean = found.total / max(ranks, 1)
        if self._references and mean > LONG * self._usual.median:
            self._long[of_duration(mean)] = mean, found
        else:
            self._references.append((mean, found))
            self._usual.add_value(mean)

    def _split_other(self, across: StepAcrossRanks, steps: Sequence[Step], found: StepSplit) -> None:
        """Splits a step that does not count."""
        share = across.share = StepShare(across.step, len(steps), found.total, alone=self._alone(steps))
        statuses = {step.status for step in steps}
        if "aborted" in statuses:
            found.accounts[_ABORTED] = found.total
        elif PROFILED in statuses:
            found.accounts[_PROFILED] = found.total
        elif "warmup" in statuses or not self._references:
            found.accounts[_STARTUP] = found.total
        else:
            for_pause = (len(steps) - 1) * sum(share.alone.values())
            mean = max(0, found.total - for_pause) / len(steps)
            mean_like, like = self._most_like(mean)
            found.like = like.step
            beyond = _scale(like, found, 1.0 if share.alone else LIKE)
            alike = sum(found.waits.values())
            _split_rest(found, steps, mean_like, beyond, share.alone)
            waiting = sum(found.waits.values())
            extra = waiting - alike
            longer = {"exposed_comm": extra, UNSEEN: beyond - extra}
            if not share.alone and self._is_stall(like):
                own = {phase: found.accounts.get(_KEYS[phase], 0) for phase in PHASES if phase in _KEYS}
                longer = self._beyond_usual(found, own) or longer
            share = across.share = share._replace(waiting=waiting, beyond=longer)
        if across.ordinary:
            self.estimator.add_share(share)
        if all(is_watched(status) for status in statuses):
            self.watched_ns += found.total

    def _most_like(self, mean: float) -> tuple[float, StepSplit]:
        """Returns the watched step, with its mean duration, that one of which only that is known is split like."""
        known = [*enumerate(reversed(self._references)), *((0, one) for one in self._long.values())]
        return min(known, key=lambda at: abs(at[1][0] - mean) + PER_OLDER * mean * at[0])[1]

    def _is_stall(self, found: StepSplit) -> bool:
        usual = self._usual.median if self._references else inf
        return found.longest_ns - usual >= max(STALL_NS, STALL_STEPS * usual)

    def _beyond_usual(self, stall: StepSplit, own: Mapping[str, int]) -> dict[str, int]:
        """Returns by what a stall is longer than a usual step, by phase.

        Args:
            stall: The step.
            own: Its phases without communication, over ranks.
        """
        usual = self._references[-1][1]
        longer = {phase: ns - usual.accounts.get(_KEYS[phase], 0) for phase, ns in own.items() if phase in _KEYS}
        longer["exposed_comm"] = sum(stall.waits.values()) - sum(usual.waits.values())
        longer[UNSEEN] = stall.accounts.get(BARE, 0)
        return {phase: ns for phase, ns in longer.items() if ns > 0}

    def _alone(self, steps: Iterable[Step]) -> dict[int, int]:
        """Returns by how much longer than the others each rank paused between its step before and this one (ns).

        The others wait for it meanwhile, in their steps.
        """
        gaps = {
            step.rank: step.start_ns - self._ends.get(step.rank, step.start_ns)
            for step in steps
            if step.step == self._numbers.get(step.rank, -1) + 1
        }
        shortest = max(0, min(gaps.values(), default=0))
        return {rank: ns - shortest for rank, ns in gaps.items() if ns > shortest}

    def _add_gaps(self, steps: Iterable[Step], pauses: Mapping[int, Pauses]) -> None:
        """Adds what lies between a rank's step before and this one: a validation, a checkpoint, or missing steps."""
        ends, numbers = self._ends, self._numbers
        self.gaps.clear()
        accounts: dict[AccountKey, int] = {}
        for step in steps:
            rank, start, number = step.rank, step.start_ns, step.step
            end, before = start + step.duration_ns, ends.get(rank, start)
            if start > before:
                missing = number > numbers.get(rank, number) + 1
                self.gaps[rank] = start - before
                left = [(before, start)]
                for phase, stretches in pauses[rank].items() if rank in pauses else ():
                    _add_ns(accounts, _KEYS[phase], total(intersect(left, stretches)))
                    left = subtract(left, stretches)
                ns = total(left)
                _add_ns(accounts, _UNSEEN if missing else OTHER, ns)
                self.between_steps_ns += 0 if missing else ns
            ends[rank], numbers[rank] = end if end > before else before, number
        if accounts:
            self._pending.append(accounts)


def _paused(stretches: Pauses, since: int, until: int) -> dict[str, int]:
    """Returns how long the pauses were in a time, by phase."""
    lasted = {phase: total_within(times, since, until) for phase, times in stretches.items()}
    return {phase: ns for phase, ns in lasted.items() if ns}


def _with_pauses(step: Step, exposed: Intervals, pauses: Pauses) -> tuple[dict[str, int], Intervals]:
    """Returns a rank's phases and exposed communication without its pauses, and these as phases of their own.

    ``exposed`` is relative to the step's start; pauses are on the rank's own clock, as the step is.
    """
    start = step.start_ns
    window = [(0, step.duration_ns)] if step.duration_ns else []
    relative = {
        phase: intersect([(since - start, until - start) for since, until in stretches], window)
        for phase, stretches in pauses.items()
    }
    phases = split(step.duration_ns, {**relative, **claims_of(step)})
    for stretches in relative.values():
        exposed = subtract(exposed, stretches)
    return phases, exposed


def _scale(like: StepSplit, found: StepSplit, most: float) -> int:
    """Splits a step as another one was; returns what goes beyond so many times that one's length."""
    size = like.total
    part = min(found.total, int(most * size))
    scaled = {key: ns * part // size for key, ns in like.accounts.items()} if size else {}
    waits = {rank: ns * part // size for rank, ns in like.waits.items()} if size else {}
    found.accounts.update(scaled)
    found.waits.update(waits)
    found.leads = like.leads
    found.buffers_ns = like.buffers_ns * part // size if size else 0
    rounding = part - sum(scaled.values()) - sum(waits.values())
    _add_ns(found.accounts, max(scaled, key=scaled.__getitem__, default=BARE), rounding)
    return found.total - part


def _split_rest(found: StepSplit, steps: Sequence[Step], usual: float, rest: int, alone: Mapping[int, int]) -> None:
    """Splits what a bare step took longer than others; marks or a pause before it may explain that."""
    paused = {**alone, **{rank: sum(phases.values()) for rank, phases in found.pauses.items()}}
    rank = max(paused, key=paused.__getitem__, default=None)
    if rank is None or 2 * paused[rank] * len(steps) < rest or not rest:
        _add_ns(found.accounts, BARE, rest)
        return
    duration = next((step.duration_ns for step in steps if step.rank == rank), 0)
    own = min(rest, max(0, int(duration - usual)))  # nothing if it paused before the step
    if marked := found.pauses.get(rank):
        _add_ns(found.accounts, _KEYS[max(marked, key=marked.__getitem__)], own)
    _add_ns(found.waits, rank, rest - own if marked else rest)


def _add_ns(sums: dict[_Key, int], key: _Key, ns: int) -> None:
    sums[key] = sums.get(key, 0) + ns
