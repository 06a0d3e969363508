"""Transfers that have become slower than they were, in all process groups or in some."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.buckets import bus_bandwidths
from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import LOOK_AGAIN_NS, DeviceCause, DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.rules.level_shift import LevelShift, Spell, Spells
from ddpwatch.analysis.diagnosis.thresholds import COSTLY_SHARE, KEEP_ENDED, OVER_SHARE, WORSE_FACTOR
from ddpwatch.analysis.diagnosis.words.wording import longer_than, ranks_named
from ddpwatch.common.statistics import median

NEWEST = 5  # full steps, all of them slower
GONE = 1024  # steps without a transfer, after which a group is forgotten


class _GroupTransfers(LevelShift):
    """The time that a group's transfers take in full steps.

    Attributes:
        seen: The newest step.
        moved: What crosses a rank's link in a step (bytes), of which busbw is the rate; 0 if that is not known.
        slower: How many times as long they take since they are slower.
    """

    def __init__(self) -> None:
        super().__init__(WORSE_FACTOR, NEWEST, is_each=True)
        self.seen, self.moved, self.slower = 0, 0.0, 1.0


class SlowLink(Spells):
    """Finds them as steps come. All that are slower at a time are one incident.

    Args:
        devices: What may be why.

    Attributes:
        since_end: Full steps since the newest one that is over.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        super().__init__(self._longer_ns)
        self.since_end = 0
        self._devices = devices
        self._groups: dict[int, _GroupTransfers] = {}
        self._slow: dict[int, _GroupTransfers] = {}  # since the first one became slower
        self._ranks: set[int] = set()  # members of these groups
        self._among: tuple[int, ...] = ()  # the same; empty for all ranks
        self._usual_share = 0.0
        self._ended: deque[Incident] = deque(maxlen=KEEP_ENDED)

    def _longer_ns(self, split: StepSplit) -> int:
        return max(0, int(split.transfer_ns - self._usual_share * split.total))

    def add_step(self, across: StepAcrossRanks) -> None:
        """Takes a full step."""
        self.since_end += 1
        self._groups = {group: one for group, one in self._groups.items() if not self._is_gone(one, across)}
        for group, (least, most) in _transfers(across).items():
            one = self._groups.setdefault(group, _GroupTransfers())
            one.seen = across.step
            one.add_value(across.step, least, COSTLY_SHARE * across.longest_ns, most)
            if one.since is not None:
                one.slower = one.level / one.usual
                if group not in self._slow:
                    self._add_group(group, one, across)
        if (lasting := self.lasting) is None:
            return
        lasting.cause_by(self._cause, LOOK_AGAIN_NS)
        if all(one.since is None or self._is_gone(one, across) for one in self._slow.values()):
            self._ended.append(self._incident(lasting, is_open=False))
            self.lasting = None
            self._slow, self._ranks, self.since_end = {}, set(), 0

    def _is_gone(self, one: _GroupTransfers, across: StepAcrossRanks) -> bool:
        return across.step - one.seen > GONE

    def _add_group(self, group: int, one: _GroupTransfers, across: StepAcrossRanks) -> None:
        """Takes a group whose transfers have become slower."""
        self._slow[group] = one
        one.moved = _moved(across, group)
        self._ranks.update(across.members_of(group) or across.members)
        self._among = () if self._ranks >= set(across.members) else tuple(sorted(self._ranks))
        if self.lasting is None:
            since = one.since or 0
            before = [split.transfer_ns / split.total for split in self.recent if split.step < since and split.total]
            self._usual_share = median(before) if before else 0.0
            self.start(since)

    def incidents(self) -> list[Incident]:
        """Returns those that are over, and the one that lasts."""
        return [*self._ended, *([] if self.lasting is None else [self._incident(self.lasting, is_open=True)])]

    def _cause(self, start_ns: int, end_ns: int) -> DeviceCause | None:
        return self._devices.cause_among(self._among, start_ns, end_ns, self.lasting.share if self.lasting else 0.0)

    def _incident(self, spell: Spell, is_open: bool) -> Incident:
        slowest = max(self._slow.values(), key=lambda one: one.slower)
        before = slowest.moved / slowest.usual
        busbw = (before, before / slowest.slower) if before else None
        minor = slowest.slower < 1 + OVER_SHARE * (WORSE_FACTOR - 1) or (spell.span_ns and spell.share < COSTLY_SHARE)
        sentence = partial(link_sentence, slowest.slower, self._among, busbw)
        incident = spell.incident("slow_link", "info" if minor else "warning", sentence, "exposed_comm", is_open)
        evidence = Evidence(slower=slowest.slower, busbw_gbps=busbw and list(busbw))
        gain = spell.share if spell.span_ns else None
        incident = replace(incident, ranks=self._among, gain=gain, evidence=evidence)
        return because(incident, spell.cause)


def _transfers(across: StepAcrossRanks) -> dict[int, tuple[int, int]]:
    """Returns what the transfers of each group add up to (ns): at least, and at most, as clocks may hide some."""
    skew, found = across.skew, dict[int, tuple[int, int]]()
    for key, bucket in skew.buckets.items():
        least, most = found.get(key[3], (0, 0))
        known = bucket.transfer
        found[key[3]] = least + (known or 0), most + (skew.error if known is None else known)
    return found


def _moved(across: StepAcrossRanks, group: int) -> float:
    """Returns what crosses each rank's link in a step, as busbw counts it (bytes); of transfers that are known."""
    compared = {key: bucket for key, bucket in across.skew.buckets.items() if key[3] == group}
    rates = ((compared[key].transfer, rate) for key, rate in bus_bandwidths(across, compared).items())
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
    text = f"transfers{among} {'take' if is_open else 'took'} {longer_than(slower, 'before')}"
    return text if busbw is None else f"{text} (busbw {busbw[1]:.3g} instead of {busbw[0]:.3g} GB/s)"
