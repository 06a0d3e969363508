"""What slows all ranks alike: exposed transfers, slow input, and a link, a run or devices that become slower."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import cast

from ddpwatch.analysis.diagnosis.accounts.accounts import EXPOSED, StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, Kind, ModuleBucket
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS, EXPOSED_SHARE, INPUT_SHARE, KEEP_ENDED, OVER_SHARE
from ddpwatch.analysis.diagnosis.whole_run.run_drift import RunDrift
from ddpwatch.analysis.diagnosis.whole_run.slow_device import SlowDevice
from ddpwatch.analysis.diagnosis.whole_run.slow_link import SlowLink
from ddpwatch.analysis.diagnosis.words.sentences import (
    LayerNames,
    exposed_sentence,
    input_sentence,
)
from ddpwatch.analysis.launch_skew import common_keys
from ddpwatch.analysis.step import BucketKeys
from ddpwatch.common.statistics import RollingMedian

WINDOW = 16  # newest watched steps
WORTH_A_LOOK = 0.02  # of a step: less input, or exposed transfer, is none
AGAIN = 256  # steps from one to the next, up to which they are one incident


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

    def add_split(self, split: StepSplit, ns: int) -> None:
        """Counts a step, and what the account has of it."""
        self.count += 1
        self.cost_ns += ns
        self.span_ns += split.total
        self.unknown_ns += split.accounts.get(EXPOSED, 0)
        self.until = split.step

    def joined(self, later: _Spell) -> _Spell:
        """Returns both, without what lies in between."""
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

    def add_value(self, step: int, value: float) -> _Spell | None:
        """Takes a watched step; returns the spell that starts to show with it."""
        self.values.append(value)
        self.steps.append(step)
        self.middle.add_value(value)
        if len(self.values) < ENOUGH_STEPS:
            return None
        newest = self.middle.median
        if self.spell is None and newest >= self.share:
            self.spell = _Spell(
                next(at for at, found in zip(self.steps, self.values, strict=True) if found >= self.share)
            )
            return self.spell
        if self.spell is not None and newest < OVER_SHARE * self.share:
            self.over.append(self.spell)
            self.spell = None
            for kept in (self.values, self.steps, self.middle):
                kept.clear()
        return None


class WholeRun:
    """Finds what slows all ranks alike.

    Args:
        devices: What may be why.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self._exposed = _Share("exposed_comm", EXPOSED_SHARE, attrgetter("transfer_ns"))
        self._input = _Share("slow_input", INPUT_SHARE, _input)
        self._splits: deque[StepSplit] = deque(maxlen=4 * WINDOW)
        self._bucket_ns: Counter[ModuleBucket] = Counter()
        self._order: tuple[ModuleBucket, ...] = ()  # as launched; empty where each is used more than once
        self._measured = False  # whether completions are measured at all
        self._link = SlowLink(devices)
        self._drift = RunDrift(devices)
        self._device = SlowDevice(devices)

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        across, split = facts.across, facts.split
        transfer, waits = split.transfer_ns, _input(split)
        self._splits.append(split)
        if across.counted and split.total:
            if across.full and None not in [one.figures.comm_ns for one in across.all_facts().values()]:
                self._measured = True
                if transfer > WORTH_A_LOOK * split.total:
                    self._note_buckets(facts)
                self._link.add_step(across)
            if self._measured:
                self._follow(self._exposed, split, transfer)
            self._follow(self._input, split, _common_input(facts) if waits else 0)
        for share in (self._exposed, self._input):
            if share.spell is not None:
                share.spell.add_split(split, share.account(split))
        self._link.count(split)
        if across.counted:
            own_ns = split.total - sum(split.waits.values())
            self._drift.add_step(split.step, own_ns, split.start_ns)
            self._device.add_step(split.step, own_ns, split.start_ns)

    def _follow(self, share: _Share, split: StepSplit, ns: int) -> None:
        if (spell := share.add_value(split.step, ns / split.total)) is not None:
            for before in self._splits:
                if spell.since <= before.step < split.step:
                    spell.add_split(before, share.account(before))

    def _note_buckets(self, facts: StepFacts) -> None:
        """Notes per bucket of a measured step what is exposed on the rank that waits least: that is its transfer."""
        found = list(facts.across.all_facts().values())
        keys = common_keys(found)
        if keys is None:
            return
        columns = cast("Iterator[tuple[int, ...]]", zip(*[fact.exposed for fact in found], strict=True))
        for key, least in zip(keys, map(min, columns), strict=True):
            if least:
                self._bucket_ns[key[:2]] += least
        self._order = _order(keys)

    def _which(self, bucket: ModuleBucket) -> str:
        """Returns whether it is the first one, in the middle, the last one, or the only one.

        Empty if that is not known.
        """
        if bucket not in self._order:
            return ""
        if len(self._order) == 1:
            return "only"
        return {self._order[0]: "first", self._order[-1]: "last"}.get(bucket, "middle")

    def _share_incidents(self, share: _Share, names: LayerNames | None) -> Iterator[Incident]:
        """Yields an incident for what lasts, or comes again soon; none for what a slower link explains."""
        joined: list[_Spell] = []
        for spell in (*share.over, *([] if share.spell is None else [share.spell])):
            if share is self._exposed and self._slower_link_explains(spell.since, spell is share.spell):
                continue
            if joined and spell.since - joined[-1].until <= AGAIN:
                joined[-1] = joined[-1].joined(spell)
            else:
                joined.append(spell)
        for spell in joined:
            is_open = share.spell is not None and spell.until == share.spell.until
            yield self._share_incident(share, spell, names, is_open)

    def _slower_link_explains(self, since: int, is_open: bool) -> bool:
        """Returns whether transfers are only exposed while they are slower, or were a window ago.

        Args:
            since: The first step in which they are exposed.
            is_open: Whether they still are.
        """
        lasts = is_open and self._link.since_end >= WINDOW
        return any(
            found.since_step is not None
            and since >= found.since_step - 2 * WINDOW
            and (found.open or (since <= (found.until_step or 0) and not lasts))
            for found in self._link.incidents()
        )

    def _share_incident(self, share: _Share, spell: _Spell, names: LayerNames | None, is_open: bool) -> Incident:
        per_step = spell.cost_ns / spell.span_ns if spell.span_ns else 0.0
        bucket, which = None, ""
        if share is self._exposed:
            bucket = max(self._bucket_ns, key=self._bucket_ns.__getitem__, default=None)
            is_split = 2 * spell.unknown_ns <= spell.cost_ns
            which = "" if bucket is None else self._which(bucket)
            message = exposed_sentence(per_step, bucket, which, names, is_open, is_split)
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
            evidence=Evidence(share_of_step=per_step, bucket_place=which or None),
        )

    def incidents(self, names: LayerNames | None) -> list[Incident]:
        """Returns all that were found. Transfers that are exposed because they became slower are one incident."""
        return [
            *self._share_incidents(self._exposed, names),
            *self._share_incidents(self._input, names),
            *self._link.incidents(),
            *self._drift.incidents(),
            *self._device.incidents(),
        ]


@lru_cache(maxsize=64)
def _order(keys: BucketKeys) -> tuple[ModuleBucket, ...]:
    """Returns the buckets as they are launched; none if each is used more than once."""
    return () if any(key[4] for key in keys) else tuple(dict.fromkeys(key[:2] for key in keys))


def _input(split: StepSplit) -> int:
    """Returns what ranks waited for data."""
    return split.accounts.get(("input", "data"), 0)


def _common_input(facts: StepFacts) -> int:
    """Returns what all ranks alike wait for data: three quarters of them at least that long."""
    if _input(facts.split) < WORTH_A_LOOK * facts.split.total:
        return 0
    waits = sorted(figures.phases_ns.get("data", 0) for figures in facts.across.figures.values())
    return waits[len(waits) // 4] * len(waits)
