"""Figures that hold for all steps, though only some show them, and how sure they are.

Of every step the duration is known. A watched one also shows its phases and how long its ranks *waited* for
collectives; a full one how much of its communication was *exposed* and how much *hidden*. Which steps are watched is
random (`ddpwatch.sampling.schedule`), so this is survey sampling, stratified by time, as more steps may be watched
while somebody looks, and by duration where a gap separates short steps from long ones.

Exposed communication is what ranks waited, corrected by how much it differs from that in full steps (a two-phase
difference estimator: Cochran, Sampling Techniques, 12.6). The other phases are scaled to the rest of all steps'
duration (a ratio estimator), as watching makes a step longer. What watched steps show has strata with enough of these,
what full ones show besides has larger ones. Where short and long steps are one stratum, because too few of either are
known, waits are a share of their duration, and what is hidden follows it (a regression estimator: 7.3 there). The
interval is the normal theory's, with the correction for a finite population: it is about these steps, and has no width
if all are full. Neighbours need not be independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ddpwatch.analysis.means import ENOUGH_FULL, STARTING_STEPS, Means, with_exposed
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.statistics import student
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.sampling.schedule import COST_PER_OWN, FULL_COST_PER_OWN

CONFIDENCE = 0.95
STEPS_PER_BLOCK = 64
MOST_BLOCKS = 32
SMALL = 0.02  # of a block's steps: so few of a duration leave a gap
PER_DOUBLE = 4  # durations from one to its double: a gap is as wide as one of them
UNSEEN = "unseen"  # what makes a bare step longer: it may be in any phase
_STARTING = -1000  # the duration of starting steps, far from any other
_PAIRS = ("xx", "xy", "xh", "yy", "yh", "hh", "xd", "yd", "hd", "dd")
_PRODUCTS = [(pair, *pair) for pair in _PAIRS]
_SUMS = ("w", "ww", "x", "y", "h", "d", "all", *_PAIRS)
_COUNTS = (
    "steps", "ranks", "total", "watched", "watched_total", "waited", "full", "full_ranks", "difference", "hidden",
)  # fmt: skip


class StepShare(NamedTuple):
    """What one step adds to the estimates: sums over its ranks, in ns.

    Attributes:
        ranks: How many have sent it.
        total: Their durations.
        alone: How long each rank paused alone before it: others wait for that one, in the step. By rank, if at all.
        own: What the probe measured of itself; full steps are longer by that at least.
        waiting: For other ranks, as far as that is known; of a bare step, as much as in one that is like it.
        transfer: What is exposed besides, of a watched step; ``unsplit`` what may be either.
        beyond: What makes it longer than those that are like it, by phase, as far as that is known of each such step:
            waits for a rank that paused, all that makes a stall longer, and of a bare step the rest (`UNSEEN`).
        phases: None if it is not watched. What was not seen of "data" is in "between" (``data_unseen``).
        waited: How long ranks had nothing to do but wait for collectives, copies of their results included.
        exposed, hidden: The communication's two parts; None if not all of it was timed.
    """

    step: int
    ranks: int
    total: int
    own: int = 0
    waiting: int = 0
    transfer: int = 0
    unsplit: int = 0
    beyond: Mapping[str, int] = {}
    phases: Mapping[str, int] | None = None
    data_unseen: bool = False
    waited: int = 0
    exposed: int | None = None
    hidden: int | None = None
    alone: Mapping[int, int] = {}

    @property
    def mean_ns(self) -> float:
        """The mean over its ranks of how long it took."""
        return (self.total + sum(self.alone.values())) / self.ranks

    @property
    def duration(self) -> int:
        """Its duration on a scale of `PER_DOUBLE`; the starting steps have one of their own."""
        if self.step < STARTING_STEPS:
            return _STARTING
        return of_duration((self.total - self.own - sum(self.beyond.values())) / self.ranks)


def of_duration(mean_ns: float) -> int:
    """Returns a duration on a scale of `PER_DOUBLE`."""
    return round(PER_DOUBLE * math.log2(max(mean_ns, 1.0)))


class Estimate(NamedTuple):
    """Means over all steps and ranks but warm-up and aborted ones (ns); None if not known.

    Attributes:
        steps: How many steps that are; ``rank_steps`` counts each as often as it has ranks.
        watched, full: How many of these show phases, and communication.
        phases_ns: They add up to ``step_ns``. Where no completion is timed, "exposed_comm" is what ranks waited.
        alone_ns: The part of "between" that lies before steps: single ranks' pauses, for which others wait.
        unseen_ns: The part of "other" that is only how much longer steps were that are not watched.
        waiting_ns, transfer_ns, unsplit_ns: These add up to ``exposed_ns``; the last is what clocks cannot split.
        exposed_reach_ns, overlap_reach: Half the width of the 95 % interval.
    """

    steps: int = 0
    watched: int = 0
    full: int = 0
    rank_steps: int = 0
    step_ns: float | None = None
    phases_ns: Mapping[str, float] = {}
    alone_ns: float = 0.0
    unseen_ns: float = 0.0
    comm_ns: float | None = None
    exposed_ns: float | None = None
    overlap: float | None = None
    waiting_ns: float | None = None
    transfer_ns: float | None = None
    unsplit_ns: float | None = None
    exposed_reach_ns: float | None = None
    overlap_reach: float | None = None

    @property
    def means(self) -> Means:
        """Its means, beside which those of ranks stand."""
        return Means(self.step_ns, self.phases_ns, self.comm_ns, self.exposed_ns)

    @property
    def too_few(self) -> bool:
        """Whether there are full steps, but not enough for what only they show."""
        return 0 < self.full < ENOUGH_FULL


NOT_KNOWN = Estimate()


@dataclass(slots=True)
class _Stratum:
    """Sums over steps that are alike, over ranks in ns.

    Attributes:
        spread: Sums of means over ranks, in ms, and of their products: what ranks waited in watched steps (``w``,
            ``ww``), and in full ones that (``x``), the difference (``y``), what was hidden (``h``), and the duration
            without what the stamps take (``d``; of all steps ``all``).
        mixed: It has steps of durations that a gap separates.
        full_ranks: Of full steps, how many ranks they have in all; the others accordingly.
        difference: Of full steps, what is exposed less what ranks waited.
    """

    steps: int = 0
    ranks: int = 0
    total: int = 0
    watched: int = 0
    watched_total: int = 0
    waited: int = 0
    phases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    full: int = 0
    full_ranks: int = 0
    difference: int = 0
    hidden: int = 0
    spread: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    mixed: bool = False

    def add_share(self, share: StepShare) -> None:
        """Adds one step."""
        total = share.total - sum(share.beyond.values())
        self.steps += 1
        self.ranks += share.ranks
        self.total += total
        unit, spread, is_full = share.ranks * NS_PER_MS, self.spread, share.exposed is not None
        duration = (total - (FULL_COST_PER_OWN if is_full else COST_PER_OWN) * share.own) / unit
        spread["all"] += duration
        if share.phases is None:
            return
        self.watched += 1
        self.watched_total += total
        own_waits = share.waited - share.beyond.get("exposed_comm", 0)
        self.waited += own_waits
        for phase, ns in share.phases.items():
            self.phases[phase] += ns - share.beyond.get(phase, 0)
        waited = own_waits / unit
        spread["w"] += waited
        spread["ww"] += waited * waited
        if share.exposed is None or share.hidden is None:
            return
        self.full += 1
        self.full_ranks += share.ranks
        self.difference += share.exposed - share.waited
        self.hidden += share.hidden
        values = {"x": waited, "y": (share.exposed - share.waited) / unit, "h": share.hidden / unit, "d": duration}
        for name, value in values.items():
            spread[name] += value
        for pair, one, other in _PRODUCTS:
            spread[pair] += values[one] * values[other]

    def merge(self, other: _Stratum) -> None:
        """Adds another's steps."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.mixed = self.mixed or other.mixed
        for phase, ns in other.phases.items():
            self.phases[phase] += ns
        for name, product in other.spread.items():
            self.spread[name] += product

    def enough(self, timed: bool) -> bool:
        """Returns whether its figures have a spread. ``timed``: also those of full steps."""
        return self.watched >= ENOUGH_FULL and (not timed or self.full >= ENOUGH_FULL)

    def slope(self) -> float:
        """Returns how much longer what is hidden is in a longer step; 0 where duration is not to say."""
        spread = _covariance(self.spread, "dd", self.full) if self.mixed and self.full > ENOUGH_FULL else 0.0
        return _covariance(self.spread, "hd", self.full) / spread if spread > 0 else 0.0

    def longer(self) -> float:
        """Returns by how much longer its steps are than the full ones of them, in the mean (ms)."""
        return self.spread["all"] / self.steps - self.spread["d"] / self.full

    def all_hidden(self) -> float:
        """Returns what is hidden in all its steps (ns, over ranks)."""
        return max(self.ranks * (self.hidden / self.full_ranks + self.slope() * self.longer() * NS_PER_MS), 0.0)

    def all_waited(self) -> float:
        """Returns what ranks waited in all its steps (ns, over ranks)."""
        if self.mixed and self.watched_total:
            return self.waited * self.total / self.watched_total
        return self.waited * self.steps / self.watched

    def variance(self, x: float, y: float, h: float) -> float:
        """Returns the variance of the sum, over its steps, of so many times the three figures of a step (ms²)."""
        steps = self.steps
        if steps <= self.full or self.full < ENOUGH_FULL:
            return 0.0
        of = {pair: _covariance(self.spread, pair, self.full) for pair in _PAIRS}
        beyond = 0.0
        if slope := self.slope():  # what of the hidden does not follow the duration
            left = max(of["hh"] - slope * of["hd"], 0.0) * (self.full - 1) / (self.full - 2)
            of |= {"hh": left, "xh": of["xh"] - slope * of["xd"], "yh": of["yh"] - slope * of["yd"]}
            beyond = (h * steps * self.longer()) ** 2 * left / of["dd"] / (self.full - 1)
        first = x * x * _covariance(self.spread, "ww", self.watched)
        first += 2 * max(0.0, x * (y * of["xy"] + h * of["xh"]))
        second = y * y * of["yy"] + 2 * y * h * of["yh"] + h * h * of["hh"]
        alone = (steps / self.watched - 1) * max(first, 0.0) + (steps / self.full - 1) * max(second, 0.0)
        return steps * alone + beyond


def _covariance(sums: Mapping[str, float], pair: str, count: int) -> float:
    return (sums[pair] - sums[pair[0]] * sums[pair[1]] / count) / (count - 1)


_Durations = dict[int, _Stratum]


class _Gathered:
    """Strata that have enough steps: as many blocks together as have.

    Args:
        timed: See `_Stratum.enough`.

    Attributes:
        until: The newest block in here.
    """

    def __init__(self, timed: bool) -> None:
        self.timed = timed
        self.until = -1
        self._found: list[tuple[_Durations, list[_Stratum]]] = []
        self._waiting: _Durations = {}

    def add_block(self, number: int, durations: _Durations) -> None:
        """Adds the next block, with those that still wait for more steps."""
        self.until = number
        _merge(self._waiting, durations)
        apart = _apart(self._waiting)
        if all(one.enough(self.timed) for one in apart.values()):
            self._found.append((self._waiting, _joined(apart, self.timed)))
            self._waiting = {}

    def strata(self, newest: _Durations) -> list[_Stratum]:
        """Returns all strata, with those of one more block, which is not kept. Blocks without enough join the last."""
        with_newest = _Gathered(self.timed)
        with_newest._found = self._found.copy()
        _merge(with_newest._waiting, self._waiting)
        with_newest.add_block(self.until, newest)
        found, rest = with_newest._found, with_newest._waiting
        if rest:
            if found:
                _merge(rest, found.pop()[0])
            found.append((rest, _joined(_apart(rest), self.timed)))
        return [stratum for _, strata in found for stratum in strata]


class Estimator:
    """Takes step after step, and estimates at any time. Its memory is bounded."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Durations] = {}  # by time
        self._gathered = {timed: _Gathered(timed) for timed in (False, True)}  # all but the newest of the last estimate
        self._stride = STEPS_PER_BLOCK
        self._waiting = self._transfer = self._unsplit = 0
        self._beyond: Counter[str] = Counter()
        self._alone = 0
        self._data_unseen = False

    def add_share(self, share: StepShare) -> None:
        """Adds a step that is neither warm-up nor aborted."""
        number = share.step // self._stride
        block = self._blocks.setdefault(number, {})
        if number <= self._gathered[False].until:
            self._forget_gathered()
        stratum = block.get(key := share.duration)
        if stratum is None:
            stratum = block[key] = _Stratum()
        stratum.add_share(share)
        self._waiting += share.waiting
        self._beyond.update(share.beyond)
        self._alone += sum(share.alone.values())
        if share.phases is not None:
            self._unsplit += share.unsplit
            self._transfer += share.transfer
            self._data_unseen = self._data_unseen or share.data_unseen
        if len(self._blocks) > MOST_BLOCKS:
            self._stride *= 2
            self._forget_gathered()
            blocks, self._blocks = self._blocks, {}
            for number, durations in blocks.items():
                _merge(self._blocks.setdefault(number // 2, {}), durations)

    def estimate(self, reach: bool = True) -> Estimate:
        """Returns what is known so far; without ``reach``, not how sure that is, which takes longest."""
        every = [stratum for block in self._blocks.values() for stratum in block.values()]
        steps, ranks = sum([one.steps for one in every]), sum([one.ranks for one in every])
        watched, full = sum([one.watched for one in every]), sum([one.full for one in every])
        if not ranks:
            return NOT_KNOWN
        step_ns = (sum([one.total for one in every]) + sum(self._beyond.values()) + self._alone) / ranks
        found = Estimate(steps, watched, full, ranks, step_ns, alone_ns=self._alone / ranks)
        found = found._replace(unseen_ns=self._beyond[UNSEEN] / ranks)
        if not watched:
            return found
        strata = self._strata(timed=False)
        phases = self._phases(strata, ranks)
        if full < ENOUGH_FULL:
            if not phases["exposed_comm"]:  # where nobody was seen to wait, perhaps no wait was looked for
                del phases["exposed_comm"]
            return found._replace(phases_ns=phases)
        timed = [one for one in self._strata(timed=True) if one.full]
        found = self._with_exposed(found, timed, phases)
        return _with_reach(found, strata, timed) if reach else found

    def _phases(self, strata: list[_Stratum], ranks: int) -> dict[str, float]:
        """Returns the mean phases; "exposed_comm" is what ranks waited."""
        sums = dict.fromkeys(PHASES, 0.0)
        for one in strata:
            if not one.watched:
                continue
            waited = one.all_waited()
            own = {**one.phases, "other": one.phases["other"] + one.phases["exposed_comm"] - one.waited}
            own["exposed_comm"] = 0
            weight = (one.total - waited) / (one.watched_total - one.waited) if one.watched_total > one.waited else 0.0
            for phase, ns in own.items():
                sums[phase] += ns * weight
            sums["exposed_comm"] += waited
        for phase, ns in self._beyond.items():
            sums["other" if phase == UNSEEN else phase] += ns
        sums["between"] += self._alone
        if self._data_unseen:
            sums["between"] += sums.pop("data")
        return {phase: ns / ranks for phase, ns in sums.items()}

    def _with_exposed(self, found: Estimate, timed: list[_Stratum], phases: dict[str, float]) -> Estimate:
        ranks = found.rank_steps
        difference = sum([one.ranks / one.full_ranks * one.difference for one in timed]) / ranks
        hidden = sum([one.all_hidden() for one in timed]) / ranks
        waiting = self._waiting / ranks
        exposed = max(phases["exposed_comm"] + difference, waiting, 0.0)
        comm = exposed + hidden
        unsplit = self._unsplit / max(self._unsplit + self._transfer, 1) * (exposed - waiting)
        return found._replace(
            phases_ns=with_exposed(phases, exposed),
            comm_ns=comm,
            exposed_ns=exposed,
            overlap=hidden / comm if comm else None,
            waiting_ns=waiting,
            transfer_ns=exposed - waiting - unsplit,
            unsplit_ns=unsplit,
        )

    def _strata(self, timed: bool) -> list[_Stratum]:
        *older, newest = sorted(self._blocks)
        gathered = self._gathered[timed]
        for number in older:
            if number > gathered.until:
                gathered.add_block(number, self._blocks[number])
        return gathered.strata(self._blocks[newest])

    def _forget_gathered(self) -> None:
        self._gathered = {timed: _Gathered(timed) for timed in self._gathered}


def _merge(into: _Durations, durations: _Durations) -> None:
    for key, stratum in durations.items():
        into.setdefault(key, _Stratum()).merge(stratum)


def _apart(durations: _Durations) -> _Durations:
    """Returns strata that a gap separates, by the first duration of each; what lies in a gap is with the nearest."""
    steps = sum([one.steps for one in durations.values()])
    common = sorted(key for key, one in durations.items() if one.steps >= SMALL * steps)
    firsts = {key: key for key in common}
    for before, key in pairwise(common):
        if key - before == 1:
            firsts[key] = firsts[before]
    found: _Durations = {}
    for key, one in durations.items():
        near = min(common, key=lambda other: abs(other - key))
        found.setdefault(firsts[near], _Stratum()).merge(one)
    return found


def _joined(strata: _Durations, timed: bool) -> list[_Stratum]:
    """Returns the strata, those with too few steps joined with the one next in duration."""
    left = sorted(strata.items())
    while len(left) > 1:
        poor = next((place for place, (_, one) in enumerate(left) if not one.enough(timed)), None)
        if poor is None:
            break
        key, one = left.pop(poor)
        near = min(range(len(left)), key=lambda place: abs(left[place][0] - key))
        left[near][1].merge(one)
        left[near][1].mixed = True
    return [one for _, one in left]


def _with_reach(found: Estimate, strata: list[_Stratum], timed: list[_Stratum]) -> Estimate:
    share, comm = 1.0 if found.overlap is None else found.overlap, found.comm_ns
    of_overlap = (-share, -share, 1 - share)
    return found._replace(
        exposed_reach_ns=_reach([*_waits(strata), *_figures(timed, (0.0, 1.0, 0.0))], found.steps),
        overlap_reach=_reach(_figures(timed, of_overlap), found.steps) / comm if comm else None,
    )


_Variance = tuple[float, int]  # of a sum over all steps (ms²), and its degrees of freedom


def _waits(strata: list[_Stratum]) -> list[_Variance]:
    """Returns the variances of what ranks waited."""
    return [
        (one.steps * (one.steps / one.watched - 1) * _covariance(one.spread, "ww", one.watched), one.watched - 1)
        for one in strata
        if one.steps > one.watched >= ENOUGH_FULL
    ]


def _figures(strata: list[_Stratum], factors: tuple[float, float, float]) -> list[_Variance]:
    """Returns the variances of so many times the figures of full steps (see `_Stratum.variance`)."""
    return [(one.variance(*factors), one.full - (2 if one.slope() else 1)) for one in strata]


def _reach(variances: list[_Variance], steps: int) -> float:
    """Returns half the width of the interval of a mean over all steps (ns), by Satterthwaite's degrees of freedom."""
    variance = sum([each for each, _ in variances])
    if not variance:
        return 0.0
    freedom = variance**2 / sum([each**2 / free for each, free in variances if each])
    return student(CONFIDENCE, freedom) * math.sqrt(variance) / steps * NS_PER_MS
