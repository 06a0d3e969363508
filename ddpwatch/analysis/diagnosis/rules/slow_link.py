"""Transfers that have become slower than they were, in all process groups or in some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.buckets import bus_bandwidths
from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import LOOK_AGAIN_NS, DeviceCause, DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.thresholds import KEEP_ENDED
from ddpwatch.analysis.diagnosis.words.wording import ranks_named
from ddpwatch.common.statistics import RollingMedian

NEWEST = 5  # full steps, all of them slower
FEWEST_BEFORE = 8  # full steps before them
SLOWER = 1.5  # transfers take so many times as long
HALFWAY = (1 + SLOWER) / 2  # as long: below that, they are as fast as before
SHARE = 0.03  # of a step longer, at least
KEEP = 64  # full steps
GONE = 1024  # steps without a transfer, after which a group is forgotten
KEEP_SPLITS = 256


class _Transfers(NamedTuple):
    """What a group's transfers add up to in a full step (ns): at least, and at most, as clocks may hide some."""

    step: int
    least: int
    most: int


class _GroupTransfers:
    """A group's transfers in the newest full steps.

    Attributes:
        base: What they took (ns) before they became slower.
        slow_since: The first step in which they were slower.
        moved: What crosses a rank's link in a step (bytes), of which busbw is the rate; 0 if that is not known.
        seen: The newest step.
    """

    def __init__(self) -> None:
        self.base = self.moved = 0.0
        self.slow_since = self.seen = 0
        self._steps: deque[_Transfers] = deque(maxlen=KEEP)
        self._older = RollingMedian(KEEP - NEWEST)  # of all but the newest, at most

    def add_transfers(self, transfers: _Transfers) -> None:
        if len(self._steps) >= NEWEST:
            self._older.add_value(self._steps[-NEWEST].most)
        self._steps.append(transfers)
        self.seen = transfers.step

    def became_slower(self, longest_ns: int) -> bool:
        """Returns whether each of the newest steps is slower than those before."""
        if len(self._older) < FEWEST_BEFORE:
            return False
        base = self._older.median
        limit = max(SLOWER * base, base + SHARE * longest_ns)
        if not base or not all(ns > limit for ns in self._newest()):
            return False
        self.base, self.slow_since = base, self._steps[-NEWEST].step
        return True

    @property
    def recovered(self) -> bool:
        """Whether each of the newest steps is as fast as before."""
        return max(self._newest()) < HALFWAY * self.base

    @property
    def slower(self) -> float:
        """How many times as long they take since then."""
        return median(one.least for one in self._steps if one.step >= self.slow_since) / self.base

    def _newest(self) -> Iterator[int]:
        return (one.least for one in islice(reversed(self._steps), NEWEST))


class SlowLink:
    """Finds them as steps come. All that are slower at a time are one incident.

    Args:
        devices: What may be why.

    Attributes:
        since_end: Full steps since the newest one that is over.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self.since_end = 0
        self._devices = devices
        self._cause: DeviceCause | None = None
        self._start_ns = self._end_ns = self._looked_ns = 0
        self._groups: dict[int, _GroupTransfers] = {}
        self._slow: dict[int, _GroupTransfers] = {}
        self._ranks: set[int] = set()  # members of these groups
        self._all = False  # whether these are all ranks
        self._since: int | None = None
        self._until = self._count = self._cost_ns = self._span_ns = 0
        self._recent: deque[StepSplit] = deque(maxlen=KEEP_SPLITS)
        self._base_share = 0.0
        self._ended: deque[Incident] = deque(maxlen=KEEP_ENDED)

    def add_step(self, across: StepAcrossRanks) -> None:
        """Takes a full step."""
        found = _transfers(across)
        for group, transfers in found.items():
            self._groups.setdefault(group, _GroupTransfers()).add_transfers(transfers)
        self.since_end += 1
        for group in found:
            if group not in self._slow and self._groups[group].became_slower(across.longest_ns):
                self._add_group(group, across)
        if self._slow and self._end_ns - self._looked_ns >= LOOK_AGAIN_NS:
            self._looked_ns = self._end_ns
            self._cause = self._devices.cause_among(self._among, self._start_ns, self._end_ns)
        if self._slow and all(one.recovered or across.step - one.seen > GONE for one in self._slow.values()):
            self._ended.append(self._incident(is_open=False))
            self._since, self._count, self._cost_ns, self._span_ns = None, 0, 0, 0
            self._cause, self._looked_ns = None, 0
            self._slow, self._ranks, self.since_end = {}, set(), 0
        for group in [group for group, one in self._groups.items() if across.step - one.seen > GONE]:
            del self._groups[group]

    def _add_group(self, group: int, across: StepAcrossRanks) -> None:
        """Takes a group's transfers, which may have become slower."""
        one = self._slow[group] = self._groups[group]
        one.moved = _moved(across, group)
        self._ranks.update(across.members_of(group) or across.members)
        self._all = self._ranks >= set(across.members)
        if self._since is None:
            self._since = one.slow_since
            self._start(across.step)

    def _start(self, step: int) -> None:
        """Counts the steps since the first slower one."""
        steps, since = list(self._recent), self._since or 0
        before = [split.transfer_ns / split.total for split in steps if split.step < since and split.total]
        self._base_share = median(before) if before else 0.0
        for split in steps:
            if since <= split.step < step:
                self._add_split(split)

    def count(self, split: StepSplit) -> None:
        """Takes any step's split."""
        self._recent.append(split)
        if self._since is not None:
            self._add_split(split)

    def _add_split(self, split: StepSplit) -> None:
        if not self._count:
            self._start_ns = split.start_ns
        self._end_ns = split.end_ns
        self._count += 1
        self._cost_ns += max(0, int(split.transfer_ns - self._base_share * split.total))
        self._span_ns += split.total
        self._until = split.step

    def incidents(self) -> list[Incident]:
        """Returns those that are over, and the one that lasts."""
        return [*self._ended, *([self._incident(is_open=True)] if self._since is not None else [])]

    @property
    def _among(self) -> tuple[int, ...]:
        """The ranks whose transfers are slower; empty for all."""
        return () if self._all else tuple(sorted(self._ranks))

    def _incident(self, is_open: bool) -> Incident:
        slowest = max(self._slow.values(), key=lambda one: one.slower)
        before = slowest.moved / slowest.base
        busbw = (before, before / slowest.slower) if before else None
        gain = self._cost_ns / self._span_ns if self._span_ns else None
        minor = slowest.slower < HALFWAY or (gain is not None and gain < SHARE)
        incident = Incident(
            kind="slow_link",
            severity="info" if minor else "warning",
            message=link_sentence(slowest.slower, self._among, busbw, is_open),
            ranks=self._among,
            phase="exposed_comm",
            since_step=self._since,
            until_step=self._until,
            steps=self._count,
            cost_ns=self._cost_ns,
            gain=gain,
            open=is_open,
            evidence=Evidence(slower=slowest.slower, busbw_gbps=busbw and list(busbw)),
        )
        return because(incident, self._cause)


def _transfers(across: StepAcrossRanks) -> dict[int, _Transfers]:
    """Returns what the transfers of each group add up to; one within the clocks' error takes that at most."""
    skew, found = across.skew, dict[int, tuple[int, int]]()
    for key, bucket in skew.buckets.items():
        least, most = found.get(key[3], (0, 0))
        known = bucket.transfer
        found[key[3]] = least + (known or 0), most + (skew.error if known is None else known)
    return {group: _Transfers(across.step, *ns) for group, ns in found.items()}


def _moved(across: StepAcrossRanks, group: int) -> float:
    """Returns what crosses each rank's link in a step, as busbw counts it (bytes); of transfers that are known."""
    buckets = across.skew.buckets
    rates = ((buckets[key].transfer, rate) for key, rate in bus_bandwidths(across).items() if key[3] == group)
    return sum(ns * rate / 1e9 for ns, rate in rates if ns is not None and rate is not None)


def link_sentence(slower: float, ranks: Sequence[int], busbw: tuple[float, float] | None, is_open: bool) -> str:
    """Says that transfers have become slower.

    Args:
        slower: How many times as long they take.
        ranks: Among these; empty for all.
        busbw: Before and since (GB/s).
        is_open: Whether that lasts.
    """
    among = f" among {ranks_named(ranks)}" if ranks else ""
    text = f"transfers{among} {'take' if is_open else 'took'} {slower:.1f} times as long as before"
    return text if busbw is None else f"{text} (busbw {busbw[1]:.3g} instead of {busbw[0]:.3g} GB/s)"
