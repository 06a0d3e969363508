"""What slows all ranks alike: exposed transfers, slow input, a link that becomes slower, a run that does."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import median
from typing import cast

from ddpwatch.analysis.diagnosis.accounts import EXPOSED, TRANSFER, StepSplit
from ddpwatch.analysis.diagnosis.cause import StepFacts
from ddpwatch.analysis.diagnosis.incident import Incident, Kind, ModuleBucket
from ddpwatch.analysis.diagnosis.rolling import RollingMedian
from ddpwatch.analysis.diagnosis.sentences import (
    LayerNames,
    drift_sentence,
    exposed_sentence,
    input_sentence,
    link_sentence,
)
from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS, EXPOSED_SHARE, INPUT_SHARE
from ddpwatch.analysis.launch_skew import common_keys

WINDOW = 16  # newest watched steps
WORTH_A_LOOK = 0.02  # of a step: less input, or exposed transfer, is none
CLEARED = 0.7  # of the share at which an incident starts: below that, it is over
AGAIN = 256  # steps from one to the next, up to which they are one incident
LINK_STEPS = 5  # newest full steps, all of them slower
LINK_BASE = 8  # full steps before them, at least
LINK_SLOWER = 1.5  # transfers take so many times as long
LINK_SHARE = 0.03  # of a step, at least
KEEP_LINK = 64  # full steps
BLOCK_STEPS = 32  # of the steps whose median makes one point of a trend
TREND_BLOCKS = 8
KEEP_BLOCKS = 256
TREND_GROWTH = 0.15
TREND_RISING = 0.8  # Kendall's tau, at least
TREND_JUMP = 0.5  # of the growth, that one block may make at most: more is no drift
KEEP_ENDED = 64


@dataclass(slots=True)
class _Spell:
    """Steps in which an account's share is high.

    Attributes:
        unknown_ns: Exposed communication that may be waiting or transfer.
    """

    since: int
    until: int = 0
    count: int = 0
    cost_ns: int = 0
    span_ns: int = 0
    unknown_ns: int = 0

    def add(self, split: StepSplit, ns: int) -> None:
        """Counts a step, and what the account has of it."""
        self.count += 1
        self.cost_ns += ns
        self.span_ns += split.total
        self.unknown_ns += split.accounts.get(EXPOSED, 0)
        self.until = split.step

    def joined(self, later: _Spell) -> _Spell:
        """Both, without what lies in between."""
        sums = (getattr(self, name) + getattr(later, name) for name in ("count", "cost_ns", "span_ns", "unknown_ns"))
        return _Spell(self.since, later.until, *sums)


@dataclass(slots=True)
class _Share:
    """An account whose share of a step may be high.

    Attributes:
        spell: While it is.
        over: Spells that are over.
    """

    kind: Kind
    share: float
    account: Callable[[StepSplit], int]
    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    middle: RollingMedian = field(default_factory=lambda: RollingMedian(WINDOW))
    spell: _Spell | None = None
    over: deque[_Spell] = field(default_factory=lambda: deque(maxlen=KEEP_ENDED))

    def add(self, step: int, value: float) -> _Spell | None:
        """Takes a watched step; returns the spell that starts to show with it."""
        self.values.append(value)
        self.steps.append(step)
        self.middle.add(value)
        if len(self.values) < ENOUGH_STEPS:
            return None
        newest = self.middle.median
        if self.spell is None and newest >= self.share:
            self.spell = _Spell(
                next(at for at, found in zip(self.steps, self.values, strict=True) if found >= self.share)
            )
            return self.spell
        if self.spell is not None and newest < CLEARED * self.share:
            self.over.append(self.spell)
            self.spell = None
            for kept in (self.values, self.steps, self.middle):
                kept.clear()
        return None


class WholeRun:
    """Finds what slows all ranks alike."""

    def __init__(self) -> None:
        self._exposed = _Share("exposed_comm", EXPOSED_SHARE, _transfer)
        self._input = _Share("slow_input", INPUT_SHARE, _input)
        self._splits: deque[StepSplit] = deque(maxlen=4 * WINDOW)
        self._bucket_ns: Counter[ModuleBucket] = Counter()
        self._last_bucket = 0, 0
        self._measured = False  # whether completions are measured at all
        self._link = _Link()
        self._trend = _Trend()

    def add(self, facts: StepFacts) -> None:
        """Takes the next step."""
        across, split = facts.across, facts.split
        transfer, waits = _transfer(split), _input(split)
        self._splits.append(split)
        if across.counted and split.total:
            if across.full and None not in [one.figures.comm_ns for one in across.all_facts().values()]:
                self._measured = True
                if transfer > WORTH_A_LOOK * split.total:
                    self._note_buckets(facts)
                self._link.add(facts)
            if self._measured:
                self._follow(self._exposed, split, transfer)
            self._follow(self._input, split, _common_input(facts) if waits else 0)
        for share in (self._exposed, self._input):
            if share.spell is not None:
                share.spell.add(split, share.account(split))
        self._link.count(split)
        if across.counted:
            self._trend.add(facts)

    def _follow(self, share: _Share, split: StepSplit, ns: int) -> None:
        if (spell := share.add(split.step, ns / split.total)) is not None:
            for before in self._splits:
                if spell.since <= before.step < split.step:
                    spell.add(before, share.account(before))

    def _note_buckets(self, facts: StepFacts) -> None:
        """Per bucket of a measured step, what is exposed on the rank that waits least: that is its transfer."""
        found = list(facts.across.all_facts().values())
        keys = common_keys(found)
        if keys is None:
            return
        columns = cast("Iterator[tuple[int, ...]]", zip(*[fact.exposed for fact in found], strict=True))
        for key, least in zip(keys, map(min, columns), strict=True):
            self._bucket_ns[key[:2]] += least
        if keys:
            self._last_bucket = keys[-1][:2]

    def _share_incidents(self, share: _Share, names: LayerNames | None) -> Iterator[Incident]:
        """What lasts or comes again soon is one incident. What a slower link explains is none."""
        joined: list[_Spell] = []
        for spell in (*share.over, *([] if share.spell is None else [share.spell])):
            if share is self._exposed and self._link.explains(spell.since, spell is share.spell):
                continue
            if joined and spell.since - joined[-1].until <= AGAIN:
                joined[-1] = joined[-1].joined(spell)
            else:
                joined.append(spell)
        for spell in joined:
            is_open = share.spell is not None and spell.until == share.spell.until
            yield self._share_incident(share, spell, names, is_open)

    def _share_incident(self, share: _Share, spell: _Spell, names: LayerNames | None, is_open: bool) -> Incident:
        per_step = spell.cost_ns / spell.span_ns if spell.span_ns else 0.0
        bucket = None
        if share is self._exposed:
            bucket = max(self._bucket_ns, key=self._bucket_ns.__getitem__, default=None)
            is_split = 2 * spell.unknown_ns <= spell.cost_ns
            message = exposed_sentence(per_step, bucket, bucket == self._last_bucket, names, is_open, is_split)
        else:
            message = input_sentence(per_step, is_open)
        module, index = bucket or (None, None)
        return Incident(
            kind=share.kind,
            severity="warning" if per_step >= share.share else "info",
            message=message,
            phase="exposed_comm" if share is self._exposed else "data",
            module=module,
            bucket=index,
            since_step=spell.since,
            until_step=spell.until,
            steps=spell.count,
            cost_ns=spell.cost_ns,
            gain=per_step,
            open=is_open,
            evidence={"share_of_step": per_step},
        )

    def incidents(self, names: LayerNames | None) -> list[Incident]:
        """All that were found. Transfers that are exposed because they became slower are one incident."""
        return [
            *self._share_incidents(self._exposed, names),
            *self._share_incidents(self._input, names),
            *self._link.incidents(),
            *self._trend.incidents(),
        ]


def _transfer(split: StepSplit) -> int:
    """Exposed communication that is not waiting for a rank, as far as the two can be distinguished."""
    accounts = split.accounts
    return accounts.get(TRANSFER, 0) + accounts.get(EXPOSED, 0)


def _input(split: StepSplit) -> int:
    """What ranks waited for data."""
    return split.accounts.get(("input", "data"), 0)


def _common_input(facts: StepFacts) -> int:
    """What all ranks alike wait for data: three quarters of them at least that long."""
    if _input(facts.split) < WORTH_A_LOOK * facts.split.total:
        return 0
    waits = sorted(figures.phases_ns.get("data", 0) for figures in facts.across.figures.values())
    return waits[len(waits) // 4] * len(waits)


class _Link:
    """Transfers that have become slower than they were."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=KEEP_LINK)  # step, transfer
        self._older = RollingMedian(KEEP_LINK - LINK_STEPS)  # of them, all but the newest
        self._base: float | None = None
        self._since: int | None = None
        self._until = self._count = self._cost_ns = self._span_ns = 0
        self._since_end = 0  # full steps since the newest one that is over
        self._slower = 1.0
        self._recent: deque[StepSplit] = deque(maxlen=4 * KEEP_LINK)
        self._base_share = 0.0
        self._ended: deque[Incident] = deque(maxlen=KEEP_ENDED)

    def add(self, facts: StepFacts) -> None:
        """Takes a full step."""
        transfers = [skew.transfer for skew in facts.across.skew.buckets.values()]
        if not transfers or None in transfers:
            return
        if len(self._steps) >= LINK_STEPS:
            self._older.add(self._steps[-LINK_STEPS][1])
        self._steps.append((facts.across.step, sum(cast("list[int]", transfers))))
        self._since_end += 1
        if self._since is None:
            if len(self._older) < LINK_BASE:
                return
            base = self._older.median
            limit = max(LINK_SLOWER * base, base + LINK_SHARE * facts.across.longest_ns)
            if self._steps[-1][1] > limit and all(transfer > limit for _, transfer in self._newest()):
                self._since, self._base = self._steps[-LINK_STEPS][0], base
                self._start(facts.across.step)
        if self._since is not None and self._base:
            self._slower = median(transfer for step, transfer in self._steps if step >= self._since) / self._base
            if all(transfer < (1 + LINK_SLOWER) / 2 * self._base for _, transfer in self._newest()):
                self._ended.append(self._incident(is_open=False))
                self._since, self._count, self._cost_ns, self._span_ns = None, 0, 0, 0
                self._since_end = 0

    def _newest(self) -> Iterator[tuple[int, int]]:
        return islice(reversed(self._steps), LINK_STEPS)

    def _start(self, step: int) -> None:
        """Counts the steps since the first slower one."""
        steps = list(self._recent)
        before = [_transfer(split) / split.total for split in steps if split.step < (self._since or 0) and split.total]
        self._base_share = median(before) if before else 0.0
        for split in steps:
            if (self._since or 0) <= split.step < step:
                self._add(split)

    def count(self, split: StepSplit) -> None:
        """Takes any step's split."""
        self._recent.append(split)
        if self._since is not None:
            self._add(split)

    def _add(self, split: StepSplit) -> None:
        self._count += 1
        self._cost_ns += max(0, int(_transfer(split) - self._base_share * split.total))
        self._span_ns += split.total
        self._until = split.step

    def explains(self, since: int, is_open: bool) -> bool:
        """Whether transfers are only exposed while they are slower, or were a window ago.

        Args:
            since: The first step in which they are exposed.
            is_open: Whether they still are.
        """
        lasts = is_open and self._since_end >= WINDOW
        return any(
            found.since_step is not None
            and since >= found.since_step - 2 * WINDOW
            and (found.open or (since <= (found.until_step or 0) and not lasts))
            for found in self.incidents()
        )

    def incidents(self) -> list[Incident]:
        """Those that are over, and the one that lasts."""
        return [*self._ended, *([self._incident(is_open=True)] if self._since is not None else [])]

    def _incident(self, is_open: bool) -> Incident:
        return Incident(
            kind="slow_link",
            severity="warning",
            message=link_sentence(self._slower, is_open),
            phase="exposed_comm",
            since_step=self._since,
            until_step=self._until,
            steps=self._count,
            cost_ns=self._cost_ns,
            gain=self._cost_ns / self._span_ns if self._span_ns else None,
            open=is_open,
            evidence={"slower": self._slower},
        )


class _Trend:
    """A run that gets slower and slower, on all ranks alike."""

    def __init__(self) -> None:
        self._block: list[int] = []
        self._blocks: list[tuple[int, float]] = []
        self._every = 1  # how many blocks of steps make one of them

    def add(self, facts: StepFacts) -> None:
        """Takes the next step that counts."""
        self._block.append(facts.split.total - sum(facts.split.waits.values()))
        if len(self._block) < BLOCK_STEPS * self._every:
            return
        self._blocks.append((facts.across.step, median(self._block)))
        self._block = []
        if len(self._blocks) >= KEEP_BLOCKS:
            self._blocks = self._blocks[1::2]
            self._every *= 2

    def incidents(self) -> list[Incident]:
        """The drift so far, if there is one."""
        values = [value for _, value in self._blocks]
        if len(values) < TREND_BLOCKS or not _rises(values):
            return []
        base = min(values[:2])
        growth = values[-1] / base - 1
        cost = int(sum(max(0.0, value - base) for value in values) * BLOCK_STEPS * self._every)
        return [
            Incident(
                kind="drift",
                severity="warning",
                message=drift_sentence(growth),
                since_step=self._blocks[0][0],
                until_step=self._blocks[-1][0],
                steps=len(values) * BLOCK_STEPS * self._every,
                cost_ns=cost,
                gain=1 - base / values[-1],
                open=True,
                evidence={"growth": growth},
            )
        ]


def _rises(values: Sequence[float]) -> bool:
    """Whether the values grow steadily, and not at once."""
    growth = values[-1] - min(values[:2])
    if growth < TREND_GROWTH * min(values[:2]):
        return False
    jumps = [after - before for before, after in pairwise(values)]
    pairs = [(a, b) for index, a in enumerate(values) for b in values[index + 1 :]]
    tau = sum((b > a) - (b < a) for a, b in pairs) / len(pairs)
    return tau >= TREND_RISING and max(jumps) <= TREND_JUMP * growth
