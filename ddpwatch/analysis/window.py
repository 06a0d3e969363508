"""The newest steps of a run summed up: medians per rank, the exposed time per bucket, and the slowest rank.

The definitions are those of ``docs/metrics.md``. Times in ns; what was not measured, or cannot be compared, is None.
With a thousand ranks this has to be cheap: a step is worked out once, and a rank's medians when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median, median_low

from ddpwatch.analysis.across_ranks import Arrivals, RankFacts, StepAcrossRanks
from ddpwatch.analysis.diagnosis.findings import LATE_MS, LATE_SHARE
from ddpwatch.analysis.ranks import BucketKey
from ddpwatch.analysis.step import NS_PER_MS, PHASES
from ddpwatch.sampling.bounds import median_bounds

NOISE_NS = LATE_MS * NS_PER_MS
NOISE_SHARE = LATE_SHARE
ENOUGH_STEPS = 8
JUDGED_STEPS = 16  # the newest, of these the watched: a rank that becomes slow is named, and cleared, within 20
CERTAIN = 0.95  # of a late rank's median, and of that of the others
_COMPARED_PHASES = ("input", "forward", "backward")
_FEW_RANKS = 16
_REFERENCES = 8  # other ranks that a late one's gradients are compared with


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Medians of one rank. ``phases_ns`` are the six phases of a step."""

    rank: int
    step_ns: float | None = None
    late_ns: float | None = None
    wait_ns: float | None = None
    overlap: float | None = None
    exposed_ns: float | None = None
    cost: float | None = None
    phases_ns: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that is late beyond noise.

    Attributes:
        late_ns: Its median lateness.
        bucket: Index of the first bucket that it launches late.
        phase: The phase of the step (`PHASES`) in which it needs more time than the others; empty if none stands out.
        excess_ns: How much more, median against median.
        param: The first parameter whose gradient comes that late, where it is the backward.
        steps: How many steps say so.
    """

    rank: int
    late_ns: float
    bucket: int | None
    phase: str
    excess_ns: float
    param: int | None = None
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the newest steps and all ranks. ``bucket_exposed_ns`` is by bucket index, ``rate`` in steps/s.

    ``exposed_ns`` is known of steps recorded in full, ``waited_ns`` of all that were watched: for how long the backward
    did nothing but wait for its buckets.
    """

    count: int = 0
    rate: float | None = None
    step_ns: float | None = None
    comm_ns: float | None = None
    overlap: float | None = None
    exposed_ns: float | None = None
    waited_ns: float | None = None
    measured: bool = True
    communicates: bool = False
    cost: float | None = None
    input_ns: float | None = None
    ranks: Mapping[int, RankSummary] = field(default_factory=dict)
    bucket_exposed_ns: dict[int, float] = field(default_factory=dict)
    slowest: Straggler | None = None


class StepFacts:
    """What one step contributes, worked out once. The sorted columns make the median over many steps cheap."""

    def __init__(self, view: StepAcrossRanks) -> None:
        self.view = view
        self.ranks: dict[int, RankFacts] = dict(view.all_facts())
        self.arrivals: Arrivals = view.arrivals
        figures = [fact.figures for fact in self.ranks.values()]
        self.step_ns = sorted(figure.step_ns for figure in figures)
        self.input_ns = sorted(figure.phases_ns["input"] for figure in figures)
        self.waited_ns = sorted(figure.phases_ns["exposed_comm"] for figure in figures)
        self.comm_ns = sorted(figure.comm_ns for figure in figures if figure.comm_ns is not None)
        self.overlap = sorted(figure.overlap for figure in figures if figure.overlap is not None)
        self.exposed_ns = sorted(f.exposed_ns for f in figures if f.comm_ns and f.exposed_ns is not None)
        self.cost = sorted(fact.cost for fact in self.ranks.values() if fact.cost is not None)
        self.usual_late = median_low(self.arrivals.late.values()) if self.arrivals.late else None
        self.bucket_exposed = _bucket_exposed(self.ranks.values())
        self._phases: dict[str, float] = {}

    def phase_p50(self, phase: str) -> float:
        """The median of one of the `PHASES` over the ranks."""
        if phase not in self._phases:
            self._phases[phase] = median(fact.figures.phases_ns[phase] for fact in self.ranks.values())
        return self._phases[phase]


def _bucket_exposed(facts: Iterable[RankFacts]) -> dict[int, float]:
    """Per bucket index the median over the ranks."""
    alike: dict[tuple[BucketKey, ...], list[tuple[int, ...]]] = {}
    for fact in facts:
        if fact.exposed:
            alike.setdefault(fact.keys, []).append(fact.exposed)
    samples: dict[int, list[int]] = {}
    for keys, rows in alike.items():
        for key, column in zip(keys, zip(*rows, strict=True), strict=True):
            samples.setdefault(key[1], []).extend(column)
    return {index: median(values) for index, values in samples.items()}


class RankSummaries(Mapping[int, RankSummary]):
    """The medians of every rank in the newest step, each worked out when it is first read."""

    def __init__(self, facts: Sequence[StepFacts]) -> None:
        self._facts = facts
        self._ranks = sorted(facts[-1].ranks)
        self._known: dict[int, RankSummary] = {}

    def __getitem__(self, rank: int) -> RankSummary:
        if rank not in self._facts[-1].ranks:
            raise KeyError(rank)
        if rank not in self._known:
            self._known[rank] = _rank_summary(rank, self._facts)
        return self._known[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class Summariser:
    """Sums up a window that moves on: a step is worked out when it comes in, and kept until it leaves."""

    def __init__(self) -> None:
        self.facts: dict[int, StepFacts] = {}

    def summarise(self, views: Sequence[StepAcrossRanks]) -> Summary:
        """Sums up the given steps (oldest first)."""
        known, self.facts = self.facts, {}
        for view in views:
            facts = known.get(view.step)
            if facts is None or len(facts.ranks) != len(view):
                facts = StepFacts(view)
            self.facts[view.step] = facts
        return _summary(list(self.facts.values()))


def summarise(views: Sequence[StepAcrossRanks]) -> Summary:
    """Sums up the given steps (oldest first)."""
    return Summariser().summarise(views)


def _summary(facts: Sequence[StepFacts]) -> Summary:
    if not facts:
        return Summary()
    ranks = RankSummaries(facts)
    return Summary(
        count=len(facts),
        rate=_rate(facts),
        step_ns=_merged_p50([fact.step_ns for fact in facts]),
        comm_ns=_merged_p50([fact.comm_ns for fact in facts]),
        overlap=_merged_p50([fact.overlap for fact in facts]),
        exposed_ns=_merged_p50([fact.exposed_ns for fact in facts]),
        waited_ns=_merged_p50([fact.waited_ns for fact in facts]),
        measured=any(fact.comm_ns for fact in facts),
        communicates=any(rank.keys for fact in facts for rank in fact.ranks.values()),
        cost=_merged_p50([fact.cost for fact in facts]),
        input_ns=_merged_p50([fact.input_ns for fact in facts]),
        ranks=ranks,
        bucket_exposed_ns=_exposed_p50(facts),
        slowest=_slowest(_judged(facts)),
    )


def _merged_p50(columns: Sequence[Sequence[float]]) -> float | None:
    """The median over sorted columns; sorting what is sorted piece by piece is a merge."""
    values = sorted(chain.from_iterable(columns))
    half = len(values) // 2
    if not values:
        return None
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def _p50(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _rate(facts: Sequence[StepFacts]) -> float | None:
    """Steps per second of the lowest rank, from the durations of those that were watched: steps leave no gap."""
    rank = min(facts[-1].ranks, default=None)
    if rank is None:
        return None
    durations = [fact.ranks[rank].figures.step_ns for fact in facts if rank in fact.ranks]
    return len(durations) / sum(durations) * 1e9 if sum(durations) else None


def _rank_summary(rank: int, facts: Sequence[StepFacts]) -> RankSummary:
    own = [fact.ranks[rank] for fact in facts if rank in fact.ranks]
    rows = [fact.figures for fact in own]
    return RankSummary(
        rank=rank,
        step_ns=_p50(row.step_ns for row in rows),
        late_ns=_p50(_late(rank, facts)),
        wait_ns=_p50(fact.arrivals.wait.get(rank) for fact in facts),
        overlap=_p50(row.overlap for row in rows),
        exposed_ns=_p50(row.exposed_ns if row.comm_ns else None for row in rows),
        cost=_p50(fact.cost for fact in own),
        phases_ns={phase: median(row.phases_ns[phase] for row in rows) for phase in PHASES},
    )


def _late(rank: int, facts: Sequence[StepFacts]) -> list[int]:
    return [fact.arrivals.late[rank] for fact in facts if rank in fact.arrivals.late]


def _exposed_p50(facts: Sequence[StepFacts]) -> dict[int, float]:
    """Per bucket index the median over the steps."""
    indices = sorted({index for fact in facts for index in fact.bucket_exposed})
    return {
        index: median(fact.bucket_exposed[index] for fact in facts if index in fact.bucket_exposed) for index in indices
    }


# -- the slowest rank ----------------------------------------------------------------------------------------


def _judged(facts: Sequence[StepFacts]) -> Sequence[StepFacts]:
    """The newest steps, and where few of them were watched some older ones."""
    newest = [fact for fact in facts if fact.view.step > facts[-1].view.step - JUDGED_STEPS]
    return newest if len(newest) >= ENOUGH_STEPS else facts[-ENOUGH_STEPS:]


def _slowest(facts: Sequence[StepFacts]) -> Straggler | None:
    """The latest rank, if its lateness stands clear of what is usual.

    That is: its median surely lies above that of a typical rank, by more than `NOISE_NS` and by more than
    `NOISE_SHARE` of a step. Of 16 steps 12 have to say so, of 8 all but one.
    """
    late = {rank: values for rank in facts[-1].ranks if (values := _late(rank, facts))}
    if len(late) < 2 or len(facts) < ENOUGH_STEPS:
        return None
    rank = max(late, key=lambda rank: median(late[rank]))
    usual = [float(fact.usual_late) for fact in facts if fact.usual_late is not None]
    (low, _), (_, high) = median_bounds(late[rank], CERTAIN), median_bounds(usual, CERTAIN)
    step_ns = median(fact.ranks[rank].figures.step_ns for fact in facts if rank in fact.ranks)
    if low - high < max(NOISE_NS, NOISE_SHARE * step_ns):
        return None
    p50 = median(late[rank])
    phase, excess = _cause(rank, p50, facts)
    param = _late_param(rank, p50, _with_hooks(rank, facts)) if phase == "backward" else None
    return Straggler(rank, p50, _first_late_bucket(rank, p50, facts), phase, excess, param, len(facts))


def _first_late_bucket(rank: int, late_ns: float, facts: Sequence[StepFacts]) -> int | None:
    """The first bucket, in launch order, that the rank launches at least half of its lateness late."""
    samples: dict[int, list[int]] = {}
    for fact in facts:
        own = fact.ranks.get(rank)
        launches = dict(zip(own.keys, own.launch, strict=True)) if own is not None else {}
        for key, first in zip(fact.arrivals.keys, fact.arrivals.first, strict=True):
            samples.setdefault(key[1], []).append(launches[key] - first)
    return next((index for index, values in samples.items() if 2 * median(values) >= late_ns), None)


def _cause(rank: int, late_ns: float, facts: Sequence[StepFacts]) -> tuple[str, float]:
    """The phase of the step that explains at least half of the rank's lateness, and its excess over the others."""
    excess = {}
    for phase in _COMPARED_PHASES:
        own = median(fact.ranks[rank].figures.phases_ns[phase] for fact in facts if rank in fact.ranks)
        excess[phase] = own - median(_others(rank, phase, fact) for fact in facts)
    phase = max(excess, key=excess.__getitem__)
    return (phase, excess[phase]) if late_ns and 2 * excess[phase] >= late_ns else ("", 0.0)


def _others(rank: int, phase: str, fact: StepFacts) -> float:
    """The median over the other ranks; among many, one more or less does not change it."""
    if len(fact.ranks) > _FEW_RANKS:
        return fact.phase_p50(phase)
    return median(other.figures.phases_ns[phase] for number, other in fact.ranks.items() if number != rank)


def _with_hooks(rank: int, facts: Sequence[StepFacts]) -> StepAcrossRanks:
    """The newest step in which the rank tells when each gradient came, if there is one: not every shadow does."""
    views = (fact.view for fact in reversed(facts))
    tells = (view for view in views if rank in view.members and view.ranks[rank].hook_param)
    return next(tells, facts[-1].view)


def _late_param(rank: int, late_ns: float, view: StepAcrossRanks) -> int | None:
    """The first parameter, in firing order, whose gradient the rank has at least half of its lateness after others."""
    others = [number for number in sorted(view.members) if number != rank][:_REFERENCES]
    if rank not in view.members or not others:
        return None
    usual = [_fired(view, number) for number in others]
    for param, at in _fired(view, rank).items():
        seen = [fired[param] for fired in usual if param in fired]
        if seen and 2 * (at - median(seen)) >= late_ns:
            return param
    return None


def _fired(view: StepAcrossRanks, rank: int) -> dict[int, int]:
    """When each parameter's gradient came (ns, absolute), in firing order."""
    step = view.ranks[rank]
    return {param: step.start_ns + at for param, at in zip(step.hook_param, step.hook_ns, strict=True)}
