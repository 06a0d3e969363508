"""Transfers that have become slower than they were, in all process groups or in some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from statistics import median

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.buckets import bus_bandwidths
from ddpwatch.analysis.diagnosis.accounts import StepSplit
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.rolling import RollingMedian
from ddpwatch.analysis.diagnosis.sentences import link_sentence

NEWEST = 5  # full steps, all of them slower
FEWEST_BEFORE = 8  # full steps before them
SLOWER = 1.5  # transfers take so many times as long
SHARE = 0.03  # of a step longer, at least
KEEP = 64  # full steps
KEEP_SPLITS = 256
KEEP_ENDED = 64


class _GroupTransfers:
    """What a group's transfers add up to in the newest full steps (ns).

    Attributes:
        base: That before they became slower.
        moved: What crosses a rank's link in a step (bytes), of which busbw is the rate; 0 if that is not known.
    """

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int]] = deque(maxlen=KEEP)
        self.base = self.moved = 0.0
        self._older = RollingMedian(KEEP - NEWEST)  # of all but the newest

    def add(self, step: int, ns: int) -> None:
        if len(self.steps) >= NEWEST:
            self._older.add(self.steps[-NEWEST][1])
        self.steps.append((step, ns))

    def slower_since(self, longest_ns: int) -> int | None:
        """The first of the newest steps if each of them is slower than before."""
        if len(self._older) < FEWEST_BEFORE:
            return None
        self.base = self._older.median
        limit = max(SLOWER * self.base, self.base + SHARE * longest_ns)
        return self.steps[-NEWEST][0] if min(self._newest()) > limit else None

    @property
    def recovered(self) -> bool:
        """Whether each of the newest steps is as fast as before."""
        return max(self._newest()) < (1 + SLOWER) / 2 * self.base

    def since(self, step: int) -> float:
        """What they add up to from that step on."""
        return median(ns for at, ns in self.steps if at >= step)

    def _newest(self) -> Iterator[int]:
        return (ns for _, ns in islice(reversed(self.steps), NEWEST))


class SlowLink:
    """Finds them as steps come.

    Attributes:
        since_end: Full steps since the newest one that is over.
    """

    def __init__(self) -> None:
        self.since_end = 0
        self._groups: dict[int, _GroupTransfers] = {}
        self._slow: list[_GroupTransfers] = []
        self._ranks: tuple[int, ...] = ()  # members of these groups, unless all are
        self._since: int | None = None
        self._until = self._count = self._cost_ns = self._span_ns = 0
        self._slower = 1.0
        self._recent: deque[StepSplit] = deque(maxlen=KEEP_SPLITS)
        self._base_share = 0.0
        self._ended: deque[Incident] = deque(maxlen=KEEP_ENDED)

    def add(self, across: StepAcrossRanks) -> None:
        """Takes a full step."""
        sums = _sums(across)
        if not sums:
            return
        for group, ns in sums.items():
            self._groups.setdefault(group, _GroupTransfers()).add(across.step, ns)
        self.since_end += 1
        if self._since is None:
            self._look(across, sums)
        if self._since is not None:
            self._slower = max(one.since(self._since) / one.base for one in self._slow if one.base)
            if all(one.recovered for one in self._slow):
                self._ended.append(self._incident(is_open=False))
                self._since, self._count, self._cost_ns, self._span_ns = None, 0, 0, 0
                self.since_end = 0

    def _look(self, across: StepAcrossRanks, groups: Mapping[int, int]) -> None:
        """Whether transfers of some groups have become slower."""
        starts = {group: self._groups[group].slower_since(across.longest_ns) for group in groups}
        slow = [group for group, since in starts.items() if since is not None and self._groups[group].base]
        if not slow:
            return
        self._since = min(since for since in starts.values() if since is not None)
        self._slow = [self._groups[group] for group in slow]
        members = {rank for group in slow for rank in across.members_of(group) or across.members}
        self._ranks = tuple(sorted(members)) if members < set(across.members) else ()
        for group in slow:
            self._groups[group].moved = _moved(across, group)
        self._start(across.step)

    def _start(self, step: int) -> None:
        """Counts the steps since the first slower one."""
        steps, since = list(self._recent), self._since or 0
        before = [split.transfer_ns / split.total for split in steps if split.step < since and split.total]
        self._base_share = median(before) if before else 0.0
        for split in steps:
            if since <= split.step < step:
                self._add(split)

    def count(self, split: StepSplit) -> None:
        """Takes any step's split."""
        self._recent.append(split)
        if self._since is not None:
            self._add(split)

    def _add(self, split: StepSplit) -> None:
        self._count += 1
        self._cost_ns += max(0, int(split.transfer_ns - self._base_share * split.total))
        self._span_ns += split.total
        self._until = split.step

    def incidents(self) -> list[Incident]:
        """Those that are over, and the one that lasts."""
        return [*self._ended, *([self._incident(is_open=True)] if self._since is not None else [])]

    def _incident(self, is_open: bool) -> Incident:
        slowest = max(self._slow, key=lambda one: one.since(self._since or 0) / one.base)
        before = slowest.moved / slowest.base
        busbw = (before, before / self._slower) if before else None
        return Incident(
            kind="slow_link",
            severity="warning",
            message=link_sentence(self._slower, self._ranks, busbw, is_open),
            ranks=self._ranks,
            phase="exposed_comm",
            since_step=self._since,
            until_step=self._until,
            steps=self._count,
            cost_ns=self._cost_ns,
            gain=self._cost_ns / self._span_ns if self._span_ns else None,
            open=is_open,
            evidence={"slower": self._slower, **({} if busbw is None else {"busbw_gbps": list(busbw)})},
        )


def _sums(across: StepAcrossRanks) -> dict[int, int]:
    """What the transfers of each group add up to; one within the clocks' error counts as that error."""
    skew, found = across.skew, dict[int, int]()
    for key, bucket in skew.buckets.items():
        found[key[3]] = found.get(key[3], 0) + (skew.error if bucket.transfer is None else bucket.transfer)
    return found


def _moved(across: StepAcrossRanks, group: int) -> float:
    """What crosses each rank's link in a step, as busbw counts it (bytes); of transfers that are known."""
    buckets = across.skew.buckets
    rates = ((buckets[key].transfer, rate) for key, rate in bus_bandwidths(across).items() if key[3] == group)
    return sum(ns * rate / 1e9 for ns, rate in rates if ns is not None and rate is not None)
