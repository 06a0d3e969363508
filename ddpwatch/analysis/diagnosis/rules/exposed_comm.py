"""Exposed transfer: transfers that no compute hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.buckets import bus_bandwidths
from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, ModuleBucket, Severity
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.rules.level_shift import WINDOW, WORTH_A_LOOK, HighShare, Spell
from ddpwatch.analysis.diagnosis.rules.repeated_reduction import RepeatedReduction
from ddpwatch.analysis.diagnosis.rules.slow_link import SlowLink
from ddpwatch.analysis.diagnosis.thresholds import EXPOSED_SHARE
from ddpwatch.analysis.diagnosis.words.sentences import LayerNames, bucket_named, unit
from ddpwatch.analysis.step import BucketKey
from ddpwatch.common.statistics import RollingMedian


class ExposedComm:
    """Finds it as steps come.

    Args:
        devices: What may be why: a transfer waits for cores, too.
        link: What has slowed transfers: those that are exposed because they became slower are its incident.
        repeated: What need not be transferred, and is an incident of its own, as are buffers.
    """

    def __init__(self, devices: DeviceCauses, link: SlowLink, repeated: RepeatedReduction) -> None:
        self._devices = devices
        self._link = link
        self._repeated = repeated
        self._share = HighShare(EXPOSED_SHARE, self._rest_ns)
        self._bucket_ns: Counter[ModuleBucket] = Counter()
        self._rates: dict[ModuleBucket, RollingMedian] = {}  # bus bandwidth in GB/s
        self._order: tuple[ModuleBucket, ...] = ()  # as launched
        self._measured = False  # whether completions are measured at all

    def add_step(self, facts: StepFacts, least: Mapping[BucketKey, int] | None) -> None:
        """Takes the next step, and per bucket what is exposed on the rank that waits least; None if not measured."""
        split, judged = facts.split, facts.across.counted and facts.split.total
        if least is not None:
            self._measured = True
            if least and split.transfer_ns > WORTH_A_LOOK * split.total:
                self._note_buckets(least)
                self._note_rates(facts.across)
        self._share.add_split(split, self._rest_ns(split) if judged and self._measured else None)

    def _rest_ns(self, split: StepSplit) -> int:
        """Returns transfers of buckets that are no other incident."""
        return max(0, split.transfer_ns - self._repeated.repeated_ns(split) - split.buffers_ns)

    def incidents(self, names: LayerNames | None) -> list[Incident]:
        """Returns what lasts, or comes again soon, and what is over; none for what a slower link explains."""
        return [self._incident(spell, names, is_open) for spell, is_open in self._share.spells(self._is_slower_link)]

    def _note_buckets(self, least: Mapping[BucketKey, int]) -> None:
        """Notes per bucket of a measured step what its transfer is."""
        for key, ns in least.items():
            if ns:
                self._bucket_ns[key[:2]] += ns
        self._order = _order(tuple(least))

    def _note_rates(self, across: StepAcrossRanks) -> None:
        """Notes what the transfers of the bucket reach that is exposed most."""
        most = max(self._bucket_ns, key=self._bucket_ns.__getitem__, default=None)
        if most is None:
            return
        compared = {key: skew for key, skew in across.skew.buckets.items() if key[:2] == most}
        for rate in bus_bandwidths(across, compared).values():
            if rate is not None:
                self._rates.setdefault(most, RollingMedian(WINDOW)).add_value(rate / 1e9)

    def _is_slower_link(self, since: int, is_open: bool) -> bool:
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

    def _incident(self, spell: Spell, names: LayerNames | None, is_open: bool) -> Incident:
        bucket = max(self._bucket_ns, key=self._bucket_ns.__getitem__, default=None)
        place = "" if bucket is None else self._place(bucket)
        is_split = 2 * spell.unknown_ns <= spell.cost_ns
        module, index = bucket or (None, None)
        severity: Severity = "warning" if spell.share >= EXPOSED_SHARE else "info"
        sentence = partial(exposed_sentence, spell.share, bucket, place, names, is_split)
        incident = spell.incident("exposed_comm", severity, sentence, "exposed_comm", is_open)
        rates = self._rates.get(bucket) if bucket is not None else None
        busbw = None if rates is None else [rates.median]
        evidence = incident.evidence | Evidence(bucket_place=place or None, busbw_gbps=busbw)
        found = replace(incident, module=module, bucket=index, evidence=evidence)
        return because(found, spell.cause_by(partial(self._devices.shortage, None, share=spell.share)))

    def _place(self, bucket: ModuleBucket) -> str:
        """Returns whether it is the first one, in the middle, the last one, or the only one; "" if not known."""
        if bucket not in self._order:
            return ""
        if len(self._order) == len(self._bucket_ns) == 1:
            return "only"
        return {self._order[0]: "first", self._order[-1]: "last"}.get(bucket, "middle")


@lru_cache(maxsize=64)
def _order(keys: tuple[BucketKey, ...]) -> tuple[ModuleBucket, ...]:
    """Returns the buckets as they are launched, without what has other uses: that may be used more than once."""
    return tuple(dict.fromkeys(key[:2] for key in keys if not key[4]))


def exposed_sentence(
    share: float,
    bucket: ModuleBucket | None,
    which: str,
    names: LayerNames | None,
    is_split: bool,
    is_open: bool,
) -> str:
    """Names transfers that no compute hides; if waits could not be split off, both.

    Args:
        share: Of a step.
        bucket: The one that is exposed most.
        which: In launch order: ``first``, ``middle``, ``last`` or ``only``; empty if that is not known.
        names: Of parameters.
        is_split: Whether waits were split off.
        is_open: Whether that lasts.
    """
    hides, take = ("hides", "take" if is_split else "takes") if is_open else ("hid", "took")
    what = "exposed transfer: transfers that"
    if not is_split:
        what = "exposed transfer or waiting (unknown which, as not all ranks can be compared): what"
    text = f"{what} no compute {hides} {take} {100 * share:.0f} % of a step"
    if bucket is None:
        return text
    part = "all" if which == "only" else "most"
    the = f"the {which} " if which in ("only", "first", "last") else ""
    middle = ", one in the middle" if which == "middle" else ""
    return f"{text}, {part} of it {the}{unit(names, bucket)} {bucket_named(bucket, names)}{middle}"
